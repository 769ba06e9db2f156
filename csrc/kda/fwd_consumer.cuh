// Consumer warps: the state in registers, advanced chunk by chunk.
#pragma once

#include "fwd_layout.cuh"

namespace flash_kda {

// A warp owns kTilesM m-tiles of 16 state rows. S[m][j] is the accumulator of rows 16m + lane/4 (+8), channels
// 8j + 2(lane%4), +1.
constexpr int kTilesN = kDim / 8;

template <int kTilesM>
struct ConsumerAddr {
  FragAddr frag;
  uint32_t v[kTilesM];  // this warp's columns of the v tile, as ldmatrix / stmatrix rows
  uint32_t out;         // the 16-byte piece of them that this lane stores, in row out_row<kTilesM>(lane)
};

template <int kTilesM>
constexpr int kPieces = kTilesM * 2;  // 16-byte pieces of a warp's columns

template <int kTilesM>
__device__ __forceinline__ int out_row(int lane) {
  return lane / kPieces<kTilesM>;
}

template <typename P>
__device__ __forceinline__ ConsumerAddr<P::kTilesM> make_consumer_addr(int warp, int lane) {
  constexpr int kTilesM = P::kTilesM;
  ConsumerAddr<kTilesM> at;
  at.frag = make_frag_addr(lane);
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
    at.v[m] = v_offset<P::kRows>((lane & 7) + 8 * (lane >> 4), (warp * kTilesM + m) * 2 + ((lane >> 3) & 1));
  at.out = v_offset<P::kRows>(out_row<kTilesM>(lane), warp * kPieces<kTilesM> + lane % kPieces<kTilesM>);
  if constexpr (kTilesM == 1) {  // else the compiler computes them again for each chunk, though registers are left
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      at.frag.rows_first[i] = opaque(at.frag.rows_first[i]);
      at.frag.cols_first[i] = opaque(at.frag.cols_first[i]);
    }
    at.v[0] = opaque(at.v[0]);
    at.out = opaque(at.out);
  }
  return at;
}

__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  const uint32_t raw = *reinterpret_cast<const uint32_t*>(p);
  return make_float2(bf16_lo(raw), bf16_hi(raw));
}
__device__ __forceinline__ void store_pair(float* p, float x, float y) {
  *reinterpret_cast<float2*>(p) = make_float2(x, y);
}
__device__ __forceinline__ void store_pair(__nv_bfloat16* p, float x, float y) {
  *reinterpret_cast<uint32_t*>(p) = pack_bf16(x, y);
}

// Calls f(S[m][j] pair, element offset from the lane's first element); the offsets are immediates.
template <int kTilesM, typename F>
__device__ __forceinline__ void for_each_pair(float (&S)[kTilesM][kTilesN][4], F f) {
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        f(S[m][j][2 * half], S[m][j][2 * half + 1], (m * 16 + half * 8) * kDim + 8 * j);
}

template <typename T, int kTilesM>
__device__ __forceinline__ void load_state_as(const void* state, int offset, float scale,
                                              float (&S)[kTilesM][kTilesN][4]) {
  const T* src = static_cast<const T*>(global(state)) + offset;
  for_each_pair(S, [&](float& x, float& y, int at) {
    const float2 pair = load_pair(src + at);
    x = pair.x * scale;
    y = pair.y * scale;
  });
}

template <typename T, int kTilesM>
__device__ __forceinline__ void store_state_as(const void* state, int offset, float scale,
                                               float (&S)[kTilesM][kTilesN][4]) {
  T* dst = const_cast<T*>(static_cast<const T*>(global(state))) + offset;
  for_each_pair(S, [&](float& x, float& y, int at) { store_pair(dst + at, x * scale, y * scale); });
}

template <int kTilesM>
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
template <int kTilesM>
__device__ __forceinline__ void state_product(uint32_t tile, int kb, const uint32_t (&S)[kTilesM][4],
                                              const FragAddr& at, float (&acc)[kTilesM][2][4]) {
  uint32_t b[4];
  ldmatrix_x4(b, frag_addr(tile, at.cols_first, kb));
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_bf16(acc[m][n], S[m], b[2 * n], b[2 * n + 1]);
}

