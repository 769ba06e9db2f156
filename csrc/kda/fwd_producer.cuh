// Producer warps: raw q, k, g, beta of a chunk -> Qd, Kd, Ki, decays, X - I and P in a slot; see docs/numerics.md.
#pragma once

#include "fwd_layout.cuh"

namespace flash_kda {

// The products of a tile's rows with themselves, in accumulator layout; their diagonal, the squared norms, is what is
// wanted. An A fragment of a tile is at the same time the B fragment of its transpose.
__device__ __forceinline__ void row_products(uint32_t tile, const uint32_t (&row_piece)[4], float (&products)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) products[n][i] = 0.0f;
#pragma unroll
  for (int kb = 0; kb < kBlocks; ++kb) {
    uint32_t a[4];
    ldmatrix_x4(a, frag_addr(tile, row_piece, kb));
    mma_bf16(products[0], a, a[0], a[2]);
    mma_bf16(products[1], a, a[1], a[3]);
  }
}

// Reciprocal norms of the 16 q rows and 16 k rows, on the tensor cores: products of bf16 are exact in fp32.
template <typename P>
__device__ __forceinline__ void store_norms(const Slot<P>& slot, float scale, const FragAddr& at, int lane) {
  float q[2][4] = {}, k[2][4];
  if constexpr (P::kOutput) row_products(smem_addr(slot.tiles.q()), at.rows_first, q);
  row_products(smem_addr(slot.tiles.k()), at.rows_first, k);
  const int row = lane >> 2;
  if ((lane & 3) != row >> 1) return;  // the lane that holds the diagonal of rows `row` and `row + 8`
  const bool odd = row & 1;
  const float q_top = odd ? q[0][1] : q[0][0], q_bottom = odd ? q[1][3] : q[1][2];
  const float k_top = odd ? k[0][1] : k[0][0], k_bottom = odd ? k[1][3] : k[1][2];
  slot.extras.norm[row] = make_float2(rsqrtf(q_top + kNormEps) * scale, rsqrtf(k_top + kNormEps));
  slot.extras.norm[row + 8] = make_float2(rsqrtf(q_bottom + kNormEps) * scale, rsqrtf(k_bottom + kNormEps));
}

// A lane works on two neighbouring channels at a time, 2 lane and 2 lane + 1 of one half of the tile: one half after
// the other in a loop that is not unrolled, since with three warps a scheduler the code of both halves no longer fits
// the instruction cache close to the issue slots.
constexpr int kHalves = 2;

__device__ __forceinline__ int pair_offset(int half, int row, int lane) {
  return half * kHalfBytes + row * kRowBytes + ((((lane >> 2) ^ row) & 7) << 4) + (lane & 3) * 4;
}

// Gate: log2 decay = bound * sigmoid(exp(A_log) * (g + dt_bias)), as bound / (1 + 2^(slope * g + bias)).
struct Gate {
  float slope;           // -exp(A_log) * log2(e)
  float2 bias[kHalves];  // slope * dt_bias of the lane's channels
  float bound;           // lower_bound * log2(e)
};

__device__ __forceinline__ Gate make_gate(const FwdParams& p, int head, int lane) {
  Gate gate;
  gate.slope = -kLog2e * (p.a_log != nullptr ? expf(p.a_log[head]) : 1.0f);
  gate.bound = p.lower_bound * kLog2e;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float2 dt = make_float2(0.0f, 0.0f);
    if (p.dt_bias != nullptr) {
      const float* row = p.dt_bias + static_cast<int64_t>(head) * kDim + half * kHalfChannels + 2 * lane;
      dt = make_float2(row[0], row[1]);
    }
    gate.bias[half] = make_float2(gate.slope * dt.x, gate.slope * dt.y);
  }
  return gate;
}

