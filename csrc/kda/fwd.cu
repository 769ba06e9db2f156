// KDA forward. A block walks one (sequence, value head), or a segment of it, in chunks of 16 tokens: a loader warp
// copies raw inputs into a ring of slots, producer warps turn them into operands, consumer warps keep the state S [V,
// K] in registers and advance it. The formulas are in docs/numerics.md.
//
// V is the M axis of every consumer product, so an accumulator is, after one cvt, the A operand of the next product: S,
// R and U never leave registers.
#include <cudaTypedefs.h>

#include <algorithm>

#include "fwd.h"
#include "fwd_consumer.cuh"
#include "fwd_loader.cuh"
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
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rank = static_cast<int>(blockIdx.x % P::kShare);
  if constexpr (!P::kOutput) launch_dependents();
  init_barriers(smem, rank);
  clear_v(smem, rank);
  fence_async_proxy();
  if constexpr (P::kShare > 1)
    cluster_sync();
  else
    __syncthreads();
  const int role = role_of<P>(warp);
  if (role < 0) {
  } else if (role < P::kConsumers) {
    consume(p, smem, rank, role, lane);
  } else if (role < P::kConsumers + P::kProducers) {
    produce(p, smem, rank, role - P::kConsumers, lane);
  } else if (role == P::kConsumers + P::kProducers) {
    load(p, smem, rank, lane);
  }
  if constexpr (P::kShare > 1) cluster_sync();  // no block leaves while a peer may still write to it
}

// One block a (sequence, value head).
extern "C" __global__ void __launch_bounds__(ArchPlans::Whole::kThreads, 1)
    kda_fwd_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::Whole>(p);
}

// Two blocks, a cluster, a (sequence, value head).
extern "C" __global__ void __cluster_dims__(ArchPlans::Half::kShare, 1, 1)
    __launch_bounds__(ArchPlans::Half::kThreads, 1) kda_fwd_half_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::Half>(p);
}

// Four.
extern "C" __global__ void __cluster_dims__(ArchPlans::Quarter::kShare, 1, 1)
    __launch_bounds__(ArchPlans::Quarter::kThreads, 1) kda_fwd_quarter_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::Quarter>(p);
}

// End states only: the segments' transitions and offsets.
extern "C" __global__ void __cluster_dims__(ArchPlans::State::kShare, 1, 1)
    __launch_bounds__(ArchPlans::State::kThreads, 1) kda_fwd_state_kernel(const __grid_constant__ FwdParams p) {
  run<ArchPlans::State>(p);
}

// Chains the segments of each (sequence, value head).
extern "C" __global__ void __launch_bounds__(kScanThreads) kda_fwd_scan_kernel(const __grid_constant__ FwdParams p) {
  scan_segments(p);
}