// R = beta (V - Kd S^T) of one m-tile, in fp32, times kStateScale like the state.
template <typename P>
__device__ __forceinline__ void residual(const Slot<P>& slot, uint32_t v_at, int lane, float (&acc)[2][4]) {
  const int pair = lane & 3;
  const float2 beta[2] = {*reinterpret_cast<const float2*>(slot.extras.beta + 2 * pair),
                          *reinterpret_cast<const float2*>(slot.extras.beta + 8 + 2 * pair)};
  uint32_t v[4];
  ldmatrix_x4_trans(v, smem_addr(slot.tiles.v()) + v_at);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair_v = v[2 * n + half];
      acc[n][2 * half] = beta[n].x * fmaf(-kStateUnscale, acc[n][2 * half], bf16_lo(pair_v));
      acc[n][2 * half + 1] = beta[n].y * fmaf(-kStateUnscale, acc[n][2 * half + 1], bf16_hi(pair_v));
    }
}

// What the update takes for one block of 16 channels.
struct UpdateOperands {
  float4 gam;
  uint32_t ki[4];
};

template <typename P>
__device__ __forceinline__ UpdateOperands load_update(const Slot<P>& slot, int kb, const FragAddr& at, int lane) {
  UpdateOperands x;
  x.gam = reinterpret_cast<const float4*>(slot.extras.gam + (lane & 3) * kGamGroup)[kb];
  ldmatrix_x4_trans(x.ki, frag_addr(smem_addr(slot.tiles.g()), at.rows_first, kb));
  return x;
}

// S = (S + U^T Ki) gam, over that block.
template <int kTilesM>
__device__ __forceinline__ void update_state(const UpdateOperands& x, int kb, const uint32_t (&u)[kTilesM][4],
                                             float (&S)[kTilesM][kTilesN][4]) {
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&acc)[4] = S[m][2 * kb + n];
      const float dx = n == 0 ? x.gam.x : x.gam.z, dy = n == 0 ? x.gam.y : x.gam.w;
      mma_bf16(acc, u[m], x.ki[2 * n], x.ki[2 * n + 1]);
      acc[0] *= dx;
      acc[1] *= dy;
      acc[2] *= dx;
      acc[3] *= dy;
    }
}

// The output tile, into this warp's own columns of the v tile.
template <typename P>
__device__ __forceinline__ void stage_output(const Slot<P>& slot, const float (&o)[P::kTilesM][2][4],
                                             const ConsumerAddr<P::kTilesM>& at) {
#pragma unroll
  for (int m = 0; m < P::kTilesM; ++m) {
    uint32_t r[4];
    to_operand(r, o[m][0], o[m][1]);
    stmatrix_x4_trans(smem_addr(slot.tiles.v()) + at.v[m], r);
  }
}

// From there, in 16-byte pieces, eight rows apart.
template <typename P>
__device__ __forceinline__ void fetch_output(const Slot<P>& slot, const ConsumerAddr<P::kTilesM>& at,
                                             uint4 (&out)[P::kTilesM]) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < P::kTilesM; ++i)
    out[i] = *reinterpret_cast<const uint4*>(slot.tiles.v() + at.out + i * 8 * kRowBytes);
}

// To memory; `dst` is where this lane's first piece goes.
template <int kTilesM>
__device__ __forceinline__ void store_output(const uint4 (&out)[kTilesM], uint8_t* dst, int64_t row_bytes, int valid,
                                             int lane) {
  const int row = out_row<kTilesM>(lane);
#pragma unroll
  for (int i = 0; i < kTilesM; ++i)
    if (row + 8 * i < valid) *reinterpret_cast<uint4*>(dst + 8 * i * row_bytes) = out[i];
}