// In-chunk cumulative log2 decay of the lane's channels. Tokens past the end do not decay.
__device__ __forceinline__ void cumulative_gate(const uint8_t* g_tile, const Gate& gate, int half, int valid, int lane,
                                                float2 (&G)[kChunk]) {
  const float2 bias = half == 0 ? gate.bias[0] : gate.bias[1];
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    const uint32_t g = *reinterpret_cast<const uint32_t*>(g_tile + pair_offset(half, t, lane));
    const float bound = t < valid ? gate.bound : 0.0f;
    sum.x += bound * sigmoid_neg_log2(gate.slope * bf16_lo(g) + bias.x);
    sum.y += bound * sigmoid_neg_log2(gate.slope * bf16_hi(g) + bias.y);
    G[t] = sum;
  }
}

// Tokens that are read before any of them is written: to the compiler a write may change what the next token reads, and
// each read then waits for the write in front of it. Worth its registers where the time of one chunk counts.
template <typename P>
constexpr int kBatch = P::kRows < kDim ? 4 : 1;

// Raw q, k, g of one half -> Qd, Kd, Ki in place, chunk decay to the slot.
template <typename P>
__device__ __forceinline__ void scale_operands(const Slot<P>& slot, const float2 (&G)[kChunk], int half, int lane) {
  const float2 gam = make_float2(ex2(G[kChunk - 1].x), ex2(G[kChunk - 1].y));
  *reinterpret_cast<float2*>(slot.extras.gam + gam_index(half * kHalfChannels + 2 * lane)) = gam;
#pragma unroll
  for (int first = 0; first < kChunk; first += kBatch<P>) {
    uint32_t q[kBatch<P>], k[kBatch<P>];
    float2 norm[kBatch<P>];
#pragma unroll
    for (int i = 0; i < kBatch<P>; ++i) {
      const int off = pair_offset(half, first + i, lane);
      if constexpr (P::kOutput) q[i] = *reinterpret_cast<const uint32_t*>(slot.tiles.q() + off);
      k[i] = *reinterpret_cast<const uint32_t*>(slot.tiles.k() + off);
      norm[i] = slot.extras.norm[first + i];
    }
#pragma unroll
    for (int i = 0; i < kBatch<P>; ++i) {
      const float2 g = G[first + i];
      const int off = pair_offset(half, first + i, lane);
      const float2 decay = make_float2(ex2(g.x), ex2(g.y));
      const float2 kn = make_float2(bf16_lo(k[i]) * norm[i].y, bf16_hi(k[i]) * norm[i].y);
      const float2 ki = make_float2(kn.x * ex2(-g.x), kn.y * ex2(-g.y));
      auto store = [off](uint8_t* tile, float lo, float hi) {
        *reinterpret_cast<uint32_t*>(tile + off) = pack_bf16(lo, hi);
      };
      if constexpr (P::kOutput)
        store(slot.tiles.q(), bf16_lo(q[i]) * norm[i].x * decay.x, bf16_hi(q[i]) * norm[i].x * decay.y);
      store(slot.tiles.k(), kn.x * decay.x, kn.y * decay.y);
      store(slot.tiles.g(), ki.x, ki.y);
    }
  }
}

// A and P of the chunk in accumulator layout, before masking.
template <typename P>
__device__ __forceinline__ void intra_products(const Slot<P>& slot, const FragAddr& at, float (&A)[2][4],
                                               float (&QK)[2][4]) {
  const uint32_t kd = smem_addr(slot.tiles.k()), qd = smem_addr(slot.tiles.q()), ki = smem_addr(slot.tiles.g());
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) A[n][i] = QK[n][i] = 0.0f;
#pragma unroll
  for (int kb = 0; kb < kBlocks; ++kb) {
    uint32_t a_k[4], a_q[4], b[4];
    ldmatrix_x4(b, frag_addr(ki, at.cols_first, kb));
    ldmatrix_x4(a_k, frag_addr(kd, at.rows_first, kb));
    if constexpr (P::kOutput) ldmatrix_x4(a_q, frag_addr(qd, at.rows_first, kb));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_bf16(A[n], a_k, b[2 * n], b[2 * n + 1]);
      if constexpr (P::kOutput) mma_bf16(QK[n], a_q, b[2 * n], b[2 * n + 1]);
    }
  }
}

