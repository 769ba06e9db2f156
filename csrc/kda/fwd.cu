// KDA forward, one kernel: prepare and recurrence run side by side in one block.
//
// A block walks one (sequence, value head) in chunks of 16 tokens. Producer warps turn raw q, k, g, beta into the
// chunk's operands in shared memory; consumer warps keep the state S [V, K] in registers and advance it. In the
// notation of docs/numerics.md, with G the running sum of the gate inside the chunk:
//
//   Kd = k^ exp(G)   Qd = q^ exp(G)   Kt = k^ exp(G_end - G)   gam = exp(G_end)       producers, fp32, rounded once to
//   bf16 A = Kd (k^ exp(-G))^T, strictly lower      P = Qd (k^ exp(-G))^T, lower           producers, tensor cores X =
//   (I + diag(beta) A)^-1                                                         producers, fp16 recursion on halves
//   R = beta (V - Kd S^T)   U = R + (X - I) R   O = Qd S^T + P U   S = S gam + U^T Kt consumers
//
// V is the M axis of every consumer product, so the fp32 accumulator of one product is, after one cvt, the A operand of
// the next: S, R and U never leave registers. U takes R in fp32 and only the correction (X - I) R from rounded
// operands.
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
extern "C" __global__ void __launch_bounds__(WholePlan::kThreads, 1)
    kda_fwd_kernel(const __grid_constant__ FwdParams p) {
  run<WholePlan>(p);
}

// Two blocks, a cluster, a (sequence, value head).
extern "C" __global__ void __cluster_dims__(SplitPlan::kSplit, 1, 1) __launch_bounds__(SplitPlan::kThreads, 1)
    kda_fwd_split_kernel(const __grid_constant__ FwdParams p) {
  run<SplitPlan>(p);
}

// End states only: the segments' transitions and offsets.
extern "C" __global__ void __launch_bounds__(StatePlan::kThreads, 1)
    kda_fwd_state_kernel(const __grid_constant__ FwdParams p) {
  run<StatePlan>(p);
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

static cudaError_t launch_scan(const FwdParams& p, bool small, cudaStream_t stream) {
  const int bytes = static_cast<int>(small ? sizeof(ScanSmem<kScanStagesSmall>) : sizeof(ScanSmem<kScanStagesLarge>));
  if (cudaError_t e = cudaFuncSetAttribute(kda_fwd_scan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  const int64_t blocks = p.num_sequences * p.heads_v * (kDim / kScanRows);
  kda_fwd_scan_kernel<<<static_cast<unsigned>(blocks), kScanThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

// Times of one chunk, microseconds, and of the fixed parts, measured on an H200; only their ratios matter.
struct Costs {
  double whole = 1.05, split = 0.70, state = 0.80, scan_step = 2.0, pass = 8.0, cut = 12.0;
};

static double waves(int64_t blocks, int sms) { return static_cast<double>((blocks + sms - 1) / sms); }

FwdPlan plan_fwd(int64_t num_sequences, int64_t total_tokens, int heads_v, int sms) {
  const Costs c;
  const int64_t items = num_sequences * heads_v;
  const int64_t chunks = (total_tokens / kChunk + num_sequences - 1) / (num_sequences > 0 ? num_sequences : 1);
  FwdPlan best{2 * items <= sms, 0, 0};  // a split pays while both halves fit at once
  if (!best.split) return best;
  double least = chunks * c.split + c.pass;
  for (int64_t n = 3; n <= 64 && chunks / n >= 16; ++n) {
    const int64_t length = (chunks + n - 1) / n;
    const bool split = 2 * items * n <= sms;
    const double states = waves(items * (2 * n - 3), sms) * (length * c.state + c.pass);
    const double outputs = waves(items * n * (split ? 2 : 1), sms) * (length * (split ? c.split : c.whole) + c.pass);
    const double time = states + n * c.scan_step + outputs + c.cut;
    if (time < least) {
      least = time;
      best = {split, static_cast<int>(length), num_sequences + (total_tokens / kChunk + num_sequences) / length + 1};
    }
  }
  return best;
}

cudaError_t launch_fwd(const FwdParams& p, const FwdPlan& plan, cudaStream_t stream) {
  if (p.num_sequences * p.heads_v == 0) return cudaSuccess;
  int device = 0, major = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  const bool small = major == 12;  // mirrors the choice of plans in fwd_layout.cuh
  int64_t items = p.num_sequences * p.heads_v;
  if (p.segment_chunks > 0) {
    items = p.max_segments * p.heads_v;
    if (cudaError_t e = small ? launch<StatePlanSmall>(kda_fwd_state_kernel, p, 2 * items, stream)
                              : launch<StatePlanLarge>(kda_fwd_state_kernel, p, 2 * items, stream))
      return e;
    if (cudaError_t e = launch_scan(p, small, stream)) return e;
  }
  if (small)
    return plan.split ? launch<SplitPlanSmall>(kda_fwd_split_kernel, p, items, stream)
                      : launch<WholePlanSmall>(kda_fwd_kernel, p, items, stream);
  return plan.split ? launch<SplitPlanLarge>(kda_fwd_split_kernel, p, items, stream)
                    : launch<WholePlanLarge>(kda_fwd_kernel, p, items, stream);
}

}  // namespace flash_kda