// Orders sequences by their length.
extern "C" __global__ void __launch_bounds__(kOrderThreads, 1) kda_fwd_order_kernel(const __grid_constant__ FwdParams p) {
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
    const int64_t blocks = p.num_sequences * p.heads_v * (kDim / kScanRows);
    if (cudaError_t e = launch(kda_fwd_scan_kernel, p, blocks, kScanThreads, sizeof(ScanSmem<A::kScanStages>), true,
                               stream))
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

// The driver's function by way of the runtime: the library is not linked to the driver, which machines without a GPU lack.
static PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(
        e == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  return encode;
}

// A map whose boxes have `parts` times `columns` channels. False where the copy engine cannot address the tensor so: no
// tokens, or a stride of 0.
static bool make_map(const FwdParams& p, const void* data, const Strides& s, int heads, cuuint32_t columns,
                     cuuint32_t parts, CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[5] = {columns, static_cast<cuuint64_t>(p.seqlen), kDim / columns,
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(p.batch)};
  const int64_t strides[4] = {s.token, columns, s.head, s.batch};
  cuuint64_t bytes[4];
  for (int i = 0; i < 4; ++i) {
    const bool one = sizes[i + 1] == 1;  // any stride will do, and what is there may be anything
    if (!one && strides[i] <= 0) return false;
    bytes[i] = one ? 2 * kDim : 2 * strides[i];
  }
  const cuuint32_t box[5] = {columns, kChunk, parts, 1, 1}, step[5] = {1, 1, 1, 1, 1};
  const auto swizzle = columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;  // a row of the box
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(data), sizes, bytes, box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static FwdMaps make_maps(const FwdParams& p) {
  FwdMaps maps{};
  const int heads = p.heads_v, heads_qk = p.heads_v / p.heads_per_group;
  maps.usable = make_map(p, p.q, p.q_stride, heads_qk, 64, 2, maps.q) &&
                make_map(p, p.k, p.k_stride, heads_qk, 64, 2, maps.k) &&
                make_map(p, p.g, p.g_stride, heads, 64, 2, maps.g) && make_map(p, p.v, p.v_stride, heads, 64, 2, maps.v) &&
                make_map(p, p.v, p.v_stride, heads, 64, 1, maps.half_v) &&
                make_map(p, p.v, p.v_stride, heads, 32, 1, maps.quarter_v);
  return maps;
}

cudaError_t launch_fwd(FwdParams& p, int sms, cudaStream_t stream) {
  if (p.plan.tasks == 0) return cudaSuccess;
  int device = 0, major = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  p.maps = make_maps(p);
  // The host's half of the choice of ArchPlans.
  return major == 12 ? launch_all<Plans<true>>(p, sms, stream) : launch_all<Plans<false>>(p, sms, stream);
}

// Microseconds on an H200, to be measured again after a change of the kernels, with a profiler: of one chunk, by kind
// of pass; of one step of the scan; of a pass besides its chunks; of cutting at all (two more launches). Only their
// ratios matter.
struct Costs {
  double whole = 1.0, half = 0.65, quarter = 0.56, state = 0.62, scan_step = 1.5, pass = 8.0, cut = 10.0;
};

static double waves(int64_t tasks, int64_t at_once) { return static_cast<double>((tasks + at_once - 1) / at_once); }

// A split pays while its parts fit at once.
static int best_split(int64_t tasks, int sms) { return 4 * tasks <= sms ? 4 : 2 * tasks <= sms ? 2 : 1; }

FwdPlan plan_fwd(const FwdSize& size) {
  const Costs c;
  const int sms = size.sms;
  const int64_t items = size.num_sequences * size.heads_v;
  FwdPlan best{};
  best.tasks = static_cast<unsigned>(items);
  best.split = best_split(items, sms);
  best.ordered = size.packed && items > sms;
  if (items == 0) return best;
  const int64_t sequences = size.num_sequences;
  // With cu_seqlens, all chunks and segments are at most so many.
  const int64_t chunks = (size.total_tokens / sequences + kChunk - 1) / kChunk;
  const int64_t all_chunks = size.packed ? size.total_tokens / kChunk + sequences : chunks * sequences;
  auto segmented = [&](int64_t length) {
    FwdPlan plan{};
    plan.segment_chunks = static_cast<int>(length);
    const int64_t each = (chunks + length - 1) / length;
    plan.max_segments = size.packed ? sequences + all_chunks / length + 1 : sequences * each;
    plan.tasks = static_cast<unsigned>(plan.max_segments * size.heads_v);
    plan.split = best_split(items * each, sms);
    return plan;
  };
  if (size.segment_chunks > 0) return segmented(size.segment_chunks);
  if (size.segment_chunks == 0 || best.split == 1) return best;
  auto output_cost = [&](int split) { return split == 4 ? c.quarter : split == 2 ? c.half : c.whole; };
  double least = chunks * output_cost(best.split) + c.pass;
  // From three on: of two segments the second could start only when the first has ended. Below 16 chunks a segment's
  // fixed costs rule; 64 segments keep the scan short.
  for (int64_t n = 3; n <= 64 && chunks / n >= 16; ++n) {
    const int64_t length = (chunks + n - 1) / n;
    const FwdPlan plan = segmented(length);
    const double states = waves(items * (n - 1), sms / 2) * length * c.state + c.pass;
    const double outputs = waves(items * n, sms / plan.split) * length * output_cost(plan.split) + c.pass;
    const double time = states + n * c.scan_step + outputs + c.cut;
    if (time < least) {
      least = time;
      best = plan;
    }
  }
  return best;
}

}  // namespace flash_kda
