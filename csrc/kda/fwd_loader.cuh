// The loader warp: raw q, k, g, v of each chunk into its slot as soon as the slot is free.
#pragma once

#include "fwd_work.cuh"

namespace flash_kda {

struct Source {
  const uint8_t* data;  // first token of the task, this head
  int64_t row_bytes;    // between tokens
};

__device__ __forceinline__ Source source(const void* base, const Strides& s, const Task& t, int head) {
  return {static_cast<const uint8_t*>(base) + 2 * token_offset(s, t, head), 2 * s.token};
}

// kColumns channels of 16 rows into a swizzled tile; rows from `valid` on are zeros.
template <int kColumns>
__device__ __forceinline__ void load_rows(const uint8_t* tile, const Source& src, int first, int valid, int lane) {
  constexpr int kPieces = kColumns / 8, kRowsAtOnce = kWarp / kPieces;
  const int piece = lane % kPieces;
  const uint8_t* from = src.data + first * src.row_bytes + piece * 16;
#pragma unroll 1
  for (int row = lane / kPieces; row < kChunk; row += kRowsAtOnce) {
    const bool ok = row < valid;
    cp_async_16(smem_addr(tile) + v_offset<kColumns>(row, piece), from + (ok ? row : 0) * src.row_bytes, ok);
  }
}

template <typename P>
__device__ __forceinline__ bool loads_v(int rank) {
  return P::kOutput || rank == 0;  // the other block of the state pass takes v as zero
}

// Copies of a chunk's inputs into slots. A slot's barrier opens for a producer, or where a peer prepares the chunk, for
// the consumers.
template <typename P>
struct Loader {
  const FwdParams& p;
  Smem<P>& smem;
  int rank, lane;
  RingPosition<P::kSlots> pos;
  RingPosition<Smem<P>::kWorks> work;

  __device__ __forceinline__ bool own() const {
    return static_cast<unsigned>(pos.slot) % P::kShare == static_cast<unsigned>(rank);
  }
  __device__ __forceinline__ uint32_t bar() const {
    return smem_addr(own() ? &smem.raw[pos.slot] : &smem.full[pos.slot]);
  }
  __device__ __forceinline__ void wait_empty() const {
    mbarrier_wait(smem_addr(&smem.empty[pos.slot]), pos.parity ^ 1);
  }
  // What a peer copies into the slot.
  __device__ __forceinline__ int shared_bytes() const {
    return own() ? 0 : Tiles<P>::kShared + static_cast<int>(sizeof(Extras));
  }

  // Tells the consumers of a work, ahead of its chunks: its initial state takes as long to load as they do. By lane 0.
  __device__ __forceinline__ void begin(const Work& w) {
    wait_empty();  // then the place is free too
    smem.work[work.slot] = w;
    mbarrier_arrive(smem_addr(&smem.begun[work.slot]));
  }

  // A chunk by TMA. By lane 0.
  __device__ __forceinline__ void load_boxes(const Task& t, int head_qk, int first) {
    Tiles<P>& tiles = smem.tiles[pos.slot];
    const uint32_t to = bar();
    const int token = static_cast<int>(t.first_token) + first, batch = static_cast<int>(t.batch);
    wait_empty();
    smem.chunk[pos.slot] = {work.slot, first};
    fence_async_proxy();  // TMA writes after what other warps read and wrote here
    mbarrier_arrive_expect(to, (own() ? Tiles<P>::kShared : shared_bytes()) + (loads_v<P>(rank) ? Tiles<P>::kV : 0));
    if (own()) {
      tensor_copy(smem_addr(tiles.k()), &p.maps.k, {0, token, 0, head_qk, batch}, to);
      tensor_copy(smem_addr(tiles.g()), &p.maps.g, {0, token, 0, t.work.head, batch}, to);
      if constexpr (P::kOutput) tensor_copy(smem_addr(tiles.q()), &p.maps.q, {0, token, 0, head_qk, batch}, to);
    }
    if (loads_v<P>(rank)) {
      const CUtensorMap& map = P::kRows == kDim ? p.maps.v : p.maps.part_v;
      tensor_copy(smem_addr(tiles.v()), &map, {0, token, t.work.row / P::kRows, t.work.head, batch}, to);
    }
    pos.advance(1);
  }

  // A chunk by the warp, row by row: where a box would bring in tokens of the next sequence.
  __device__ __forceinline__ void load_tail(const Task& t, int head_qk, int first) {
    Tiles<P>& tiles = smem.tiles[pos.slot];
    const int valid = t.work.length - first;
    wait_empty();
    if (own()) {
      load_rows<kDim>(tiles.k(), source(p.k, p.k_stride, t, head_qk), first, valid, lane);
      load_rows<kDim>(tiles.g(), source(p.g, p.g_stride, t, t.work.head), first, valid, lane);
      if constexpr (P::kOutput) load_rows<kDim>(tiles.q(), source(p.q, p.q_stride, t, head_qk), first, valid, lane);
    }
    if (loads_v<P>(rank)) {
      Source v = source(p.v, p.v_stride, t, t.work.head);
      v.data += 2 * t.work.row;
      load_rows<P::kRows>(tiles.v(), v, first, valid, lane);
    }
    cp_async_hold(bar());
    __syncwarp();
    if (lane == 0) {
      smem.chunk[pos.slot] = {work.slot, first};
      mbarrier_arrive_expect(bar(), shared_bytes());
    }
    pos.advance(1);
  }

  __device__ __forceinline__ void run(const Task& t) {
    const int head_qk = t.work.head / p.heads_per_group;
    const int chunks = chunk_count(t.work.length);
    const int boxes = !p.maps.usable ? 0 : p.cu_seqlens == nullptr ? chunks : t.work.length / kChunk;
    if (lane == 0) {
      begin(t.work);
#pragma unroll 1
      for (int chunk = 0; chunk < boxes; ++chunk) load_boxes(t, head_qk, chunk * kChunk);
    }
    __syncwarp();
    pos.slot = __shfl_sync(0xffffffffu, pos.slot, 0);
    pos.parity = __shfl_sync(0xffffffffu, pos.parity, 0);
#pragma unroll 1
    for (int chunk = boxes; chunk < chunks; ++chunk) load_tail(t, head_qk, chunk * kChunk);
    work.advance(1);
  }

  // One stop for each producer, and one for the consumers. By lane 0.
  __device__ __forceinline__ void stop() {
    Work none{};
    none.head = -1;
    begin(none);
    for (int i = 0; i < P::kStride; ++i) {
      wait_empty();
      if (own()) {
        smem.chunk[pos.slot] = {-1, 0};
        mbarrier_arrive(bar());
      }
      pos.advance(1);
    }
  }
};

template <typename P>
__device__ __forceinline__ void load(const FwdParams& p, Smem<P>& smem, int rank, int lane) {
  if constexpr (kMoveRegisters<P>) set_max_registers_down<kProducerRegisters>();
  if (p.order != nullptr) grid_dependency_wait();
  Loader<P> loader{p, smem, rank, lane, {}, {}};
  TaskQueue<P> queue;
  while (queue.task < p.plan.tasks * P::kParts) {
    queue.draw(p, lane);
    const Task t = make_task<P>(p, queue.task, rank);
    if (t.exists) loader.run(t);
    queue.advance(p);
  }
  if (lane == 0) loader.stop();
  __syncwarp();
}

}  // namespace flash_kda
