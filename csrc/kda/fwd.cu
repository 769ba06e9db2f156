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
#include "device.cuh"
#include "fwd.h"

namespace flash_kda {

constexpr int kChunk = 16;
constexpr int kDim = 128;  // K = V
constexpr int kConsumerWarps = 4;
constexpr int kWarp = 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;

// ---- shared memory ------------------------------------------------------------------------------
// Tiles are [16 tokens][128 channels] bf16, 256 bytes a row, 16-byte pieces XOR-swizzled by the row so that ldmatrix
// (8 rows, one column) touches all banks once. q, k and g arrive raw and become Qd, Kd and Kt in place; each lane
// rewrites exactly the 8 bytes it read. v is later overwritten by the output tile, each warp its own columns.
constexpr int kTileBytes = kChunk * kDim * 2;

constexpr int kGamGroup = 36;  // 32 decays of one lane class + 4 floats of padding: four 16-byte reads, four bank groups

struct Slot {
  uint8_t q[kTileBytes];
  uint8_t k[kTileBytes];
  uint8_t g[kTileBytes];
  uint8_t v[kTileBytes];
  uint4 frag_a[kWarp];  // X - I (three 8x8 blocks), P block (0,0), as mma B fragments
  uint2 frag_b[kWarp];  // P blocks (1,0), (1,1)
  float gam[4 * kGamGroup];
  float beta[kChunk];
};

struct ProducerScratch {
  uint8_t k_inv[kTileBytes];  // k^ exp(-G)
  float2 norm[kChunk];        // 1/|q|*scale, 1/|k|
};

template <int kProducers, int kSlots>
struct Smem {
  Slot slot[kSlots];
  ProducerScratch scratch[kProducers];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];
};

// Per architecture: the sm_120 family has 99 KB of shared memory a block, the others 227 KB.
constexpr int kSmallSmem = 99 * 1024;
constexpr int kProducers = 4;
constexpr int kSlotsLarge = 12;
constexpr int kSlotsSmall = 4;
using SmemLarge = Smem<kProducers, kSlotsLarge>;
using SmemSmall = Smem<kProducers, kSlotsSmall>;
static_assert(sizeof(SmemLarge) <= 227 * 1024, "more shared memory than an sm_90 or sm_100 block has");
static_assert(sizeof(SmemSmall) <= kSmallSmem, "more shared memory than an sm_120 block has");
static_assert(sizeof(Slot) % 128 == 0 || sizeof(Slot) % 16 == 0, "tiles must stay 16-byte aligned");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300
constexpr int kSlots = kSlotsSmall;
#else
constexpr int kSlots = kSlotsLarge;
#endif
using SmemArch = Smem<kProducers, kSlots>;

// A place in the ring of slots, and the parity of the barrier phase that belongs to this pass over it.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int n) {
    slot += n;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
};
static_assert(kProducers <= kSlots, "advance() wraps once");

constexpr int kThreads = (kConsumerWarps + kProducers) * kWarp;

// Byte offset of 16-byte piece `piece` of row `row` in a swizzled tile.
__device__ __forceinline__ int tile_offset(int row, int piece) { return row * (kDim * 2) + ((piece ^ (row & 7)) << 4); }

// Where this lane's row starts for ldmatrix.x4 over a [16][128] tile, for the two orders of its four 8x8 matrices:
//   rows_first: (rows 0-7, left), (8-15, left), (0-7, right), (8-15, right)    A operand; B operand by .trans
//   cols_first: (rows 0-7, left), (0-7, right), (8-15, left), (8-15, right)    B operand
// Entry i is the offset of channel block i; block i + 4 lies 128 bytes further, since the swizzle moves only the low
// three bits of the piece. Kept in registers: recomputing the XOR for each load costs as much as the loads.
struct FragAddr {
  uint32_t rows_first[4], cols_first[4];
};

__device__ __forceinline__ FragAddr make_frag_addr(int lane) {
  const int low = (lane >> 3) & 1, high = lane >> 4;
  FragAddr at;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    at.rows_first[i] = tile_offset((lane & 7) + 8 * low, 2 * i + high);
    at.cols_first[i] = tile_offset((lane & 7) + 8 * high, 2 * i + low);
  }
  return at;
}

