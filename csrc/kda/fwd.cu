// KDA forward. A block walks one (sequence, value head), or a segment of it, in chunks of 16 tokens: a loader warp
// copies raw inputs into a ring of slots, producer warps turn them into operands, consumer warps keep the state S [V,
// K] in registers and advance it. The formulas are in docs/numerics.md.
//
// V is the M axis of every consumer product, so an accumulator is, after one cvt, the A operand of the next product: S,
// R and U never leave registers.
#include "fwd.h"
#include "fwd_consumer.cuh"
#include "fwd_loader.cuh"
#include "fwd_producer.cuh"
#include "fwd_scan.cuh"

namespace flash_kda {

template <typename P>
__device__ __forceinline__ void init_barriers(Smem<P>& smem, int rank) {
  const int slot = threadIdx.x;
  if (slot >= P::kSlots) return;
  const bool own = slot % P::kSplit == rank;
  mbarrier_init(smem_addr(&smem.raw[slot]), kWarp);
  mbarrier_init(smem_addr(&smem.full[slot]), kWarp);
  // Every local consumer lane, and one lane a consumer warp of the other blocks.
  mbarrier_init(smem_addr(&smem.empty[slot]), P::kConsumers * (kWarp + (own ? P::kSplit - 1 : 0)));
}

template <typename P>
__device__ __forceinline__ void run(const FwdParams& p) {
  extern __shared__ __align__(128) uint8_t smem_raw[];
  Smem<P>& smem = *reinterpret_cast<Smem<P>*>(smem_raw);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Work w = block_work<P>(p);
  if (w.length < 0) return;  // the same for all blocks of a cluster
  init_barriers(smem, w.rank);
  if (threadIdx.x == 0) smem.final = w.final;
  if constexpr (P::kSplit > 1)
    cluster_sync();
  else
    __syncthreads();
  if (warp < P::kConsumers)
    consume(p, w, smem, warp, lane);
  else if (warp < P::kConsumers + P::kProducers)
    produce(p, w, smem, warp - P::kConsumers, lane);
  else
    load(p, w, smem, lane);
  if constexpr (P::kSplit > 1) cluster_sync();  // no block leaves while a peer may still write to it
}

// One block a (sequence, value head).
extern "C" __global__ void __launch_bounds__(ArchPlans::Whole::kThreads, 1)
    kda_fwd_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::Whole>(p);
}

// Two blocks, a cluster, a (sequence, value head).
extern "C" __global__ void __cluster_dims__(ArchPlans::Split::kSplit, 1, 1)
    __launch_bounds__(ArchPlans::Split::kThreads, 1) kda_fwd_split_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::Split>(p);
}

// End states only: the segments' transitions and offsets.
extern "C" __global__ void __launch_bounds__(ArchPlans::State::kThreads, 1)
    kda_fwd_state_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::State>(p);
}

// Chains the segments of each (sequence, value head).
extern "C" __global__ void __launch_bounds__(kScanThreads) kda_fwd_scan_kernel(const __grid_constant__ FwdParams p) {
  scan_segments(p);
}

template <typename P, typename Kernel>
static cudaError_t launch(Kernel kernel, const FwdParams& p, int64_t items, cudaStream_t stream) {
  const int bytes = sizeof(Smem<P>);
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  kernel<<<static_cast<unsigned>(items * P::kSplit), P::kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename A>
static cudaError_t launch_scan(const FwdParams& p, cudaStream_t stream) {
  const int bytes = sizeof(ScanSmem<A::kScanStages>);
  if (cudaError_t e = cudaFuncSetAttribute(kda_fwd_scan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  const int64_t blocks = p.num_sequences * p.heads_v * (kDim / kScanRows);
  kda_fwd_scan_kernel<<<static_cast<unsigned>(blocks), kScanThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename A>
static cudaError_t launch_all(const FwdParams& p, cudaStream_t stream) {
  const bool segments = p.plan.segment_chunks > 0;
  const int64_t items = (segments ? p.plan.max_segments : p.num_sequences) * p.heads_v;
  if (segments) {
    if (cudaError_t e = launch<typename A::State>(kda_fwd_state_kernel, p, 2 * items, stream)) return e;
    if (cudaError_t e = launch_scan<A>(p, stream)) return e;
  }
  return p.plan.split ? launch<typename A::Split>(kda_fwd_split_kernel, p, items, stream)
                      : launch<typename A::Whole>(kda_fwd_kernel, p, items, stream);
}

cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  if (p.num_sequences * p.heads_v == 0) return cudaSuccess;
  int device = 0, major = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  // The host's half of the choice of ArchPlans.
  return major == 12 ? launch_all<Plans<true>>(p, stream) : launch_all<Plans<false>>(p, stream);
}

// Microseconds on an H200, to be measured again after a change of the kernels, with a profiler: of one chunk, by kind
// of pass; of one step of the scan; of a pass besides its chunks; of cutting at all (two more launches). Only their
// ratios matter.
struct Costs {
  double whole = 1.05, split = 0.70, state = 0.80, scan_step = 2.0, pass = 8.0, cut = 12.0;
};

static double waves(int64_t blocks, int sms) { return static_cast<double>((blocks + sms - 1) / sms); }

FwdPlan plan_fwd(int64_t num_sequences, int64_t total_tokens, int heads_v, int sms) {
  const Costs c;
  const int64_t items = num_sequences * heads_v;
  FwdPlan best{2 * items <= sms, 0, 0};  // a split pays while both halves fit at once
  if (!best.split || items == 0) return best;
  const int64_t all_chunks = total_tokens / kChunk + num_sequences;  // at most
  const int64_t chunks = all_chunks / num_sequences;
  double least = chunks * c.split + c.pass;
  // From three on: of two segments the second could start only when the first has ended. Below 16 chunks a segment's
  // fixed costs rule; 64 segments keep the scan short.
  for (int64_t n = 3; n <= 64 && chunks / n >= 16; ++n) {
    const int64_t length = (chunks + n - 1) / n;
    const bool split = 2 * items * n <= sms;
    const double states = waves(items * (2 * n - 3), sms) * (length * c.state + c.pass);
    const double outputs = waves(items * n * (split ? 2 : 1), sms) * (length * (split ? c.split : c.whole) + c.pass);
    const double time = states + n * c.scan_step + outputs + c.cut;
    if (time < least) {
      least = time;
      best = {split, static_cast<int>(length), num_sequences + all_chunks / length + 1};
    }
  }
  return best;
}

}  // namespace flash_kda