// Inverse of I + L for a strictly lower 16x16 L given by its blocks in accumulator layout: l00 and l11 diagonal,
// l10 below. Blocks of size h are joined to 2h by X <- X - X B_h X, where B_h is the part of L that links the two
// halves: every intermediate is an inverse of a sub-block, so nothing grows, unlike the power series of L whose
// terms reach binomial size when keys repeat. Returns the blocks of X the same way, diagonal included.
struct LowerBlocks {
  float d0[2], d1[2], below[2];  // lane holds row lane/4, columns 2(lane%4), +1 of each 8x8 block
};

__device__ __forceinline__ LowerBlocks inverse_unit_lower(const LowerBlocks& L, int lane) {
  const int row = lane >> 2, pair = lane & 3;  // row of the block; columns 2*pair, 2*pair + 1
  const uint32_t lt0 = movmatrix_trans(pack_f16(L.d0[0], L.d0[1]));
  const uint32_t lt1 = movmatrix_trans(pack_f16(L.d1[0], L.d1[1]));
  const uint32_t lt10 = movmatrix_trans(pack_f16(L.below[0], L.below[1]));

  // h = 1: X = I - B_1, B_1 = entries (odd row, column row-1).
  const bool even_diag = row == 2 * pair, odd_row = row == 2 * pair + 1;
  float x[4] = {even_diag ? 1.0f : (odd_row ? -L.d0[0] : 0.0f), odd_row ? 1.0f : 0.0f,
                even_diag ? 1.0f : (odd_row ? -L.d1[0] : 0.0f), odd_row ? 1.0f : 0.0f};

  // h = 2 and 4, both diagonal blocks in one product: A = diag(X0, X1), B = [M0; M1]. In the transposed fragment a
  // lane holds rows 2*pair, 2*pair+1 and column `row` of L.
  const bool link2 = (pair & 1) && !((row >> 1) & 1) && (pair >> 1) == (row >> 2);
  const bool link4 = pair >= 2 && row < 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool link = h == 0 ? link2 : link4;
    const uint32_t x0 = pack_f16(x[0], x[1]), x1 = pack_f16(x[2], x[3]);
    float t[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_f16(t, x0, 0u, 0u, x1, link ? lt0 : 0u, link ? lt1 : 0u);
    float y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_f16(y, pack_f16(t[0], t[1]), 0u, 0u, pack_f16(t[2], t[3]), movmatrix_trans(x0), movmatrix_trans(x1));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] -= y[i];
  }

  // h = 8: X10 = -X1 L10 X0, in rows 8-15 of the products.
  const uint32_t x0 = pack_f16(x[0], x[1]), x1 = pack_f16(x[2], x[3]);
  float t[4] = {0.0f, 0.0f, 0.0f, 0.0f}, y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  mma_f16(t, 0u, x1, 0u, 0u, lt10, 0u);
  mma_f16(y, 0u, pack_f16(t[2], t[3]), 0u, 0u, movmatrix_trans(x0), 0u);

  LowerBlocks X;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    X.d0[i] = x[i];
    X.d1[i] = x[2 + i];
    X.below[i] = -y[2 + i];
  }
  return X;
}

// Masks A and P, inverts, and leaves X - I and P as the B fragments consumers load. Masking selects: above the
// diagonal P may be infinite.
template <typename P>
__device__ __forceinline__ void finish_chunk(const Slot<P>& slot, const float (&A)[2][4], const float (&QK)[2][4],
                                             float beta, int lane) {
  const int row = lane >> 2, pair = lane & 3;
  if (lane < kChunk) slot.extras.beta[lane] = beta * kStateScale;
  const float beta_top = __shfl_sync(0xffffffffu, beta, row), beta_bottom = __shfl_sync(0xffffffffu, beta, row + 8);
  LowerBlocks L;
  float p0[2], p1[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int col = 2 * pair + i;
    L.d0[i] = row > col ? beta_top * A[0][i] : 0.0f;
    L.d1[i] = row > col ? beta_bottom * A[1][2 + i] : 0.0f;
    L.below[i] = beta_bottom * A[0][2 + i];
    p0[i] = row >= col ? QK[0][i] : 0.0f;
    p1[i] = row >= col ? QK[1][2 + i] : 0.0f;
  }
  LowerBlocks X = inverse_unit_lower(L, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool strict = row > 2 * pair + i;
    X.d0[i] = strict ? X.d0[i] : 0.0f;
    X.d1[i] = strict ? X.d1[i] : 0.0f;
  }
  slot.extras.frag_a[lane] = make_uint4(pack_bf16(X.d0[0], X.d0[1]), pack_bf16(X.below[0], X.below[1]),
                                        pack_bf16(X.d1[0], X.d1[1]), pack_bf16(p0[0], p0[1]));
  slot.extras.frag_b[lane] = make_uint2(pack_bf16(QK[0][2], QK[0][3]), pack_bf16(p1[0], p1[1]));
}