__device__ __forceinline__ uint32_t frag_addr(uint32_t tile, const uint32_t (&offset)[4], int block) {
  return tile + offset[block & 3] + (block >> 2) * 128;
}

// Position of the decay of channel 8j + 2t + b: a consumer lane of class t = lane % 4 reads its 32 as eight float4.
__device__ __forceinline__ int gam_index(int channel) {
  return ((channel & 7) >> 1) * kGamGroup + (channel >> 3) * 2 + (channel & 1);
}

// ---- the sequence a block works on --------------------------------------------------------------
struct Work {
  int64_t batch;        // row of the batch dimension (0 with cu_seqlens)
  int64_t first_token;  // of the sequence, inside that row
  int length;           // tokens
  int head;             // value head
  int64_t state_index;  // n * HV + head
};

__device__ __forceinline__ int64_t read_cu_seqlens(const FwdParams& p, int64_t i) {
  const int64_t x = p.cu_is_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[i]
                                  : static_cast<int64_t>(static_cast<const int32_t*>(p.cu_seqlens)[i]);
  // The host cannot look at the values without a synchronisation; clamping keeps a wrong one inside the buffers.
  return x < 0 ? 0 : (x > p.seqlen ? p.seqlen : x);
}

__device__ __forceinline__ Work block_work(const FwdParams& p) {
  Work w;
  const int64_t n = blockIdx.x / p.heads_v;
  w.head = static_cast<int>(blockIdx.x % p.heads_v);
  w.state_index = n * p.heads_v + w.head;
  if (p.cu_seqlens != nullptr) {
    const int64_t begin = read_cu_seqlens(p, n), end = read_cu_seqlens(p, n + 1);
    w.batch = 0;
    w.first_token = begin;
    w.length = static_cast<int>(end > begin ? end - begin : 0);
  } else {
    w.batch = n;
    w.first_token = 0;
    w.length = static_cast<int>(p.seqlen);
  }
  return w;
}

__device__ __forceinline__ const uint8_t* head_base(const void* base, const Strides& s, const Work& w, int head) {
  return static_cast<const uint8_t*>(base) + 2 * (w.batch * s.batch + w.first_token * s.token + head * s.head);
}

// ---- producer -----------------------------------------------------------------------------------
// 16 rows x 256 bytes into a swizzled tile; rows from `valid` on are zeros.
__device__ __forceinline__ void load_tile(uint32_t dst, const uint8_t* src, int64_t row_bytes, int valid, int lane) {
  const int piece = lane & 15;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const int row = 2 * i + (lane >> 4);
    const bool ok = row < valid;
    cp_async_16(dst + tile_offset(row, piece), src + (ok ? row : 0) * row_bytes + piece * 16, ok);
  }
}

// Reciprocal norms of the 16 q rows and 16 k rows: the diagonals of q q^T and k k^T on the tensor cores, whose products
// of bf16 are exact in fp32. An A fragment of a tile is at the same time the B fragment of its transpose.
__device__ __forceinline__ void compute_norms(uint32_t tile, const uint32_t (&row_piece)[4], float (&squares)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) squares[n][i] = 0.0f;
#pragma unroll
  for (int kb = 0; kb < kDim / 16; ++kb) {
    uint32_t a[4];
    ldmatrix_x4(a, frag_addr(tile, row_piece, kb));
    mma_bf16(squares[0], a, a[0], a[2]);
    mma_bf16(squares[1], a, a[1], a[3]);
  }
}

__device__ __forceinline__ void store_norms(const Slot& slot, ProducerScratch& scratch, float scale, const FragAddr& at, int lane) {
  float q[2][4], k[2][4];
  compute_norms(smem_addr(slot.q), at.rows_first, q);
  compute_norms(smem_addr(slot.k), at.rows_first, k);
  const int row = lane >> 2;
  if ((lane & 3) != row >> 1) return;  // the lane that holds the diagonal of rows `row` and `row + 8`
  const bool odd = row & 1;
  const float q_top = odd ? q[0][1] : q[0][0], q_bottom = odd ? q[1][3] : q[1][2];
  const float k_top = odd ? k[0][1] : k[0][0], k_bottom = odd ? k[1][3] : k[1][2];
  scratch.norm[row] = make_float2(rsqrtf(q_top + kNormEps) * scale, rsqrtf(k_top + kNormEps));
  scratch.norm[row + 8] = make_float2(rsqrtf(q_bottom + kNormEps) * scale, rsqrtf(k_bottom + kNormEps));
}

