// What the loader, producer and consumer warps of the forward kernels share: sizes, shared memory, the ring of slots,
// and what a block works on.
#pragma once

#include "device.cuh"
#include "fwd.h"

namespace flash_kda {

constexpr int kChunk = 16;
constexpr int kBlocks = kDim / 16;
constexpr int kWarp = 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;

// ---- plans --------------------------------------------------------------------------------------
// How the work of one (sequence, value head) is laid out. kSplit blocks, a cluster, share it: each keeps 128 / kSplit
// rows of the state, prepares every kSplit-th chunk and copies it to the others' shared memory.
template <int kSplit_, int kProducers_, int kSlots_, bool kOutput_ = true>
struct Plan {
  static constexpr bool kOutput = kOutput_;  // false: only states are wanted, so no q, Qd, P
  static constexpr int kSplit = kSplit_;
  static constexpr int kConsumers = 4;            // warps that hold the state
  static constexpr int kProducers = kProducers_;  // warps that prepare chunks
  static constexpr int kSlots = kSlots_;          // chunks in flight
  static constexpr int kRows = kDim / kSplit;     // state rows of a block
  static constexpr int kTilesM = kRows / (16 * kConsumers);
  static constexpr int kWarps = kConsumers + kProducers + 1;  // and one that loads
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kStride = kSplit * kProducers;  // from one chunk of a producer to its next
  static_assert(kStride <= kSlots && kSlots % kSplit == 0, "a slot belongs to one block, and advance() wraps once");
};
// By the shared memory of a block: 227 KB, or the 99 KB of the sm_120 family.
template <bool kSmall>
struct Plans;
template <>
struct Plans<false> {
  static constexpr int kSmem = 227 * 1024;
  using Whole = Plan<1, 7, 11>;
  using State = Plan<1, 7, 11, false>;
  using Split = Plan<2, 6, 12>;
  static constexpr int kScanStages = 6;
};
template <>
struct Plans<true> {
  static constexpr int kSmem = 99 * 1024;
  using Whole = Plan<1, 3, 4>;
  using State = Plan<1, 3, 4, false>;
  using Split = Plan<2, 2, 4>;
  static constexpr int kScanStages = 2;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300
using ArchPlans = Plans<true>;
#else
using ArchPlans = Plans<false>;
#endif

// A consumer of the whole plan needs 225 registers; twelve warps have 168 each at launch, and trade.
template <typename P>
constexpr bool kMoveRegisters = P::kSplit == 1 && P::kWarps > 8;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 136;
static_assert(Plans<false>::Whole::kWarps == 12 && 4 * kConsumerRegisters + 8 * kProducerRegisters <= 12 * 168,
              "register file");

// ---- shared memory ------------------------------------------------------------------------------
// A tile is [16 tokens][128 channels] bf16, as two halves of 64 channels with 128-byte rows whose 16-byte pieces are
// XOR-swizzled by the row: free of bank conflicts for ldmatrix.
constexpr int kRowBytes = 128;
constexpr int kHalfBytes = kChunk * kRowBytes;
constexpr int kTileBytes = 2 * kHalfBytes;

// Byte offset of the 16-byte piece (8 channels) `piece` of row `row` in a tile.
__device__ __forceinline__ int tile_offset(int row, int piece) {
  return (piece >> 3) * kHalfBytes + row * kRowBytes + (((piece ^ row) & 7) << 4);
}

// q, k and g arrive raw and become Qd, Kd and Kt in place: each lane rewrites exactly the words it read. The output
// later overwrites v, each warp its own columns.
template <typename P>
struct Tiles {
  uint8_t q[kTileBytes], k[kTileBytes], g[kTileBytes];
  uint8_t v[kTileBytes / P::kSplit];  // the columns that are this block's state rows
};

constexpr int kSharedTileBytes = 3 * kTileBytes;  // q, k, g

// 32 decays of one lane class + 4 floats of padding: four 16-byte reads, four bank groups.
constexpr int kGamGroup = 36;

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

struct StateRef {
  const void* data;  // [128, 128], or null for zeros (reading) or nowhere (writing)
  bool bf16;
};

template <typename P>
struct Smem {
  Tiles<P> tiles[P::kSlots];
  Extras extras[P::kSlots];
  ProducerScratch scratch[P::kProducers];
  uint64_t raw[P::kSlots];    // inputs have arrived
  uint64_t full[P::kSlots];   // operands are ready
  uint64_t empty[P::kSlots];  // consumers are done, in every block the operands went to
  StateRef final;             // where the state goes; here, since consumers have no register to spare meanwhile
};
template <typename A>
constexpr bool fits() {
  return sizeof(Smem<typename A::Whole>) <= A::kSmem && sizeof(Smem<typename A::State>) <= A::kSmem &&
         sizeof(Smem<typename A::Split>) <= A::kSmem;
}
static_assert(fits<Plans<false>>() && fits<Plans<true>>(), "more shared memory than a block has");

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

// A place in the ring of slots, and the parity of the barrier phase that belongs to this pass over it.
template <typename P>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int n) {
    slot += n;
    if (slot >= P::kSlots) {
      slot -= P::kSlots;
      parity ^= 1;
    }
  }
};

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

