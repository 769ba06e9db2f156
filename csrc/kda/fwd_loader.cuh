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

// kHalves times 64 channels of 16 rows into a swizzled tile; rows from `valid` on are zeros.
template <int kHalves>
__device__ __forceinline__ void load_rows(const uint8_t* tile, const Source& src, int first, int valid, int lane) {
  constexpr int kPieces = 8 * kHalves, kRowsAtOnce = kWarp / kPieces;
  const int piece = lane % kPieces;
  const uint8_t* from = src.data + first * src.row_bytes + piece * 16;
#pragma unroll 1
  for (int row = lane / kPieces; row < kChunk; row += kRowsAtOnce) {
    const bool ok = row < valid;
    cp_async_16(smem_addr(tile) + tile_offset(row, piece), from + (ok ? row : 0) * src.row_bytes, ok);
  }
}

template <int kHalves>
__device__ __forceinline__ void load_box(const uint8_t* tile, const CUtensorMap& map, int channel, int head,
                                         const Task& t, int first, uint32_t bar) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
    tensor_copy(smem_addr(tile) + half * kHalfBytes, &map, channel + half * kHalfChannels, head,
                static_cast<int>(t.first_token) + first, static_cast<int>(t.batch), bar);
}

template <typename P>
constexpr int kHalvesV = P::kRows > kHalfChannels ? 2 : 1;
template <typename P>
__device__ __forceinline__ bool loads_v(int rank) {
  return P::kOutput || rank == 0;  // the other block of the state pass takes v as zero
}

// A chunk by the copy engine; by one lane. `own`: this block prepares the chunk.
template <typename P>
__device__ __forceinline__ void load_boxes(const FwdParams& p, Tiles<P>& tiles, const Task& t, int first, bool own,
                                           int rank, uint32_t bar) {
  const int head = t.work.head, head_qk = head / p.heads_per_group;
  mbarrier_expect_bytes(bar, (own ? Tiles<P>::kShared : 0) + (loads_v<P>(rank) ? kHalvesV<P> * kHalfBytes : 0));
  fence_async_proxy();  // the engine writes after what other warps read and wrote here
  if (own) {
    load_box<2>(tiles.k(), p.maps.k, 0, head_qk, t, first, bar);
    load_box<2>(tiles.g(), p.maps.g, 0, head, t, first, bar);
    if constexpr (P::kOutput) load_box<2>(tiles.q(), p.maps.q, 0, head_qk, t, first, bar);
  }
  if (loads_v<P>(rank)) load_box<kHalvesV<P>>(tiles.v(), p.maps.v, v_channel<P>(rank), head, t, first, bar);
}

// A chunk by the warp, row by row: where a box would bring in tokens of the next sequence.
template <typename P>
__device__ __forceinline__ void load_tail(const FwdParams& p, Tiles<P>& tiles, const Task& t, int first, bool own,
                                          int rank, int lane) {
  const int head = t.work.head, head_qk = head / p.heads_per_group, valid = t.work.length - first;
  if (own) {
    load_rows<2>(tiles.k(), source(p.k, p.k_stride, t, head_qk), first, valid, lane);
    load_rows<2>(tiles.g(), source(p.g, p.g_stride, t, head), first, valid, lane);
    if constexpr (P::kOutput) load_rows<2>(tiles.q(), source(p.q, p.q_stride, t, head_qk), first, valid, lane);
  }
  if (!loads_v<P>(rank)) return;
  Source v = source(p.v, p.v_stride, t, head);
  v.data += 2 * v_channel<P>(rank);
  load_rows<kHalvesV<P>>(tiles.v(), v, first, valid, lane);
}

template <typename P>
__device__ __forceinline__ void load_chunk(const FwdParams& p, Smem<P>& smem, int slot, const Task& t, int first,
                                           bool own, int rank, int lane, uint32_t bar) {
  // A peer prepares the other chunks; its copies complete `full` together with v.
  if (!own && lane == 0) mbarrier_expect_bytes(bar, Tiles<P>::kShared + sizeof(Extras));
  const bool boxes = p.maps.usable && (p.cu_seqlens == nullptr || t.work.length - first >= kChunk);
  if (!boxes)
    load_tail(p, smem.tiles[slot], t, first, own, rank, lane);
  else if (lane == 0)
    load_boxes(p, smem.tiles[slot], t, first, own, rank, bar);
  __syncwarp();
}

// Passes a slot on, to a producer, or where a peer prepares the chunk, to the consumers, once its loads are complete.
// The second arrival of lane 0 is for what it wrote.
template <typename P>
__device__ __forceinline__ void publish(Smem<P>& smem, int slot, ChunkRef chunk, uint32_t bar, int lane) {
  cp_async_arrive(bar);
  if (lane == 0) {
    smem.chunk[slot] = chunk;
    mbarrier_arrive(bar);
  }
  __syncwarp();
}

template <typename P>
struct Loader {
  const FwdParams& p;
  Smem<P>& smem;
  int rank, lane;
  RingPosition<P::kSlots> pos;
  RingPosition<Smem<P>::kWorks> work;

  __device__ __forceinline__ bool own() const { return pos.slot % P::kShare == rank; }
  __device__ __forceinline__ uint32_t bar() const {
    return smem_addr(own() ? &smem.raw[pos.slot] : &smem.full[pos.slot]);
  }
  __device__ __forceinline__ void wait_empty() const {
    mbarrier_wait(smem_addr(&smem.empty[pos.slot]), pos.parity ^ 1);
  }

  // Tells the consumers of a work, ahead of its chunks: its initial state takes as long to load as they do.
  __device__ __forceinline__ void begin(const Work& w) {
    if (lane == 0) {
      smem.work[work.slot] = w;
      mbarrier_arrive(smem_addr(&smem.begun[work.slot]));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run(const Task& t) {
    const int chunks = chunk_count(t.work.length);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      wait_empty();
      if (chunk == 0) begin(t.work);
      load_chunk(p, smem, pos.slot, t, chunk * kChunk, own(), rank, lane, bar());
      publish(smem, pos.slot, {work.slot, chunk * kChunk}, bar(), lane);
      pos.advance(1);
    }
    work.advance(1);
  }

  // One stop for each producer, and one for the consumers.
  __device__ __forceinline__ void stop() {
    for (int i = 0; i < P::kStride; ++i) {
      wait_empty();
      if (i == 0) {
        Work none{};
        none.head = -1;
        begin(none);
      }
      if (own()) publish(smem, pos.slot, {-1, 0}, bar(), lane);
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
  while (queue.task < p.plan.tasks) {
    queue.draw(p, lane);
    const Task t = make_task<P>(p, queue.task, rank);
    if (t.exists) loader.run(t);
    queue.advance(p);
  }
  loader.stop();
}

}  // namespace flash_kda