// Gate of one (head, four channels): log2 decay = bound * sigmoid(exp(A_log) * (g + dt_bias)).
struct Gate {
  float slope;    // -exp(A_log) * log2(e)
  float bias[4];  // slope * dt_bias
  float bound;    // lower_bound * log2(e)
};

__device__ __forceinline__ Gate make_gate(const FwdParams& p, int head, int lane) {
  Gate gate;
  gate.slope = -kLog2e * (p.a_log != nullptr ? expf(p.a_log[head]) : 1.0f);
  gate.bound = p.lower_bound * kLog2e;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    gate.bias[j] = p.dt_bias != nullptr ? gate.slope * p.dt_bias[static_cast<int64_t>(head) * kDim + 4 * lane + j] : 0.0f;
  return gate;
}

// In-chunk cumulative log2 decay of the lane's four channels. Tokens past the end do not decay.
__device__ __forceinline__ void cumulative_gate(const Slot& slot, const Gate& gate, int valid, int lane,
                                                float (&G)[kChunk][4]) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    const uint2 raw = *reinterpret_cast<const uint2*>(slot.g + tile_offset(t, lane >> 1) + (lane & 1) * 8);
    const float g[4] = {bf16_lo(raw.x), bf16_hi(raw.x), bf16_lo(raw.y), bf16_hi(raw.y)};
    const float bound = t < valid ? gate.bound : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] += bound * sigmoid_neg_log2(gate.slope * g[j] + gate.bias[j]);
      G[t][j] = sum[j];
    }
  }
}

__device__ __forceinline__ uint2 pack4(const float (&x)[4]) {
  return make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

// Raw q, k, g -> Qd, Kd, Kt in place, k^ exp(-G) to scratch, chunk decay to the slot.
__device__ __forceinline__ void scale_operands(Slot& slot, ProducerScratch& scratch, const float (&G)[kChunk][4], int lane) {
  float gam[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) gam[j] = ex2(G[kChunk - 1][j]);
  *reinterpret_cast<float2*>(slot.gam + gam_index(4 * lane)) = make_float2(gam[0], gam[1]);
  *reinterpret_cast<float2*>(slot.gam + gam_index(4 * lane + 2)) = make_float2(gam[2], gam[3]);
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    const int off = tile_offset(t, lane >> 1) + (lane & 1) * 8;
    const uint2 q_raw = *reinterpret_cast<const uint2*>(slot.q + off);
    const uint2 k_raw = *reinterpret_cast<const uint2*>(slot.k + off);
    const float2 norm = scratch.norm[t];
    const float q[4] = {bf16_lo(q_raw.x), bf16_hi(q_raw.x), bf16_lo(q_raw.y), bf16_hi(q_raw.y)};
    const float k[4] = {bf16_lo(k_raw.x), bf16_hi(k_raw.x), bf16_lo(k_raw.y), bf16_hi(k_raw.y)};
    float qd[4], kd[4], ki[4], kt[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float decay = ex2(G[t][j]);
      const float kn = k[j] * norm.y;
      qd[j] = q[j] * norm.x * decay;
      kd[j] = kn * decay;
      ki[j] = kn * ex2(-G[t][j]);
      kt[j] = ki[j] * gam[j];
    }
    *reinterpret_cast<uint2*>(slot.q + off) = pack4(qd);
    *reinterpret_cast<uint2*>(slot.k + off) = pack4(kd);
    *reinterpret_cast<uint2*>(slot.g + off) = pack4(kt);
    *reinterpret_cast<uint2*>(scratch.k_inv + off) = pack4(ki);
  }
}

// A and P of the chunk in accumulator layout, before masking.
__device__ __forceinline__ void intra_products(const Slot& slot, const ProducerScratch& scratch, const FragAddr& at,
                                               float (&A)[2][4], float (&P)[2][4]) {
  const uint32_t kd = smem_addr(slot.k), qd = smem_addr(slot.q), ki = smem_addr(scratch.k_inv);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) A[n][i] = P[n][i] = 0.0f;
