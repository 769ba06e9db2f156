// What there is to do: sequences, their segments, and the tasks of a block.
#pragma once

#include "fwd_layout.cuh"

namespace flash_kda {

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
  return (chunk_count(length) + p.plan.segment_chunks - 1) / p.plan.segment_chunks;
}

// Over the lanes of a warp.
__device__ __forceinline__ int inclusive_sum(int x, int lane) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, x, d);
    if (lane >= d) x += other;
  }
  return x;
}

struct Segment {
  Sequence seq;
  int place, count;  // this one, and how many the sequence has; count 0: no such segment
};

// Finds segment `index` of the whole batch. Every lane of the warp takes one sequence.
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
    const int sum = inclusive_sum(count, lane);
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

struct Task {
  bool exists;
  int64_t batch, first_token;  // row of the batch dimension (0 with cu_seqlens), and the token inside that row
  Work work;
};

// The state pass. Block 0 of a cluster runs a segment from zero (the first from the initial state) for its end state,
// block 1 from the identity without v for its transition. The last segment needs neither. The first has no use for a
// transition; its place takes a copy of the initial state, since final_state may be the same memory and the output pass
// writes it.
__device__ __forceinline__ void set_state_task(const FwdParams& p, const Segment& s, int64_t index, int rank, Task& t) {
  const int64_t at = index * p.heads_v + t.work.head;
  const bool first = s.place == 0;
  t.exists = s.place < s.count - 1;
  t.work.transition = rank == 1 && !first;
  t.work.hold = rank == 1 && first;
  t.work.initial = first ? user_initial(p, s.seq.index, t.work.head) : StateRef{nullptr, false};
  t.work.final = {state_at(rank == 0 ? p.offsets : p.transitions, false, at), false};
}

// The output pass: a segment starts from the state that left the one before.
__device__ __forceinline__ void set_output_task(const FwdParams& p, const Segment& s, int64_t index, Task& t) {
  const int head = t.work.head;
  const bool first = s.place == 0, last = s.place == s.count - 1;
  if (first && last)
    t.work.initial = user_initial(p, s.seq.index, head);
  else
    t.work.initial = {
        state_at(first ? p.transitions : p.offsets, false, (first ? index : index - 1) * p.heads_v + head), false};
  t.work.final = last ? user_final(p, s.seq.index, head) : StateRef{nullptr, false};
}

__device__ __forceinline__ int64_t token_offset(const Strides& s, const Task& t, int head) {
  return t.batch * s.batch + t.first_token * s.token + head * s.head;
}

// Task `index` of the pass, for block `rank` of a cluster.
template <typename P>
__device__ __forceinline__ Task make_task(const FwdParams& p, unsigned index, int rank) {
  Task t{};
  t.work.row = P::kOutput ? (static_cast<int>(index % P::kParts) * P::kShare + rank) * P::kRows : 0;
  index /= P::kParts;
  t.work.head = static_cast<int>(index % p.heads_v);
  const unsigned item = index / p.heads_v;  // 32 bits: a 64-bit division is a function call
  Segment s{};
  if (P::kOutput && p.plan.segment_chunks == 0)
    s = {sequence(p, p.order == nullptr ? item : p.order[item]), 0, 1};
  else
    s = find_segment(p, item);
  t.exists = s.count > 0;
  const int span = p.plan.segment_chunks * kChunk;
  t.batch = s.seq.batch;
  t.first_token = s.seq.first_token + static_cast<int64_t>(s.place) * span;
  t.work.length = s.count <= 1 ? s.seq.length : min(span, s.seq.length - s.place * span);
  if (P::kOutput)
    set_output_task(p, s, item, t);
  else
    set_state_task(p, s, item, rank, t);
  if (t.work.length == 0) t.work.hold = true;
  t.work.beta = static_cast<const uint16_t*>(p.beta) + token_offset(p.beta_stride, t, t.work.head);
  t.work.out = static_cast<uint8_t*>(p.out) + 2 * token_offset(p.out_stride, t, t.work.head);
  return t;
}

// The tasks of a block, or of the blocks of a cluster, which come to the same ones: every so many, or, where their
// lengths differ, the next that no block has.
template <typename P>
struct TaskQueue {
  unsigned task, drawn;

  __device__ __forceinline__ TaskQueue() : task(blockIdx.x / P::kShare), drawn(0) {}

  // Before the work on a task: the answer is there when the work has been done.
  __device__ __forceinline__ void draw(const FwdParams& p, int lane) {
    if (P::kShare == 1 && p.ticket != nullptr && lane == 0) drawn = atomicAdd(p.ticket, 1u);
  }

  __device__ __forceinline__ void advance(const FwdParams& p) {
    const unsigned blocks = gridDim.x / P::kShare;
    if (P::kShare == 1 && p.ticket != nullptr)
      task = blocks + __shfl_sync(0xffffffffu, drawn, 0);
    else
      task += blocks;
  }
};

}  // namespace flash_kda
