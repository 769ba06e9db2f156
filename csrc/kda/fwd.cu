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
  init_barriers(smem, w.rank);
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

template <typename P, typename Kernel>
static cudaError_t launch(Kernel kernel, const FwdParams& p, cudaStream_t stream) {
  const int bytes = sizeof(Smem<P>);
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  const unsigned blocks = static_cast<unsigned>(p.num_sequences * p.heads_v * P::kSplit);
  kernel<<<blocks, P::kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  if (p.num_sequences * p.heads_v == 0) return cudaSuccess;
  int device = 0, major = 0, sms = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  const bool split = 2 * p.num_sequences * p.heads_v <= sms;  // both halves at once, or they only wait for each other
  if (major == 12)                                            // mirrors the choice of plans in fwd_layout.cuh
    return split ? launch<SplitPlanSmall>(kda_fwd_split_kernel, p, stream)
                 : launch<WholePlanSmall>(kda_fwd_kernel, p, stream);
  return split ? launch<SplitPlanLarge>(kda_fwd_split_kernel, p, stream)
               : launch<WholePlanLarge>(kda_fwd_kernel, p, stream);
}

}  // namespace flash_kda