#pragma unroll
  for (int kb = 0; kb < kDim / 16; ++kb) {
    uint32_t a_k[4], a_q[4], b[4];
    ldmatrix_x4(b, frag_addr(ki, at.cols_first, kb));
    ldmatrix_x4(a_k, frag_addr(kd, at.rows_first, kb));
    ldmatrix_x4(a_q, frag_addr(qd, at.rows_first, kb));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_bf16(A[n], a_k, b[2 * n], b[2 * n + 1]);
      mma_bf16(P[n], a_q, b[2 * n], b[2 * n + 1]);
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

// Masks A and P, inverts, and leaves X - I and P as the B fragments consumers load. Masking selects: entries above the
// diagonal can be infinite.
__device__ __forceinline__ void finish_chunk(Slot& slot, const float (&A)[2][4], const float (&P)[2][4], float beta, int lane) {
  const int row = lane >> 2, pair = lane & 3;
  if (lane < kChunk) slot.beta[lane] = beta;
  const float beta_top = __shfl_sync(0xffffffffu, beta, row), beta_bottom = __shfl_sync(0xffffffffu, beta, row + 8);
  LowerBlocks L;
  float p0[2], p1[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int col = 2 * pair + i;
    L.d0[i] = row > col ? beta_top * A[0][i] : 0.0f;
    L.d1[i] = row > col ? beta_bottom * A[1][2 + i] : 0.0f;
    L.below[i] = beta_bottom * A[0][2 + i];
    p0[i] = row >= col ? P[0][i] : 0.0f;
    p1[i] = row >= col ? P[1][2 + i] : 0.0f;
  }
  LowerBlocks X = inverse_unit_lower(L, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool strict = row > 2 * pair + i;
    X.d0[i] = strict ? X.d0[i] : 0.0f;
    X.d1[i] = strict ? X.d1[i] : 0.0f;
  }
  slot.frag_a[lane] = make_uint4(pack_bf16(X.d0[0], X.d0[1]), pack_bf16(X.below[0], X.below[1]),
                                 pack_bf16(X.d1[0], X.d1[1]), pack_bf16(p0[0], p0[1]));
  slot.frag_b[lane] = make_uint2(pack_bf16(P[0][2], P[0][3]), pack_bf16(p1[0], p1[1]));
}

struct ProducerInput {
  const uint8_t *q, *k, *v, *g;  // first token of the sequence
  const uint16_t* beta;  // bf16 bits
  int64_t q_row, k_row, v_row, g_row;  // bytes between tokens
  int64_t beta_row;                    // elements between tokens
};

__device__ __forceinline__ ProducerInput producer_input(const FwdParams& p, const Work& w) {
  const int head_qk = w.head / p.heads_per_group;
  ProducerInput in;
  in.q = head_base(p.q, p.q_stride, w, head_qk);
  in.k = head_base(p.k, p.k_stride, w, head_qk);
  in.v = head_base(p.v, p.v_stride, w, w.head);
  in.g = head_base(p.g, p.g_stride, w, w.head);
  in.beta = reinterpret_cast<const uint16_t*>(head_base(p.beta, p.beta_stride, w, w.head));
  in.q_row = 2 * p.q_stride.token;
  in.k_row = 2 * p.k_stride.token;
  in.v_row = 2 * p.v_stride.token;
  in.g_row = 2 * p.g_stride.token;
  in.beta_row = p.beta_stride.token;
  return in;
}

// Starts the copies of one chunk; returns this lane's beta logit (lanes 0-15, token = lane), still as raw bits: a
// conversion here would wait for the load.
__device__ __forceinline__ uint16_t start_chunk(Slot& slot, const ProducerInput& in, int chunk, int length, int lane) {
  const int64_t token = static_cast<int64_t>(chunk) * kChunk;
  const int valid = length - static_cast<int>(token);
  load_tile(smem_addr(slot.q), in.q + token * in.q_row, in.q_row, valid, lane);
  load_tile(smem_addr(slot.k), in.k + token * in.k_row, in.k_row, valid, lane);
  load_tile(smem_addr(slot.g), in.g + token * in.g_row, in.g_row, valid, lane);
  load_tile(smem_addr(slot.v), in.v + token * in.v_row, in.v_row, valid, lane);
  return lane < kChunk && lane < valid ? in.beta[(token + lane) * in.beta_row] : uint16_t{0};
}

__device__ __forceinline__ void prepare_chunk(Slot& slot, ProducerScratch& scratch, const Gate& gate, float scale,
                                              const FragAddr& at, uint16_t beta_bits, int valid, int lane) {
  store_norms(slot, scratch, scale, at, lane);
  float G[kChunk][4];
  cumulative_gate(slot, gate, valid, lane, G);
  __syncwarp();  // norms
  scale_operands(slot, scratch, G, lane);
  __syncwarp();  // operands
  float A[2][4], P[2][4];
  intra_products(slot, scratch, at, A, P);
  const float logit = bf16_lo(beta_bits);
  finish_chunk(slot, A, P, lane < valid ? sigmoid_neg_log2(-kLog2e * logit) : 0.0f, lane);
}

// Producer `warp` prepares chunks warp, warp + kProducers, ... With enough slots it starts the copies of its next chunk
// before it works on this one; with fewer the next chunk may need this chunk's slot.
__device__ __forceinline__ void produce(const FwdParams& p, const Work& w, SmemArch& smem, int warp, int lane) {
  constexpr bool kPrefetch = kSlots >= 2 * kProducers;
  const int chunks = (w.length + kChunk - 1) / kChunk;
  const ProducerInput in = producer_input(p, w);
  const Gate gate = make_gate(p, w.head, lane);
  const FragAddr at = make_frag_addr(lane);

  RingPosition pos;
  pos.advance(warp);
  RingPosition load_pos = pos;
  auto start = [&](int chunk) {
    mbarrier_wait(smem_addr(&smem.empty[load_pos.slot]), load_pos.parity ^ 1);
    const uint16_t beta = start_chunk(smem.slot[load_pos.slot], in, chunk, w.length, lane);
    load_pos.advance(kProducers);
    return beta;
  };
  uint16_t beta_next = 0;
  if (kPrefetch && warp < chunks) beta_next = start(warp);
  cp_async_commit();
  for (int chunk = warp; chunk < chunks; chunk += kProducers) {
    uint16_t beta = beta_next;
    if (!kPrefetch) beta = start(chunk);
    if (kPrefetch && chunk + kProducers < chunks) beta_next = start(chunk + kProducers);
    cp_async_commit();
    cp_async_wait<kPrefetch ? 1 : 0>();
    __syncwarp();
    prepare_chunk(smem.slot[pos.slot], smem.scratch[warp], gate, p.scale, at, beta, w.length - chunk * kChunk, lane);
    mbarrier_arrive(smem_addr(&smem.full[pos.slot]));
    pos.advance(kProducers);
  }
}

// ---- consumer -----------------------------------------------------------------------------------
// A warp owns 32 state rows as two m-tiles. S[m][j] is the accumulator of rows 16m + lane/4 (+8), channels
// 8j + 2(lane%4), +1.
constexpr int kTilesM = kDim / kConsumerWarps / 16;
constexpr int kTilesN = kDim / 8;
static_assert(kTilesM * 2 == 4, "write_output stores four 16-byte pieces of each row a warp");

struct ConsumerAddr {
  FragAddr frag;
  uint32_t v[kTilesM];  // this warp's columns of the v tile, as ldmatrix / stmatrix rows
  uint32_t out;         // this lane's 16-byte piece of row lane/4, in the same columns
};

__device__ __forceinline__ ConsumerAddr make_consumer_addr(int warp, int lane) {
  ConsumerAddr at;
  at.frag = make_frag_addr(lane);
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
    at.v[m] = tile_offset((lane & 7) + 8 * (lane >> 4), (warp * kTilesM + m) * 2 + ((lane >> 3) & 1));
  at.out = tile_offset(lane >> 2, warp * kTilesM * 2 + (lane & 3));
  return at;
}

__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  const uint32_t raw = *reinterpret_cast<const uint32_t*>(p);
  return make_float2(bf16_lo(raw), bf16_hi(raw));
}
__device__ __forceinline__ void store_pair(float* p, float x, float y) { *reinterpret_cast<float2*>(p) = make_float2(x, y); }
__device__ __forceinline__ void store_pair(__nv_bfloat16* p, float x, float y) {
  *reinterpret_cast<uint32_t*>(p) = pack_bf16(x, y);
}

