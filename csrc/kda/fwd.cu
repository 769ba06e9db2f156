// KDA forward, one kernel: prepare and recurrence run side by side in one block.
//
// A block walks one (sequence, value head) in chunks of 16 tokens. Producer warps turn raw q, k, g, beta into the
// chunk's operands in shared memory; consumer warps keep the state S [V, K] in registers and advance it. In the
// notation of docs/numerics.md, with G the running sum of the gate inside the chunk:
//
//   Kd = k^ exp(G)   Qd = q^ exp(G)   Kt = k^ exp(G_end - G)   gam = exp(G_end)       producers, fp32, rounded once to bf16
//   A = Kd (k^ exp(-G))^T, strictly lower      P = Qd (k^ exp(-G))^T, lower           producers, tensor cores
//   X = (I + diag(beta) A)^-1                                                         producers, fp16 recursion on halves
//   R = beta (V - Kd S^T)   U = R + (X - I) R   O = Qd S^T + P U   S = S gam + U^T Kt consumers
//
// V is the M axis of every consumer product, so the fp32 accumulator of one product is, after one cvt, the A operand of
// the next: S, R and U never leave registers. U takes R in fp32 and only the correction (X - I) R from rounded operands.
#include "fwd.h"
#include "fwd_consumer.cuh"
#include "fwd_producer.cuh"

namespace flash_kda {

extern "C" __global__ void __launch_bounds__(kConfig.threads(), 1) kda_fwd_kernel(const __grid_constant__ FwdParams p) {
  extern __shared__ __align__(128) uint8_t smem_raw[];
  SmemArch& smem = *reinterpret_cast<SmemArch*>(smem_raw);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x < kConfig.slots) {
    mbarrier_init(smem_addr(&smem.full[threadIdx.x]), kWarp);
    mbarrier_init(smem_addr(&smem.empty[threadIdx.x]), kConsumerWarps * kWarp);
  }
  __syncthreads();
  const Work w = block_work(p);
  if (warp < kConsumerWarps)
    consume(p, w, smem, warp, lane);
  else
    produce(p, w, smem, warp - kConsumerWarps, lane);
}

cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  const int64_t blocks = p.num_sequences * p.heads_v;
  if (blocks == 0) return cudaSuccess;
  int device = 0, major = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  // The host's mirror of the choice of kConfig in the image that will run.
  const bool small = major == 12;
  const int threads = small ? kConfigSmall.threads() : kConfigLarge.threads();
  const int bytes = static_cast<int>(small ? sizeof(Smem<kConfigSmall.producers, kConfigSmall.slots>)
                                           : sizeof(Smem<kConfigLarge.producers, kConfigLarge.slots>));
  if (cudaError_t e = cudaFuncSetAttribute(kda_fwd_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  kda_fwd_kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flash_kda