// Copies a part of a prepared chunk to the same place in the other blocks of the cluster, counted by their `full`
// barriers.
template <typename P>
__device__ __forceinline__ void share(const void* data, int bytes, const uint64_t& full, int rank, int lane) {
  if constexpr (P::kShare == 1) return;
  fence_async_proxy();
  __syncwarp();
  if (lane != 0) return;
#pragma unroll
  for (int i = 1; i < P::kShare; ++i) {
    const int peer = (rank + i) % P::kShare;
    bulk_copy_to_peer(peer_addr(smem_addr(data), peer), smem_addr(data), bytes, peer_addr(smem_addr(&full), peer));
  }
}

template <typename P>
__device__ __forceinline__ void prepare_chunk(Smem<P>& smem, int slot_index, const Gate& gate, float scale,
                                              const FragAddr& at, uint16_t beta_bits, int valid, int rank, int lane) {
  const Slot<P> slot = slot_of(smem, slot_index);
  store_norms(slot, scale * kStateUnscale, at, lane);
  __syncwarp();  // norms; also the last reads of raw q and k by other lanes
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    float2 G[kChunk];
    cumulative_gate(slot.tiles.g(), gate, half, valid, lane, G);
    scale_operands(slot, G, half, lane);
  }
  __syncwarp();  // operands
  share<P>(slot.tiles.bytes, Tiles<P>::kShared, smem.full[slot_index], rank, lane);
  float A[2][4], QK[2][4];
  intra_products(slot, at, A, QK);
  const float logit = bf16_lo(beta_bits);
  finish_chunk(slot, A, QK, lane < valid ? sigmoid_neg_log2(-kLog2e * logit) : 0.0f, lane);
  share<P>(&slot.extras, sizeof(Extras), smem.full[slot_index], rank, lane);
}

// Counting the block's chunks through all its works, producer `warp` prepares rank + kShare * (warp + i * kProducers).
template <typename P>
__device__ __forceinline__ void produce(const FwdParams& p, Smem<P>& smem, int rank, int warp, int lane) {
  if constexpr (kMoveRegisters<P>) set_max_registers_down<kProducerRegisters>();
  const FragAddr at = make_frag_addr(lane);
  RingPosition<P::kSlots> pos;
  pos.advance(rank + P::kShare * warp);
  int head = -1;
  Gate gate;
  while (true) {
    // A wait tells a phase only from the one before it. Where the slot's last pass was another producer's, that one's
    // copies may still be on their way, and the phase before would pass for this one.
    if constexpr (P::kSlots % P::kStride != 0) mbarrier_wait(smem_addr(&smem.full[pos.slot]), pos.parity ^ 1);
    mbarrier_wait(smem_addr(&smem.raw[pos.slot]), pos.parity);
    const ChunkRef chunk = smem.chunk[pos.slot];
    if (chunk.work < 0) break;
    const Work& work = smem.work[chunk.work];
    const int valid = work.length - chunk.first;
    // Read long before its use, and left as raw bits until then: a conversion would wait for the load.
    const uint16_t beta_bits =
        lane < kChunk && lane < valid ? global(work.beta)[(chunk.first + lane) * p.beta_stride.token] : uint16_t{0};
    if (work.head != head) {
      head = work.head;
      gate = make_gate(p, head, lane);
    }
    prepare_chunk(smem, pos.slot, gate, p.scale, at, beta_bits, valid, rank, lane);
    mbarrier_arrive(smem_addr(&smem.full[pos.slot]));
    pos.advance(P::kStride);
  }
}

}  // namespace flash_kda