// Calls f(S[m][j] pair, element offset from the lane's first element); the offsets are immediates.
template <typename F>
__device__ __forceinline__ void for_each_pair(float (&S)[kTilesM][kTilesN][4], F f) {
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) f(S[m][j][2 * half], S[m][j][2 * half + 1], (m * 16 + half * 8) * kDim + 8 * j);
}

__device__ __forceinline__ int64_t state_offset(const Work& w, int warp, int lane) {
  return (w.state_index * kDim + warp * kTilesM * 16 + (lane >> 2)) * kDim + 2 * (lane & 3);
}

template <typename T>
__device__ __forceinline__ void load_state_as(const void* state, int64_t offset, float (&S)[kTilesM][kTilesN][4]) {
  const T* src = static_cast<const T*>(state) + offset;
  for_each_pair(S, [&](float& x, float& y, int at) {
    const float2 pair = load_pair(src + at);
    x = pair.x;
    y = pair.y;
  });
}

template <typename T>
__device__ __forceinline__ void store_state_as(void* state, int64_t offset, float (&S)[kTilesM][kTilesN][4]) {
  T* dst = static_cast<T*>(state) + offset;
  for_each_pair(S, [&](float& x, float& y, int at) { store_pair(dst + at, x, y); });
}

__device__ __forceinline__ void zero(float (&acc)[kTilesM][2][4]) {
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
}

