// The order in which blocks take sequences of different length: the longest first, so that what is left at the end is
// short.
#pragma once

#include "fwd_work.cuh"

namespace flash_kda {

constexpr int kOrderThreads = 1024;
constexpr int kOrderBuckets = kOrderThreads;  // a thread sums up one
constexpr int kOrderMantissa = 5;             // lengths of a bucket differ by up to 1/32

// Bucket of a sequence of so many chunks, 0 for the longest: exponent and leading mantissa bits of the count as a
// float.
__device__ __forceinline__ int order_bucket(int chunks) {
  const int key = static_cast<int>(__float_as_uint(static_cast<float>(chunks)) >> (23 - kOrderMantissa)) -
                  (127 << kOrderMantissa);  // 2^27 chunks, the most there can be, make 27 * 32
  return kOrderBuckets - 1 - key;
}

// One block; p.order becomes the sequences by bucket, in any order inside one. The ticket starts at 0.
__device__ __forceinline__ void order_sequences(const FwdParams& p) {
  __shared__ int places[kOrderBuckets], warp_sums[kWarp];
  const int t = threadIdx.x, lane = t % kWarp;
  launch_dependents();
  places[t] = 0;
  if (t == 0) *p.ticket = 0;
  __syncthreads();
  for (int64_t n = t; n < p.num_sequences; n += kOrderThreads)
    atomicAdd(&places[order_bucket(chunk_count(sequence(p, n).length))], 1);
  __syncthreads();
  const int count = places[t], sum = inclusive_sum(count, lane);
  if (lane == kWarp - 1) warp_sums[t / kWarp] = sum;
  __syncthreads();
  if (t < kWarp) warp_sums[t] = inclusive_sum(warp_sums[t], lane);
  __syncthreads();
  places[t] = sum - count + (t < kWarp ? 0 : warp_sums[t / kWarp - 1]);
  __syncthreads();
  for (int64_t n = t; n < p.num_sequences; n += kOrderThreads) {
    const int place = atomicAdd(&places[order_bucket(chunk_count(sequence(p, n).length))], 1);
    if (place < p.num_sequences) p.order[place] = static_cast<int32_t>(n);  // else cu_seqlens has changed meanwhile
  }
}

}  // namespace flash_kda
