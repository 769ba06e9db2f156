// KDA forward. A block walks tasks, each a (sequence, value head) or a segment of one, in chunks of 16 tokens: a loader
// warp has raw inputs copied into a ring of slots, producer warps turn them into operands, consumer warps keep the
// state S [V, K] in registers and advance it. Where one task ends the next has begun: the ring runs on. The formulas
// are in docs/numerics.md, what limits the kernels in docs/performance.md.
//
// V is the M axis of every consumer product, so an accumulator is, after one cvt, the A operand of the next product: S,
// R and U never leave registers.
#include "fwd.h"

#include <algorithm>

#include "fwd_consumer.cuh"
#include "fwd_loader.cuh"
#include "fwd_maps.h"
#include "fwd_order.cuh"
#include "fwd_producer.cuh"
#include "fwd_scan.cuh"

namespace flash_kda {

template <typename P>
__device__ __forceinline__ void init_barriers(Smem<P>& smem, int rank) {
  const int i = threadIdx.x;
  if (i < Smem<P>::kWorks) mbarrier_init(smem_addr(&smem.begun[i]), 1);
  if (i >= P::kSlots) return;
  const bool own = i % P::kShare == rank;
  mbarrier_init(smem_addr(&smem.raw[i]), 1);
  mbarrier_init(smem_addr(&smem.full[i]), own ? kWarp : 1);  // the producer, or the loader
  // Every local consumer lane, and one lane a consumer warp of the other blocks.
  mbarrier_init(smem_addr(&smem.empty[i]), P::kConsumers * (kWarp + (own ? P::kShare - 1 : 0)));
}

// The block of the state pass that takes v as zero loads none.
template <typename P>
__device__ __forceinline__ void clear_v(Smem<P>& smem, int rank) {
  if (loads_v<P>(rank)) return;
  constexpr int kWords = Tiles<P>::kV / sizeof(uint4);
  for (int i = threadIdx.x; i < P::kSlots * kWords; i += P::kThreads)
    reinterpret_cast<uint4*>(smem.tiles[i / kWords].v())[i % kWords] = make_uint4(0, 0, 0, 0);
}

template <typename P>
__device__ __forceinline__ void run(const FwdParams& p) {
  extern __shared__ __align__(kTileAlign) uint8_t smem_raw[];
  Smem<P>& smem = *reinterpret_cast<Smem<P>*>(smem_raw);
  // To the compiler threadIdx may differ between lanes; a shuffle's result does not.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  const int rank = static_cast<int>(blockIdx.x % P::kShare);
  if constexpr (!P::kOutput) launch_dependents();
  init_barriers(smem, rank);
  clear_v(smem, rank);
  fence_async_proxy();
  if constexpr (P::kShare > 1)
    cluster_sync();
  else
    __syncthreads();
  // nvcc lays these branches out from the last to the first: with the loader first in the source, and so last in the
  // code, the quarter kernel took 5 % longer.
  const int role = role_of<P>(warp);
  if (role >= 0) {
    if (role < P::kConsumers)
      consume(p, smem, rank, role, lane);
    else if (role < P::kConsumers + P::kProducers)
      produce(p, smem, rank, role - P::kConsumers, lane);
    else
      load(p, smem, rank, lane);
  }
  if constexpr (P::kShare > 1) cluster_sync();  // no block leaves while a peer may still write to it
}

// A task is one block's.
extern "C" __global__ void __launch_bounds__(ArchConfigs::Whole::kThreads, 1)
    kda_fwd_kernel(const __grid_constant__ FwdParams p) {
  run<ArchConfigs::Whole>(p);
}

// A task is two blocks', a cluster.
extern "C" __global__ void __cluster_dims__(ArchConfigs::Half::kShare, 1, 1)
    __launch_bounds__(ArchConfigs::Half::kThreads, 1) kda_fwd_half_kernel(const __grid_constant__ FwdParams p) {
  run<ArchConfigs::Half>(p);
}

// A task is four blocks', two clusters.
extern "C" __global__ void __cluster_dims__(ArchConfigs::Quarter::kShare, 1, 1)
    __launch_bounds__(ArchConfigs::Quarter::kThreads, 1) kda_fwd_quarter_kernel(const __grid_constant__ FwdParams p) {
  run<ArchConfigs::Quarter>(p);
}

// End states only: the segments' transitions and offsets.
extern "C" __global__ void __cluster_dims__(ArchConfigs::State::kShare, 1, 1)
    __launch_bounds__(ArchConfigs::State::kThreads, 1) kda_fwd_state_kernel(const __grid_constant__ FwdParams p) {
  run<ArchConfigs::State>(p);
}

// Chains the segments of each (sequence, value head).
extern "C" __global__ void __launch_bounds__(kScanThreads, 1) kda_fwd_scan_kernel(const __grid_constant__ FwdParams p) {
  scan_segments(p);
}

// Orders sequences by their length.
extern "C" __global__ void __launch_bounds__(kOrderThreads, 1)
    kda_fwd_order_kernel(const __grid_constant__ FwdParams p) {
  order_sequences(p);
}

// `dependent`: the kernel may start before the one in front of it in the stream, of the same call, has ended.
template <typename Kernel>
static cudaError_t launch(Kernel kernel, const FwdParams& p, int64_t blocks, int threads, int bytes, bool dependent,
                          cudaStream_t stream) {
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// A pass over all tasks, on as many blocks as run at once.
template <typename P, typename Kernel>
static cudaError_t launch_pass(Kernel kernel, const FwdParams& p, int sms, bool dependent, cudaStream_t stream) {
  const int64_t clusters = std::min<int64_t>(static_cast<int64_t>(p.plan.tasks) * P::kParts, sms / P::kShare);
  return launch(kernel, p, clusters * P::kShare, P::kThreads, sizeof(Smem<P>), dependent, stream);
}

template <typename A>
static cudaError_t launch_all(const FwdParams& p, int sms, cudaStream_t stream) {
  const bool segments = p.plan.segment_chunks > 0;
  if (segments) {
    if (cudaError_t e = launch_pass<typename A::State>(kda_fwd_state_kernel, p, sms, false, stream)) return e;
    const int64_t blocks = p.num_sequences * p.heads_v * kScanParts;
    if (cudaError_t e =
            launch(kda_fwd_scan_kernel, p, blocks, kScanThreads, sizeof(ScanSmem<A::kScanStages>), true, stream))
      return e;
  }
  if (p.plan.ordered)
    if (cudaError_t e = launch(kda_fwd_order_kernel, p, 1, kOrderThreads, 0, false, stream)) return e;
  const bool dependent = segments || p.plan.ordered;
  switch (p.plan.split) {
    case 4:
      return launch_pass<typename A::Quarter>(kda_fwd_quarter_kernel, p, sms, dependent, stream);
    case 2:
      return launch_pass<typename A::Half>(kda_fwd_half_kernel, p, sms, dependent, stream);
    default:
      return launch_pass<typename A::Whole>(kda_fwd_kernel, p, sms, dependent, stream);
  }
}

cudaError_t launch_fwd(FwdParams& p, int sms, cudaStream_t stream) {
  if (p.plan.tasks == 0) return cudaSuccess;
  int device = 0, major = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  p.maps = make_maps(p);
  // The host's half of the choice of ArchConfigs.
  return major == 12 ? launch_all<Configs<true>>(p, sms, stream) : launch_all<Configs<false>>(p, sms, stream);
}

}  // namespace flash_kda
