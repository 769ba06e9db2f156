// The loader warp: raw q, k, g, v of each chunk into its slot as soon as the slot is free.
#pragma once

#include "fwd_layout.cuh"

namespace flash_kda {

struct Source {
  const uint8_t* data;  // first token of the sequence, this head
  int64_t row_bytes;    // between tokens
};

__device__ __forceinline__ Source source(const void* base, const Strides& s, const Work& w, int head) {
  return {head_base(base, s, w, head), 2 * s.token};
}

// kPieces 16-byte pieces of 16 rows into a swizzled tile; rows from `valid` on are zeros.
template <int kPieces>
__device__ __forceinline__ void load_tile(uint32_t dst, const Source& src, int chunk, int valid, int lane) {
  constexpr int kRowsAtOnce = kWarp / kPieces;
  const int piece = lane % kPieces;
  const uint8_t* first = src.data + static_cast<int64_t>(chunk) * kChunk * src.row_bytes + piece * 16;
#pragma unroll
  for (int i = 0; i < kChunk / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + lane / kPieces;
    const bool ok = row < valid;
    cp_async_16(dst + tile_offset(row, piece), first + (ok ? row : 0) * src.row_bytes, ok);
  }
}

template <typename P>
__device__ __forceinline__ void load(const FwdParams& p, const Work& w, Smem<P>& smem, int lane) {
  if constexpr (kMoveRegisters<P>) set_max_registers_down<kProducerRegisters>();
  const int head_qk = w.head / p.heads_per_group;
  const Source q = source(p.q, p.q_stride, w, head_qk), k = source(p.k, p.k_stride, w, head_qk);
  const Source g = source(p.g, p.g_stride, w, w.head);
  Source v = source(p.v, p.v_stride, w, w.head);
  v.data += w.rank * P::kRows * 2;
  RingPosition<P> pos;
  int chunk = 0;
  for (int left = w.length; left > 0; left -= kChunk, ++chunk) {
    mbarrier_wait(smem_addr(&smem.empty[pos.slot]), pos.parity ^ 1);
    const Slot<P> slot = slot_of(smem, pos.slot);
    load_tile<16 / P::kSplit>(smem_addr(slot.tiles.v), v, chunk, w.transition ? 0 : left, lane);
    if (P::kSplit > 1 && pos.slot % P::kSplit != w.rank) {
      // A peer prepares this chunk; its copies complete `full` together with v.
      if (lane == 0) mbarrier_expect_bytes(smem_addr(&smem.full[pos.slot]), kSharedTileBytes + sizeof(Extras));
      __syncwarp();
      cp_async_arrive(smem_addr(&smem.full[pos.slot]));
    } else {
      if (P::kOutput) load_tile<16>(smem_addr(slot.tiles.q), q, chunk, left, lane);
      load_tile<16>(smem_addr(slot.tiles.k), k, chunk, left, lane);
      load_tile<16>(smem_addr(slot.tiles.g), g, chunk, left, lane);
      cp_async_arrive(smem_addr(&smem.raw[pos.slot]));
    }
    pos.advance(1);
  }
}

}  // namespace flash_kda