// Two neighbouring n-tiles of an accumulator are one A operand.
__device__ __forceinline__ void to_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

// acc[v][token] += S tile^T over one block of 16 channels.
__device__ __forceinline__ void state_product(uint32_t tile, int kb, const uint32_t (&S)[kTilesM][4], const FragAddr& at,
                                              float (&acc)[kTilesM][2][4]) {
  uint32_t b[4];
  ldmatrix_x4(b, frag_addr(tile, at.cols_first, kb));
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_bf16(acc[m][n], S[m], b[2 * n], b[2 * n + 1]);
}

// R = beta (V - Kd S^T), in fp32.
__device__ __forceinline__ void residual(const Slot& slot, const ConsumerAddr& at, int lane, float (&acc)[kTilesM][2][4]) {
  const int pair = lane & 3;
  const float2 beta[2] = {*reinterpret_cast<const float2*>(slot.beta + 2 * pair),
                          *reinterpret_cast<const float2*>(slot.beta + 8 + 2 * pair)};
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, smem_addr(slot.v) + at.v[m]);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair_v = v[2 * n + half];
        acc[m][n][2 * half] = beta[n].x * (bf16_lo(pair_v) - acc[m][n][2 * half]);
        acc[m][n][2 * half + 1] = beta[n].y * (bf16_hi(pair_v) - acc[m][n][2 * half + 1]);
      }
  }
}

// S = S gam + U^T Kt.
__device__ __forceinline__ void update_state(const Slot& slot, const uint32_t (&u)[kTilesM][4], const ConsumerAddr& at, int lane,
                                             float (&S)[kTilesM][kTilesN][4]) {
  const float4* gam = reinterpret_cast<const float4*>(slot.gam + (lane & 3) * kGamGroup);
#pragma unroll
  for (int jp = 0; jp < kTilesN / 2; ++jp) {
    const float4 decay = gam[jp];
    uint32_t b[4];
    ldmatrix_x4_trans(b, frag_addr(smem_addr(slot.g), at.frag.rows_first, jp));
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float(&acc)[4] = S[m][2 * jp + n];
        const float dx = n == 0 ? decay.x : decay.z, dy = n == 0 ? decay.y : decay.w;
        acc[0] *= dx;
        acc[1] *= dy;
        acc[2] *= dx;
        acc[3] *= dy;
        mma_bf16(acc, u[m], b[2 * n], b[2 * n + 1]);
      }
  }
}

// Output tile through this warp's own columns of the v tile, then 16-byte stores: a lane stores one piece of rows
// lane/4 and lane/4 + 8.
__device__ __forceinline__ void write_output(Slot& slot, const float (&o)[kTilesM][2][4], const ConsumerAddr& at, uint8_t* dst,
                                             int64_t row_bytes, int valid, int lane) {
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    uint32_t r[4];
    to_operand(r, o[m][0], o[m][1]);
    stmatrix_x4_trans(smem_addr(slot.v) + at.v[m], r);
  }
  __syncwarp();
  const int row = lane >> 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 x = *reinterpret_cast<const uint4*>(slot.v + at.out + half * 8 * kDim * 2);
    if (row + half * 8 < valid) *reinterpret_cast<uint4*>(dst + half * 8 * row_bytes) = x;
  }
}