// ---- what a block works on ----------------------------------------------------------------------
struct Work {
  int rank;             // of this block in its cluster
  int head;             // value head
  int64_t batch;        // row of the batch dimension (0 with cu_seqlens)
  int64_t first_token;  // inside that row
  int length;           // tokens; negative when there is nothing to do
  StateRef initial, final;
  bool transition;  // start from the identity and take v as zero: the end state is the segment's transition matrix
};

__device__ __forceinline__ int64_t read_cu_seqlens(const FwdParams& p, int64_t i) {
  const int64_t x = p.cu_is_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[i]
                                  : static_cast<int64_t>(static_cast<const int32_t*>(p.cu_seqlens)[i]);
  // The host cannot look at the values without a synchronisation; clamping keeps a wrong one inside the tensors.
  return x < 0 ? 0 : (x > p.seqlen ? p.seqlen : x);
}

struct Sequence {
  int64_t index, batch, first_token;
  int length;
};

__device__ __forceinline__ Sequence sequence(const FwdParams& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return {n, n, 0, static_cast<int>(p.seqlen)};
  const int64_t begin = read_cu_seqlens(p, n), end = read_cu_seqlens(p, n + 1);
  return {n, 0, begin, static_cast<int>(end > begin ? end - begin : 0)};
}

__device__ __forceinline__ int segment_count(const FwdParams& p, int length) {
  const int chunks = (length + kChunk - 1) / kChunk;
  return chunks == 0 ? 1 : (chunks + p.plan.segment_chunks - 1) / p.plan.segment_chunks;
}

struct Segment {
  Sequence seq;
  int place, count;  // this one, and how many the sequence has; count 0: no such segment
};

// Finds segment `index` of the whole batch. Every lane of a warp takes one sequence; the warps of a block do the same
// work.
__device__ __forceinline__ Segment find_segment(const FwdParams& p, unsigned index) {
  if (p.cu_seqlens == nullptr) {
    const unsigned count = segment_count(p, static_cast<int>(p.seqlen));
    const unsigned n = index / count;
    if (n >= p.num_sequences) return {{}, 0, 0};
    return {sequence(p, n), static_cast<int>(index % count), static_cast<int>(count)};
  }
  const int lane = threadIdx.x % kWarp;
  int64_t before = 0;
  for (int64_t base = 0; base < p.num_sequences; base += kWarp) {
    const int64_t n = base + lane;
    const int count = n < p.num_sequences ? segment_count(p, sequence(p, n).length) : 0;
    int sum = count;  // inclusive prefix sum over the lanes
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, before + sum > index);
    if (reached != 0) {
      const int found = __ffs(reached) - 1;
      const int found_count = __shfl_sync(0xffffffffu, count, found);
      const int found_sum = __shfl_sync(0xffffffffu, sum, found);
      return {sequence(p, base + found), static_cast<int>(index - before) - (found_sum - found_count), found_count};
    }
    before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
  }
  return {{}, 0, 0};
}