// Returns whether the next chunk's operands have arrived (if not, they may have by now).
template <typename P>
__device__ __forceinline__ bool consume_chunk(const Slot<P>& slot, uint32_t next_full, uint32_t next_parity,
                                              float (&S)[P::kTilesM][kTilesN][4], const ConsumerAddr<P::kTilesM>& at,
                                              uint8_t* dst, int64_t row_bytes, int valid, int lane) {
  // The second half of Qd S^T waits in registers (its operand, 16 an m-tile) to run while R and U are formed; holding
  // all of S in bf16 instead would spill.
  constexpr int kTilesM = P::kTilesM;
  constexpr int kHeld = kBlocks / 2;
  constexpr int kAhead = 2;
  const uint32_t kd = smem_addr(slot.tiles.k()), qd = smem_addr(slot.tiles.q());
  uint32_t held[kHeld][kTilesM][4];
  float r[kTilesM][2][4], o[kTilesM][2][4];
  zero(r);
  zero(o);
#pragma unroll
  for (int kb = 0; kb < kBlocks; ++kb) {
    uint32_t (&s16)[kTilesM][4] = held[kb % kHeld];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) to_operand(s16[m], S[m][2 * kb], S[m][2 * kb + 1]);
    state_product(kd, kb, s16, at.frag, r);
    if (P::kOutput && kb < kHeld) state_product(qd, kb, s16, at.frag, o);
  }
  const uint4 fa = slot.extras.frag_a[lane];
  const uint2 fb = slot.extras.frag_b[lane];
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) residual(slot, at.v[m], lane, r[m]);
  uint32_t u[kTilesM][4];
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    to_operand(u[m], r[m][0], r[m][1]);
    mma_bf16(r[m][0], u[m], fa.x, 0u);  // U = R + (X - I) R
    mma_bf16(r[m][1], u[m], fa.y, fa.z);
  }
  if constexpr (P::kOutput) {
#pragma unroll
    for (int kb = kHeld; kb < kBlocks; ++kb) state_product(qd, kb, held[kb % kHeld], at.frag, o);
  }
  UpdateOperands update[kBlocks];
#pragma unroll
  for (int kb = 0; kb < kAhead; ++kb) update[kb] = load_update(slot, kb, at.frag, lane);
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    to_operand(u[m], r[m][0], r[m][1]);
    if constexpr (P::kOutput) {
      mma_bf16(o[m][0], u[m], fa.w, 0u);
      mma_bf16(o[m][1], u[m], fb.x, fb.y);
    }
  }
  // Shared memory answers late, so it is asked early: for a block's operands kAhead blocks before it, for the output's
  // pieces and the next chunk's barrier among the blocks.
  bool ready = false;
  uint4 out[kTilesM];
#pragma unroll
  for (int kb = 0; kb < kBlocks; ++kb) {
    if (kb + kAhead < kBlocks) update[kb + kAhead] = load_update(slot, kb + kAhead, at.frag, lane);
    update_state(update[kb], kb, u, S);
    if (P::kOutput && kb == 1) stage_output(slot, o, at);
    if (kb == 3) ready = mbarrier_test(next_full, next_parity);
    if (P::kOutput && kb == 4) fetch_output(slot, at, out);
  }
  if constexpr (P::kOutput) store_output(out, dst, row_bytes, valid, lane);
  return ready;
}

template <typename P>
__device__ __forceinline__ void load_initial(const Work& w, int offset, float (&S)[P::kTilesM][kTilesN][4]) {
  const float scale = w.hold ? 1.0f : kStateScale;  // what passes through keeps every bit
  if (!P::kOutput && w.transition)
    for_each_pair(S, [&](float& x, float& y, int at) {
      const int row = (offset + at) / kDim, column = (offset + at) % kDim;
      x = row == column ? kStateScale : 0.0f;
      y = row == column + 1 ? kStateScale : 0.0f;
    });
  else if (w.initial.data == nullptr)
    for_each_pair(S, [](float& x, float& y, int) { x = y = 0.0f; });
  else if (w.initial.bf16)
    load_state_as<__nv_bfloat16>(w.initial.data, offset, scale, S);
  else
    load_state_as<float>(w.initial.data, offset, scale, S);
}

