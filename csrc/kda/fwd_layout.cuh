// What the producer and consumer warps of the forward kernel share: sizes, shared memory, the ring of slots, and the
// sequence a block works on.
#pragma once

#include "device.cuh"
#include "fwd.h"

namespace flash_kda {

constexpr int kChunk = 16;
constexpr int kDim = 128;  // K = V
constexpr int kBlocks = kDim / 16;
constexpr int kWarp = 32;
constexpr int kConsumerWarps = 4;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;

// ---- per architecture ---------------------------------------------------------------------------
struct Config {
  int producers;  // warps
  int slots;      // chunks in flight
  constexpr int threads() const { return (kConsumerWarps + producers) * kWarp; }
};
constexpr Config kConfigLarge{8, 11};  // 227 KB of shared memory a block
constexpr Config kConfigSmall{4, 4};   // the sm_120 family: 99 KB

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300
constexpr Config kConfig = kConfigSmall;
#else
constexpr Config kConfig = kConfigLarge;
#endif
// Up to eight warps every thread can have the 225 registers a consumer needs. Beyond, the roles trade: 168 a thread at
// launch, these after they have parted.
constexpr bool kMoveRegisters = kConfig.threads() > 256;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 136;
static_assert(kConsumerWarps * kConsumerRegisters + kConfigLarge.producers * kProducerRegisters <=
                  (kConsumerWarps + kConfigLarge.producers) * 168,
              "the register file of the block");

// ---- shared memory ------------------------------------------------------------------------------
// A tile is [16 tokens][128 channels] bf16, as two halves of 64 channels with 128-byte rows whose 16-byte pieces are
// XOR-swizzled by the row: free of bank conflicts for ldmatrix (and the 128-byte swizzle that wgmma and TMA know).
constexpr int kRowBytes = 128;
constexpr int kHalfBytes = kChunk * kRowBytes;
constexpr int kTileBytes = 2 * kHalfBytes;

// Byte offset of the 16-byte piece (8 channels) `piece` of row `row` in a tile.
__device__ __forceinline__ int tile_offset(int row, int piece) {
  return (piece >> 3) * kHalfBytes + row * kRowBytes + (((piece ^ row) & 7) << 4);
}

// q, k and g arrive raw and become Qd, Kd and Kt in place: each lane rewrites exactly the words it read. The output
// later overwrites v, each warp its own columns.
struct Tiles {
  uint8_t q[kTileBytes], k[kTileBytes], g[kTileBytes], v[kTileBytes];
};

constexpr int kGamGroup = 36;  // 32 decays of one lane class + 4 floats of padding: four 16-byte reads, four bank groups

struct Extras {
  uint4 frag_a[kWarp];  // X - I (three 8x8 blocks), P block (0,0), as mma B fragments
  uint2 frag_b[kWarp];  // P blocks (1,0), (1,1)
  float gam[4 * kGamGroup];
  float beta[kChunk];
};

struct ProducerScratch {
  uint8_t k_inv[kTileBytes];  // k^ exp(-G)
  float2 norm[kChunk];        // 1/|q|*scale, 1/|k|
};

template <int kProducers, int kSlots>
struct Smem {
  Tiles tiles[kSlots];
  Extras extras[kSlots];
  ProducerScratch scratch[kProducers];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
};
using SmemArch = Smem<kConfig.producers, kConfig.slots>;
static_assert(sizeof(Smem<kConfigLarge.producers, kConfigLarge.slots>) <= 227 * 1024, "sm_90 and sm_100 have 227 KB a block");
static_assert(sizeof(Smem<kConfigSmall.producers, kConfigSmall.slots>) <= 99 * 1024, "sm_120 has 99 KB a block");

// One chunk's place in the ring.
struct Slot {
  Tiles& tiles;
  Extras& extras;
};

// A place in the ring of slots, and the parity of the barrier phase that belongs to this pass over it.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int n) {
    slot += n;
    if (slot >= kConfig.slots) {
      slot -= kConfig.slots;
      parity ^= 1;
    }
  }
};
static_assert(kConfig.producers <= kConfig.slots, "advance() wraps once");

// ---- fragment addresses -------------------------------------------------------------------------
// Where this lane's row starts for ldmatrix.x4 over a tile, for the two orders of its four 8x8 matrices:
//   rows_first: (rows 0-7, left), (8-15, left), (0-7, right), (8-15, right)    A operand; B operand by .trans
//   cols_first: (rows 0-7, left), (0-7, right), (8-15, left), (8-15, right)    B operand
// Entry i is the offset of channel block i of a half. Kept in registers: recomputing the XOR for each load costs as
// much as the loads.
struct FragAddr {
  uint32_t rows_first[4], cols_first[4];
};

__device__ __forceinline__ FragAddr make_frag_addr(int lane) {
  const int low = (lane >> 3) & 1, high = lane >> 4;
  FragAddr at;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at.rows_first[i] = tile_offset((lane & 7) + 8 * low, 2 * i + high);
    at.cols_first[i] = tile_offset((lane & 7) + 8 * high, 2 * i + low);
  }
  return at;
}

__device__ __forceinline__ uint32_t frag_addr(uint32_t tile, const uint32_t (&offset)[4], int block) {
  return tile + offset[block & 3] + (block >> 2) * kHalfBytes;
}

// Position of the decay of channel 8j + 2t + b: a consumer lane of class t = lane % 4 reads its 32 as eight float4.
__device__ __forceinline__ int gam_index(int channel) {
  return ((channel & 7) >> 1) * kGamGroup + (channel >> 3) * 2 + (channel & 1);
}

// ---- the sequence a block works on --------------------------------------------------------------
struct Work {
  int64_t batch;        // row of the batch dimension (0 with cu_seqlens)
  int64_t first_token;  // of the sequence, inside that row
  int length;           // tokens
  int head;             // value head
  int64_t state_index;  // n * HV + head
};

__device__ __forceinline__ int64_t read_cu_seqlens(const FwdParams& p, int64_t i) {
  const int64_t x = p.cu_is_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[i]
                                  : static_cast<int64_t>(static_cast<const int32_t*>(p.cu_seqlens)[i]);
  // The host cannot look at the values without a synchronisation; clamping keeps a wrong one inside the buffers.
  return x < 0 ? 0 : (x > p.seqlen ? p.seqlen : x);
}

__device__ __forceinline__ Work block_work(const FwdParams& p) {
  Work w;
  const int64_t n = blockIdx.x / p.heads_v;
  w.head = static_cast<int>(blockIdx.x % p.heads_v);
  w.state_index = n * p.heads_v + w.head;
  if (p.cu_seqlens != nullptr) {
    const int64_t begin = read_cu_seqlens(p, n), end = read_cu_seqlens(p, n + 1);
    w.batch = 0;
    w.first_token = begin;
    w.length = static_cast<int>(end > begin ? end - begin : 0);
  } else {
    w.batch = n;
    w.first_token = 0;
    w.length = static_cast<int>(p.seqlen);
  }
  return w;
}

__device__ __forceinline__ const uint8_t* head_base(const void* base, const Strides& s, const Work& w, int head) {
  return static_cast<const uint8_t*>(base) + 2 * (w.batch * s.batch + w.first_token * s.token + head * s.head);
}

}  // namespace flash_kda