__device__ __forceinline__ const void* state_at(const void* base, bool bf16, int64_t index) {
  return base == nullptr ? nullptr : static_cast<const uint8_t*>(base) + index * kDim * kDim * (bf16 ? 2 : 4);
}

__device__ __forceinline__ StateRef user_initial(const FwdParams& p, int64_t n, int head) {
  return {state_at(p.initial_state, p.initial_is_bf16, n * p.heads_v + head), p.initial_is_bf16};
}

__device__ __forceinline__ StateRef user_final(const FwdParams& p, int64_t n, int head) {
  return {state_at(p.final_state, p.final_is_bf16, n * p.heads_v + head), p.final_is_bf16};
}

// The state pass. Task 0 runs a segment from zero (the first from the initial state) for its end state; task 1 from the
// identity without v for its transition. The last segment needs neither. The first has no use for a transition; its
// place takes a copy of the initial state, since final_state may be the same memory and the output pass writes it.
__device__ __forceinline__ void set_state_task(const FwdParams& p, const Segment& s, int64_t index, int task, Work& w) {
  const int64_t at = index * p.heads_v + w.head;
  const bool first = s.place == 0;
  w.transition = task == 1 && !first;
  w.initial = first ? user_initial(p, s.seq.index, w.head) : StateRef{nullptr, false};
  w.final = {state_at(task == 0 ? p.offsets : p.transitions, false, at), false};
  if (task == 1 && first) w.length = 0;
  if (s.place == s.count - 1) w.length = -1;
}

// The output pass: a segment starts from the state that left the one before.
__device__ __forceinline__ void set_output_task(const FwdParams& p, const Segment& s, int64_t index, Work& w) {
  const bool first = s.place == 0, last = s.place == s.count - 1;
  w.transition = false;
  if (first && last)
    w.initial = user_initial(p, s.seq.index, w.head);
  else
    w.initial = {state_at(first ? p.transitions : p.offsets, false, (first ? index : index - 1) * p.heads_v + w.head),
                 false};
  w.final = last ? user_final(p, s.seq.index, w.head) : StateRef{nullptr, false};
}

template <typename P>
__device__ __forceinline__ Work block_work(const FwdParams& p) {
  Work w;
  w.rank = static_cast<int>(blockIdx.x % P::kSplit);
  unsigned item = blockIdx.x / P::kSplit;  // 32 bits: a 64-bit division is a function call
  w.head = static_cast<int>(item % p.heads_v);
  item /= p.heads_v;
  if (P::kOutput && p.plan.segment_chunks == 0) {
    const Sequence s = sequence(p, item);
    w.batch = s.batch;
    w.first_token = s.first_token;
    w.length = s.length;
    w.transition = false;
    w.initial = user_initial(p, item, w.head);
    w.final = user_final(p, item, w.head);
    return w;
  }
  const int task = P::kOutput ? 0 : static_cast<int>(item % 2);
  if (!P::kOutput) item /= 2;
  const Segment s = find_segment(p, item);
  const int span = p.plan.segment_chunks * kChunk;
  w.batch = s.seq.batch;
  w.first_token = s.seq.first_token + static_cast<int64_t>(s.place) * span;
  w.length = s.count == 0 ? -1 : min(span, s.seq.length - s.place * span);
  if (s.count == 0) return w;
  if (P::kOutput)
    set_output_task(p, s, item, w);
  else
    set_state_task(p, s, item, task, w);
  return w;
}

__device__ __forceinline__ const uint8_t* head_base(const void* base, const Strides& s, const Work& w, int head) {
  return static_cast<const uint8_t*>(base) + 2 * (w.batch * s.batch + w.first_token * s.token + head * s.head);
}

}  // namespace flash_kda
