// What the loader, producer and consumer warps of the forward kernels share: the configuration of a block, its shared
// memory, the ring of slots.
#pragma once

#include <algorithm>

#include "device.cuh"
#include "fwd.h"

namespace flash_kda {

constexpr int kBlocks = kDim / 16;
constexpr int kHalfChannels = kDim / 2;
constexpr int kWarp = 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;
// Consumers hold the state times 2^-32: Ki reaches 2^115, and its product with U is to stay in range up to U =
// 2^44. beta in a slot is times 2^-32 as well, hence R and U; Qd is times 2^32, hence P, and the output needs no
// scaling.
constexpr float kStateScale = 0x1p-32f, kStateUnscale = 0x1p32f;

// ---- blocks -------------------------------------------------------------------------------------
// How a block works. The kShare blocks of a cluster walk the same tokens of one value head together: each prepares
// every kShare-th chunk and copies it to the others' shared memory. With kOutput, kParts clusters share the 128 rows of
// the state; without, only states are wanted, so no q, Qd, P, and each block keeps all rows of a state of its own.
template <int kShare_, int kRows_, int kConsumers_, int kProducers_, int kSlots_, bool kOutput_ = true>
struct BlockConfig {
  static constexpr bool kOutput = kOutput_;
  static constexpr int kShare = kShare_;
  static constexpr int kRows = kRows_;  // state rows of a block
  static constexpr int kParts = kOutput ? kDim / (kRows * kShare) : 1;
  static constexpr int kConsumers = kConsumers_;  // warps that hold the state
  static constexpr int kTilesM = kRows / (16 * kConsumers);
  static constexpr int kProducers = kProducers_;       // warps that prepare chunks
  static constexpr int kStride = kShare * kProducers;  // from one chunk of a producer to its next
  static constexpr int kSlots = kSlots_;               // chunks in flight
  // Two consumers share their schedulers with no producer: those are warps 2 and 3 of every four, the loader is warp 4.
  static constexpr bool kApart = kConsumers == 2;
  static constexpr int kWarps = kApart ? std::max(2 * kProducers, 8) : kConsumers + kProducers + 1;
  static constexpr int kThreads = kWarps * kWarp;
  static_assert(kStride <= kSlots && kSlots % kShare == 0, "a slot belongs to one block, and advance() wraps once");
  static_assert(kTilesM * 16 * kConsumers == kRows && (kOutput || kRows == kDim), "rows of a block");
};

// What a warp does: the consumers first, then the producers, then the loader; negative for nothing.
template <typename P>
__device__ __forceinline__ int role_of(int warp) {
  if (!P::kApart || warp < P::kConsumers) return warp;
  if (warp == 4) return P::kConsumers + P::kProducers;
  const int producer = warp / 4 * 2 + warp % 4 - 2;
  return warp % 4 < 2 || producer >= P::kProducers ? -1 : P::kConsumers + producer;
}

// By the shared memory of a block: 227 KB, or the 99 KB of the sm_120 family.
template <bool kSmall>
struct Configs;
template <>
struct Configs<false> {
  static constexpr int kSmem = 227 * 1024;
  using Whole = BlockConfig<1, 128, 4, 7, 12>;
  using Half = BlockConfig<2, 64, 4, 6, 14>;
  using Quarter = BlockConfig<2, 32, 2, 6, 14>;
  using State = BlockConfig<2, 128, 4, 7, 16, false>;
  static constexpr int kScanStages = 6;
};
template <>
struct Configs<true> {
  static constexpr int kSmem = 99 * 1024;
  using Whole = BlockConfig<1, 128, 4, 3, 5>;
  using Half = BlockConfig<2, 64, 4, 2, 6>;
  using Quarter = BlockConfig<2, 32, 2, 2, 6>;
  using State = BlockConfig<2, 128, 4, 2, 6, false>;
  static constexpr int kScanStages = 2;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300
using ArchConfigs = Configs<true>;
#else
using ArchConfigs = Configs<false>;
#endif

// A consumer of 32 rows needs more than the 168 registers a thread that twelve warps have at launch: warps trade.
template <typename P>
constexpr bool kMoveRegisters = P::kTilesM == 2 && P::kWarps > 8;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 136;
static_assert(Configs<false>::Whole::kWarps == 12 && Configs<false>::State::kWarps == 12 &&
                  4 * kConsumerRegisters + 8 * kProducerRegisters <= 12 * 168,
              "register file");

// ---- shared memory ------------------------------------------------------------------------------
// A tile is [16 tokens][128 channels] bf16, as two halves of 64 channels with 128-byte rows whose 16-byte pieces are
// XOR-swizzled by the row: free of bank conflicts for ldmatrix.
constexpr int kRowBytes = 128;
constexpr int kHalfBytes = kChunk * kRowBytes;
constexpr int kTileBytes = 2 * kHalfBytes;
constexpr int kTileAlign = 1024;  // TMA swizzles by address

// Byte offset of the 16-byte piece (8 channels) `piece` of row `row` in a tile.
__device__ __forceinline__ int tile_offset(int row, int piece) {
  return (piece >> 3) * kHalfBytes + row * kRowBytes + (((piece ^ row) & 7) << 4);
}

// The tile of v has the columns that are the block's state rows: 128, 64, or 32 in rows of 64 bytes, swizzled likewise.
template <int kColumns>
__device__ __forceinline__ int v_offset(int row, int piece) {
  if constexpr (kColumns == 32) return row * (kRowBytes / 2) + (((piece ^ row >> 1) & 3) << 4);
  return tile_offset(row, piece);
}

// k, g and q arrive raw and become Kd, Ki and Qd in place: each lane rewrites exactly the words it read. The
// output later overwrites v, each warp its own columns.
template <typename P>
struct Tiles {
  static constexpr int kShared = (P::kOutput ? 3 : 2) * kTileBytes;  // what the blocks of a cluster share: k, g, q
  static constexpr int kV = kChunk * P::kRows * 2;
  alignas(kTileAlign) uint8_t bytes[kShared + kV];
  __device__ __forceinline__ uint8_t* k() { return bytes; }
  __device__ __forceinline__ uint8_t* g() { return bytes + kTileBytes; }
  __device__ __forceinline__ uint8_t* q() { return bytes + 2 * kTileBytes; }
  __device__ __forceinline__ uint8_t* v() { return bytes + kShared; }
};

// 32 decays of one lane class + 4 floats of padding: four 16-byte reads, four bank groups.
constexpr int kGamGroup = 36;

struct Extras {
  union {
    uint4 frag_a[kWarp];  // X - I (three 8x8 blocks), P block (0,0), as mma B fragments
    float2 norm[kChunk];  // before: 1/|q|*scale, 1/|k|
  };
  uint2 frag_b[kWarp];  // P blocks (1,0), (1,1)
  float gam[4 * kGamGroup];
  float beta[kChunk];  // times kStateScale
};

struct StateRef {
  const void* data;  // [128, 128], or null for zeros (reading) or nowhere (writing)
  bool bf16;
};

// Consecutive tokens of one value head, as the loader leaves it for the other warps.
struct Work {
  const uint16_t* beta;  // of the first token
  uint8_t* out;          // of the first token
  StateRef initial, final;
  int head;         // value head; negative: there is no more work
  int row;          // first state row of the block
  int length;       // tokens
  bool transition;  // start from the identity and take v as zero: the end state is the segment's transition matrix
  bool hold;        // the end state is the initial one: no tokens, or none that matter
};

struct ChunkRef {
  int work;   // index in Smem::work; negative: there is no more
  int first;  // token of the work
};

template <typename P>
struct Smem {
  // A work whose last chunk has left its slot is still read by consumers; each of the others has a chunk in a slot.
  static constexpr int kWorks = P::kSlots + 1;
  Tiles<P> tiles[P::kSlots];
  Extras extras[P::kSlots];
  Work work[kWorks];
  ChunkRef chunk[P::kSlots];
  uint64_t begun[kWorks];     // `work` is written
  uint64_t raw[P::kSlots];    // inputs have arrived
  uint64_t full[P::kSlots];   // operands are ready
  uint64_t empty[P::kSlots];  // consumers are done, in every block the operands went to
};
template <typename A>
constexpr bool fits() {
  return sizeof(Smem<typename A::Whole>) <= A::kSmem && sizeof(Smem<typename A::State>) <= A::kSmem &&
         sizeof(Smem<typename A::Half>) <= A::kSmem && sizeof(Smem<typename A::Quarter>) <= A::kSmem;
}
static_assert(fits<Configs<false>>() && fits<Configs<true>>(), "more shared memory than a block has");

// The chunks of a work; of an empty one too, so that its state passes through.
__device__ __forceinline__ int chunk_count(int length) { return length <= 0 ? 1 : (length + kChunk - 1) / kChunk; }

// One chunk's place in the ring.
template <typename P>
struct Slot {
  Tiles<P>& tiles;
  Extras& extras;
};

template <typename P>
__device__ __forceinline__ Slot<P> slot_of(Smem<P>& smem, int i) {
  return {smem.tiles[i], smem.extras[i]};
}

// A place in a ring of slots or works, and the parity of the barrier phase that belongs to this pass over it.
template <int kSize>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int n) {
    slot += n;
    if (slot >= kSize) {
      slot -= kSize;
      parity ^= 1;
    }
  }
};

// Where column c of row k of a transition is in memory: so that B fragments, eight columns of four pairs of rows, come
// from all banks.
__device__ __forceinline__ int transition_column(int k, int c) { return c ^ ((k >> 1 & 3) << 3); }

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

}  // namespace flash_kda