// Of a transition, the columns are in the order that the scan reads.
template <int kTilesM>
__device__ __forceinline__ void store_transition(const Work& w, int offset, float (&S)[kTilesM][kTilesN][4]) {
  float* dst = static_cast<float*>(const_cast<void*>(global(w.final.data))) + offset;
  const int row = offset / kDim, column = offset % kDim;
  int place[4];  // of columns 0, 8, 16, 24; rows 8 further on have the same
#pragma unroll
  for (int i = 0; i < 4; ++i) place[i] = transition_column(row, column + 8 * i) - column;
  for_each_pair(S, [&](float& x, float& y, int at) {
    const int j = at % kDim / 8;
    store_pair(dst + at + place[j % 4] - 8 * (j % 4), x * kStateUnscale, y * kStateUnscale);
  });
}

template <typename P>
__device__ __forceinline__ void store_final(const Work& w, int offset, float (&S)[P::kTilesM][kTilesN][4]) {
  if (w.final.data == nullptr) return;
  const float scale = w.hold ? 1.0f : kStateUnscale;
  if (!P::kOutput && w.transition)
    store_transition(w, offset, S);
  else if (w.final.bf16)
    store_state_as<__nv_bfloat16>(w.final.data, offset, scale, S);
  else
    store_state_as<float>(w.final.data, offset, scale, S);
}

// Gives a slot back, to the block that prepared it too, and goes on to the next.
template <typename P>
__device__ __forceinline__ void release(Smem<P>& smem, RingPosition<P::kSlots>& pos, int rank, int lane) {
  mbarrier_arrive(smem_addr(&smem.empty[pos.slot]));
  if constexpr (P::kShare > 1) {
    __syncwarp();  // lane 0 speaks for all
    const int owner = static_cast<unsigned>(pos.slot) % P::kShare;
    if (owner != rank && lane == 0) mbarrier_arrive_remote(smem_addr(&smem.empty[pos.slot]), owner);
  }
  pos.advance(1);
}

template <typename P>
__device__ __forceinline__ void consume(const FwdParams& p, Smem<P>& smem, int rank, int warp, int lane) {
  if constexpr (kMoveRegisters<P>) set_max_registers_up<kConsumerRegisters>();
  grid_dependency_wait();
  const int64_t row_bytes = 2 * p.out_stride.token;
  const int warp_row = warp * P::kTilesM * 16;
  const auto at = make_consumer_addr<P>(warp, lane);
  RingPosition<P::kSlots> pos;
  for (RingPosition<Smem<P>::kWorks> work;; work.advance(1)) {
    mbarrier_wait(smem_addr(&smem.begun[work.slot]), work.parity);
    const Work& w = smem.work[work.slot];
    if (w.head < 0) return;
    const int first_row = w.row + warp_row;
    const int offset = (opaque(first_row) + (lane >> 2)) * kDim + 2 * (lane & 3);  // this lane's first state element
    float S[P::kTilesM][kTilesN][4];
    load_initial<P>(w, offset, S);
    uint8_t* dst =
        global(w.out) + out_row<P::kTilesM>(lane) * row_bytes + first_row * 2 + lane % kPieces<P::kTilesM> * 16;
    if (w.hold) {
      for (int i = chunk_count(w.length); i > 0; --i) {
        mbarrier_wait(smem_addr(&smem.full[pos.slot]), pos.parity);
        release(smem, pos, rank, lane);
      }
    } else {
      bool ready = false;
      // To the compiler what comes from shared memory may differ between lanes; a shuffle's result does not.
      for (int left = __shfl_sync(0xffffffffu, w.length, 0); left > 0; left -= kChunk) {
        if (!ready) mbarrier_wait(smem_addr(&smem.full[pos.slot]), pos.parity);
        auto next = pos;
        next.advance(1);
        ready = consume_chunk(slot_of(smem, pos.slot), smem_addr(&smem.full[next.slot]), next.parity, S, at, dst,
                              row_bytes, left, lane);
        release(smem, pos, rank, lane);
        dst += kChunk * row_bytes;
      }
    }
    store_final<P>(w, offset, S);
  }
}

}  // namespace flash_kda
