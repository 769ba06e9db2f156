// How a call is laid out. Plain C++, so that a test needs no compiler of CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_kda {

constexpr int kChunk = 16;             // tokens of a step
constexpr int kMinSegmentChunks = 16;  // a segment's states take 128 KiB a value head
constexpr int kScanParts = 8;          // blocks of the scan for a (sequence, value head)

struct FwdPlan {
  int split;           // blocks that share the state rows of a task: 1, 2 or 4
  int segment_chunks;  // > 0: sequences are cut into segments of so many chunks
  int64_t max_segments;
  unsigned tasks;  // (sequence or segment, value head) pairs
  bool ordered;    // blocks take the longest sequences first
};

// What a plan depends on: the host does not look at cu_seqlens.
struct FwdSize {
  int64_t num_sequences, total_tokens;
  int heads_v;
  bool packed;         // with cu_seqlens
  int segment_chunks;  // as the caller wants it: 0 for no segments, negative for what is fastest
  int sms;             // multiprocessors of the GPU
};

// Microseconds on an H200: of a chunk, by kernel; of a step of the scan; of a call without segments and one with them,
// besides those. Only their ratios matter. benchmarks/bench_plan.py measures them again.
struct FwdCosts {
  double whole = 0.93, half = 0.61, quarter = 0.44, state = 0.6, scan_step = 1.6, uncut = 13, cut = 25;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A split pays while its parts run at once.
inline int best_split(int64_t tasks, int sms) { return 4 * tasks <= sms ? 4 : 2 * tasks <= sms ? 2 : 1; }

inline double chunk_cost(const FwdCosts& c, int split) {
  return split == 4 ? c.quarter : split == 2 ? c.half : c.whole;
}

// Sequences as they are.
inline FwdPlan plan_sequences(const FwdSize& s) {
  FwdPlan plan{};
  const int64_t tasks = s.num_sequences * s.heads_v;
  plan.tasks = static_cast<unsigned>(tasks);
  plan.split = best_split(tasks, s.sms);
  plan.ordered = s.packed && tasks > s.sms;
  return plan;
}

// Sequences in segments of `length` chunks.
inline FwdPlan plan_segments(const FwdSize& s, int64_t length) {
  const int64_t chunks = ceil_div(s.total_tokens / s.num_sequences, kChunk);
  const int64_t each = std::max<int64_t>(1, ceil_div(chunks, length));
  FwdPlan plan{};
  plan.segment_chunks = static_cast<int>(length);
  // However packed tokens are divided into sequences, there are no more.
  plan.max_segments = s.packed ? s.num_sequences + s.total_tokens / (length * kChunk) : s.num_sequences * each;
  plan.tasks = static_cast<unsigned>(plan.max_segments * s.heads_v);
  plan.split = best_split(s.num_sequences * each * s.heads_v, s.sms);
  return plan;
}

// Time of `tasks` that run `at_once`, one task taking `each`.
inline double waves(int64_t tasks, int64_t at_once, double each) {
  return static_cast<double>(ceil_div(tasks, at_once)) * each;
}

inline FwdPlan plan_fwd(const FwdSize& s) {
  if (s.num_sequences * s.heads_v == 0) return {};
  if (s.segment_chunks > 0) return plan_segments(s, s.segment_chunks);
  FwdPlan best = plan_sequences(s);
  if (s.segment_chunks == 0 || best.split == 1) return best;
  const FwdCosts c;
  const int64_t heads = s.num_sequences * s.heads_v;
  const int64_t chunks = ceil_div(s.total_tokens / s.num_sequences, kChunk);
  // Packed sequences differ in length: where they are not cut, the longest is taken to be twice the mean.
  const double longest = static_cast<double>(chunks) * (s.packed && s.num_sequences > 1 ? 2 : 1);
  double least = longest * chunk_cost(c, best.split) + c.uncut;
  // From three on: of two segments the second could start only when the first has ended. Shorter
  // segments than the smallest would be mostly fixed costs; 64 segments keep the scan short.
  for (int64_t n = 3; n <= 64 && chunks / n >= kMinSegmentChunks; ++n) {
    const int64_t length = ceil_div(chunks, n);
    const FwdPlan plan = plan_segments(s, length);
    const double chunks_each = static_cast<double>(length);
    // The blocks of a cluster share the two state passes of a segment; the last segment has none.
    const double states = waves(heads * (n - 1), s.sms / 2, chunks_each * c.state);
    const double outputs = waves(heads * n, s.sms / plan.split, chunks_each * chunk_cost(c, plan.split));
    const double scan = waves(heads * kScanParts, s.sms, static_cast<double>(n) * c.scan_step);
    const double time = states + scan + outputs + c.cut;
    if (time < least) {
      least = time;
      best = plan;
    }
  }
  return best;
}

}  // namespace flash_kda
