// TMA descriptors of q, k, v and g; host code.
#pragma once

#include <cudaTypedefs.h>

#include "fwd.h"

namespace flash_kda {

// The driver's function by way of the runtime: the library is not linked to the driver, which machines without a GPU
// lack.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
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

// A map whose boxes have `parts` times `columns` channels. False where TMA cannot address the tensor so: a stride that
// is not positive, or a driver without the function.
inline bool make_map(const FwdParams& p, const void* data, const Strides& s, int heads, cuuint32_t columns,
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

inline FwdMaps make_maps(const FwdParams& p) {
  FwdMaps maps{};
  if (p.batch * p.seqlen == 0) return maps;  // the driver takes no empty tensor
  const int heads = p.heads_v, heads_qk = p.heads_v / p.heads_per_group;
  const cuuint32_t part = p.plan.split == 4 ? 32 : 64;
  maps.usable =
      make_map(p, p.q, p.q_stride, heads_qk, 64, 2, maps.q) && make_map(p, p.k, p.k_stride, heads_qk, 64, 2, maps.k) &&
      make_map(p, p.g, p.g_stride, heads, 64, 2, maps.g) && make_map(p, p.v, p.v_stride, heads, 64, 2, maps.v) &&
      make_map(p, p.v, p.v_stride, heads, part, 1, maps.part_v);
  return maps;
}

}  // namespace flash_kda