__device__ __forceinline__ void consume_chunk(Slot& slot, float (&S)[kTilesM][kTilesN][4], const ConsumerAddr& at, uint8_t* dst,
                                              int64_t row_bytes, int valid, int lane) {
  // The second half of Qd S^T waits in registers (its operand, 32 of them) to run while R and U are formed; holding all
  // of S in bf16 instead would spill.
  constexpr int kBlocks = kDim / 16, kHeld = kBlocks / 2;
  const uint32_t kd = smem_addr(slot.k), qd = smem_addr(slot.q);
  uint32_t held[kHeld][kTilesM][4];
  float r[kTilesM][2][4], o[kTilesM][2][4];
  zero(r);
  zero(o);
#pragma unroll
  for (int kb = 0; kb < kBlocks; ++kb) {
    uint32_t(&s16)[kTilesM][4] = held[kb % kHeld];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) to_operand(s16[m], S[m][2 * kb], S[m][2 * kb + 1]);
    state_product(kd, kb, s16, at.frag, r);
    if (kb < kHeld) state_product(qd, kb, s16, at.frag, o);
  }
  residual(slot, at, lane, r);
  const uint4 fa = slot.frag_a[lane];
  const uint2 fb = slot.frag_b[lane];
  uint32_t u[kTilesM][4];
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    to_operand(u[m], r[m][0], r[m][1]);
    mma_bf16(r[m][0], u[m], fa.x, 0u);  // U = R + (X - I) R
    mma_bf16(r[m][1], u[m], fa.y, fa.z);
  }
#pragma unroll
  for (int kb = kHeld; kb < kBlocks; ++kb) state_product(qd, kb, held[kb % kHeld], at.frag, o);
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    to_operand(u[m], r[m][0], r[m][1]);
    mma_bf16(o[m][0], u[m], fa.w, 0u);
    mma_bf16(o[m][1], u[m], fb.x, fb.y);
  }
  update_state(slot, u, at, lane, S);
  write_output(slot, o, at, dst, row_bytes, valid, lane);
}

__device__ __forceinline__ void consume(const FwdParams& p, const Work& w, SmemArch& smem, int warp, int lane) {
  const int64_t row_bytes = 2 * p.out_stride.token;
  const ConsumerAddr at = make_consumer_addr(warp, lane);
  uint8_t* dst = const_cast<uint8_t*>(head_base(p.out, p.out_stride, w, w.head)) + (lane >> 2) * row_bytes +
                 (warp * kTilesM * 2 + (lane & 3)) * 16;
  float S[kTilesM][kTilesN][4];
  const int64_t state_at = state_offset(w, warp, lane);
  if (p.initial_state == nullptr)
    for_each_pair(S, [](float& x, float& y, int) { x = y = 0.0f; });
  else if (p.initial_is_bf16)
    load_state_as<__nv_bfloat16>(p.initial_state, state_at, S);
  else
    load_state_as<float>(p.initial_state, state_at, S);

  RingPosition pos;
  for (int left = w.length; left > 0; left -= kChunk) {
    mbarrier_wait(smem_addr(&smem.full[pos.slot]), pos.parity);
    consume_chunk(smem.slot[pos.slot], S, at, dst, row_bytes, left, lane);
    mbarrier_arrive(smem_addr(&smem.empty[pos.slot]));
    dst += kChunk * row_bytes;
    pos.advance(1);
  }

  if (p.final_state == nullptr) return;
  if (p.final_is_bf16)
    store_state_as<__nv_bfloat16>(p.final_state, state_at, S);
  else
    store_state_as<float>(p.final_state, state_at, S);
}

// ---- entry --------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) kda_fwd_kernel(const __grid_constant__ FwdParams p) {
  extern __shared__ __align__(128) uint8_t smem_raw[];
  SmemArch& smem = *reinterpret_cast<SmemArch*>(smem_raw);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x < kSlots) {
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
  int device = 0, limit = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
  const int bytes = static_cast<int>(limit >= static_cast<int>(sizeof(SmemLarge)) ? sizeof(SmemLarge) : sizeof(SmemSmall));
  if (cudaError_t e = cudaFuncSetAttribute(kda_fwd_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  kda_fwd_kernel<<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace flash_kda
