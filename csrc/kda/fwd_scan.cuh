// Chains segments: S_in(j+1) = S_in(j) M_j + B_j, with M_j the transition and B_j the offset of segment j. A block
// takes 16 rows of one head's state, which no other block needs, and walks its sequence's segments.
#pragma once

#include "fwd_work.cuh"

namespace flash_kda {

constexpr int kScanRows = kDim / kScanParts;
static_assert(kScanRows == 16, "one m-tile");
constexpr int kScanWarps = 8;
constexpr int kScanThreads = kScanWarps * kWarp;
constexpr int kScanTiles = kDim / 8 / kScanWarps;  // n-tiles of a warp
constexpr int kScanPitch = kDim + 8;               // floats a row of the state: free of bank conflicts
constexpr int kScanDepth = kDim / 2;               // rows of a transition in a stage
constexpr int kScanStages = ArchConfigs::kScanStages;

template <int kStages>
struct ScanSmem {
  float transition[kStages][kScanDepth][kDim];  // as it is in memory, see transition_column()
  float state[kScanRows][kScanPitch];
  uint64_t full[kStages];
};
static_assert(sizeof(ScanSmem<Configs<false>::kScanStages>) <= Configs<false>::kSmem &&
                  sizeof(ScanSmem<Configs<true>::kScanStages>) <= Configs<true>::kSmem,
              "more shared memory than a block has");

// First segment of sequence n; what is beyond the workspace counts as its end.
__device__ __forceinline__ int64_t first_segment(const FwdParams& p, int64_t n) {
  if (p.cu_seqlens == nullptr) return n * segment_count(p, static_cast<int>(p.seqlen));
  int64_t sum = 0;  // decreasing offsets count tokens more than once
  const int lane = threadIdx.x % kWarp;
  for (int64_t m = lane; m < n; m += kWarp)
    sum = min(sum + segment_count(p, sequence(p, m).length), p.plan.max_segments);
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return min(sum, p.plan.max_segments);
}

// acc += state . transition for this warp's columns and half of the sum, in tf32. Accumulator columns 2t and 2t+1 stand
// at k = t and t+4 of the A operand, so rows 2t and 2t+1 of B do too.
__device__ __forceinline__ void multiply(const ScanSmem<kScanStages>& smem, int stage, int half, int warp, int lane,
                                         float (&acc)[kScanTiles][4]) {
  const int row = lane >> 2, pair = lane & 3;
#pragma unroll
  for (int kb = 0; kb < kScanDepth / 8; ++kb) {
    const float2 top = *reinterpret_cast<const float2*>(&smem.state[row][half * kScanDepth + kb * 8 + 2 * pair]);
    const float2 bottom = *reinterpret_cast<const float2*>(&smem.state[row + 8][half * kScanDepth + kb * 8 + 2 * pair]);
    const uint32_t a[4] = {to_tf32(top.x), to_tf32(bottom.x), to_tf32(top.y), to_tf32(bottom.y)};
#pragma unroll
    for (int n = 0; n < kScanTiles; ++n) {
      const int k = kb * 8 + 2 * pair, column = transition_column(k, (warp * kScanTiles + n) * 8 + row);
      mma_tf32(acc[n], a, to_tf32(smem.transition[stage][k][column]), to_tf32(smem.transition[stage][k + 1][column]));
    }
  }
}

// Calls f(accumulator pair, row, column) for what a lane holds of the block's [16, 128] state.
template <typename F>
__device__ __forceinline__ void for_each_acc(float (&acc)[kScanTiles][4], int warp, int lane, F f) {
#pragma unroll
  for (int t = 0; t < kScanTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      f(acc[t][2 * half], acc[t][2 * half + 1], (lane >> 2) + 8 * half, (warp * kScanTiles + t) * 8 + 2 * (lane & 3));
}

__device__ __forceinline__ void scan_segments(const FwdParams& p) {
  extern __shared__ __align__(kTileAlign) uint8_t smem_raw[];
  ScanSmem<kScanStages>& smem = *reinterpret_cast<ScanSmem<kScanStages>*>(smem_raw);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  launch_dependents();
  grid_dependency_wait();
  const int part = blockIdx.x % kScanParts;
  const int head = blockIdx.x / kScanParts % p.heads_v;
  const int64_t n = blockIdx.x / kScanParts / p.heads_v;
  const int segments = segment_count(p, sequence(p, n).length);
  if (segments < 3) return;
  const int64_t first = first_segment(p, n);
  const int count = static_cast<int>(min(static_cast<int64_t>(segments), p.plan.max_segments - first));
  if (count < 3) return;
  auto offset_at = [&](int j) {
    return p.offsets + ((first + j) * p.heads_v + head) * kDim * kDim + part * kScanRows * kDim;
  };
  auto transition_at = [&](int j) { return p.transitions + ((first + j) * p.heads_v + head) * kDim * kDim; };

  if (threadIdx.x == 0)
    for (int i = 0; i < kScanStages; ++i) mbarrier_init(smem_addr(&smem.full[i]), 1);
  for (int i = threadIdx.x; i < kScanRows * kDim; i += kScanThreads) smem.state[i / kDim][i % kDim] = offset_at(0)[i];
  __syncthreads();
  // Half transitions stream through the stages.
  const int halves = 2 * (count - 2);
  auto start = [&](int i) {
    if (threadIdx.x != 0 || i >= halves) return;
    const int stage = i % kScanStages;
    constexpr int kBytes = sizeof(smem.transition[0]);
    fence_async_proxy();  // the copy writes after what other warps read here
    mbarrier_arrive_expect(smem_addr(&smem.full[stage]), kBytes);
    bulk_copy(smem_addr(smem.transition[stage]), transition_at(1 + i / 2) + i % 2 * kScanDepth * kDim, kBytes,
              smem_addr(&smem.full[stage]));
  };
  for (int i = 0; i < kScanStages; ++i) start(i);
  float acc[kScanTiles][4], next[kScanTiles][4];
  auto load_offset = [&](int j, float (&into)[kScanTiles][4]) {
    for_each_acc(into, warp, lane, [&](float& x, float& y, int r, int column) {
      const float2 pair = *reinterpret_cast<const float2*>(offset_at(j) + r * kDim + column);
      x = pair.x;
      y = pair.y;
    });
  };
  load_offset(1, next);
  for (int j = 1; j < count - 1; ++j) {
#pragma unroll
    for (int n = 0; n < kScanTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = next[n][i];
    if (j + 1 < count - 1) load_offset(j + 1, next);  // a step ahead: its time is that of a step
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * (j - 1) + half;
      mbarrier_wait(smem_addr(&smem.full[i % kScanStages]), i / kScanStages % 2);
      multiply(smem, i % kScanStages, half, warp, lane, acc);
    }
    __syncthreads();  // everyone has read the state and the stages
    start(2 * (j - 1) + kScanStages);
    start(2 * (j - 1) + 1 + kScanStages);
    for_each_acc(acc, warp, lane, [&](float& x, float& y, int r, int column) {
      const float2 pair = make_float2(x, y);
      *reinterpret_cast<float2*>(&smem.state[r][column]) = pair;
      *reinterpret_cast<float2*>(offset_at(j) + r * kDim + column) = pair;
    });
    __syncthreads();  // the state is in place
  }
}

}  // namespace flash_kda
