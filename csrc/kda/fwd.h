// Host interface of the forward kernels. Plain C++ and CUDA types only: no torch header reaches a .cu file,
// which keeps a five-architecture compile at seconds and its bytes independent of the build folder.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fwd_plan.h"

namespace flash_kda {

constexpr int kDim = 128;  // K = V

// Strides are in elements; the innermost dimension of every tensor is contiguous.
struct Strides {
  int64_t batch, token, head;
};

// TMA descriptors of q, k, v and g. A box is a chunk's tokens of one head, as a tile of the kernels: all channels, in
// two halves one behind the other, and for part_v the 64 or 32 of v that are a block's state rows.
struct FwdMaps {
  CUtensorMap q, k, g, v, part_v;
  bool usable;  // false where make_maps could not make them: all chunks then go row by row
};

struct FwdParams {
  const void* q;     // bf16 [B, T, H, 128]
  const void* k;     // bf16 [B, T, H, 128]
  const void* v;     // bf16 [B, T, HV, 128]
  const void* g;     // bf16 [B, T, HV, 128], before activation
  const void* beta;  // bf16 [B, T, HV], logits
  void* out;         // bf16 [B, T, HV, 128]
  Strides q_stride, k_stride, v_stride, g_stride, beta_stride, out_stride;

  const float* a_log;    // fp32 [HV] or null (zeros)
  const float* dt_bias;  // fp32 [HV, 128] or null (zeros)

  const void* initial_state;  // [N, HV, 128, 128] or null (zeros)
  void* final_state;          // [N, HV, 128, 128] or null (not written)
  bool initial_is_bf16, final_is_bf16;

  const void* cu_seqlens;  // [N + 1] or null (fixed length)
  bool cu_is_int64;

  int64_t batch;          // B
  int64_t num_sequences;  // N
  int64_t seqlen;         // T: tokens a batch entry, or all packed tokens with cu_seqlens
  int heads_v;            // HV
  int heads_per_group;    // HV / H
  float scale;
  float lower_bound;

  FwdMaps maps;  // made by launch_fwd

  FwdPlan plan;

  // With plan.segment_chunks > 0: [plan.max_segments, HV, 128, 128] each, fp32, segments numbered through all
  // sequences.
  float* transitions;  // what a segment does to a state that enters it (a sequence's first: its initial state)
  float* offsets;      // the state a segment leaves from zero (a sequence's first: from its initial state); after the
                       // scan, the state that leaves it

  // With plan.ordered.
  int32_t* order;    // [num_sequences]
  unsigned* ticket;  // the tasks taken so far, besides the first of each block
};

// `sms`: multiprocessors of the current device.
cudaError_t launch_fwd(FwdParams& p, int sms, cudaStream_t stream);

}  // namespace flash_kda
