// How jagged attention is cut into tasks: a function of the lengths alone, so that results do not depend on threads.
//
// Forward: a task is a range of rows of a sequence. Backward: a task is a range of keys, so that it owns their
// gradients; the gradients of rows that several ranges see are added up afterwards in the order of the ranges. A batch
// of many sequences gives enough tasks with one range each; a long sequence among short ones is cut into up to
// kMaxRanges.
#pragma once

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {

struct AttentionTask {
  int64_t start, length;  // the sequence, in tokens
  int64_t begin, end;     // rows or keys of the task, within the sequence
  int64_t head, heads;
  int64_t range, ranges;  // number of the range within its sequence, and how many there are
  int64_t distances;      // where the task's sums by distance begin, for the backward
  int64_t partial;        // where the task's rows begin among the partial sums; unused for range 0
  double work;
};

inline int larger_work_first(const void* a, const void* b) {
  const double x = static_cast<const AttentionTask*>(a)->work, y = static_cast<const AttentionTask*>(b)->work;
  return x < y ? 1 : x > y ? -1 : 0;
}

// Floats of queries and outputs that a task keeps at hand, 256 KB: what fits into half of a usual L2 cache. From it
// follow, by the size of the heads, how many heads and how many blocks of rows a task takes together.
#ifndef TURBOGR_TASK_FLOATS
#define TURBOGR_TASK_FLOATS 65536
#endif
constexpr int64_t kTaskFloats = TURBOGR_TASK_FLOATS;

// Heads that share a tile of bias.
inline int64_t heads_together(int64_t heads, int64_t width) {
  const int64_t fit = max_of(1, kTaskFloats / (kBlock * width));
  return ceil_div(heads, ceil_div(heads, min_of(heads, fit)));
}

constexpr int64_t kMaxRanges = 16;
constexpr int64_t kTasksWanted = 64;

// Number of key ranges of a sequence with this share of the batch's work.
inline int64_t ranges_of(int64_t length, double share) {
  const int64_t wanted = static_cast<int64_t>(share * kTasksWanted) + 1;
  return max_of(1, min_of(min_of(wanted, kMaxRanges), length / (4 * kBlock)));
}

class AttentionPlan {
 public:
  // By rows: `rows_per_task` is a multiple of kBlock.
  AttentionPlan(const int64_t* offsets, int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t group,
                int64_t rows_per_task)
      : tasks_((num_tokens / rows_per_task + num_sequences) * ceil_div(heads, group)) {
    if (!tasks_) return;
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t length = offsets[s + 1] - offsets[s];
      for (int64_t begin = 0; begin < length; begin += rows_per_task) {
        const int64_t end = min_of(length, begin + rows_per_task);
        const double work = double(end - begin) * double(end + begin);
        for (int64_t head = 0; head < heads; head += group) {
          tasks_[count_++] = {offsets[s], length, begin, end, head, min_of(group, heads - head), 0, 1, 0, 0, work};
        }
      }
    }
    std::qsort(tasks_.data(), static_cast<size_t>(count_), sizeof(AttentionTask), larger_work_first);
  }

  // By keys. `distances` and `partial_rows` tell how much room the sums need.
  AttentionPlan(const int64_t* offsets, int64_t num_sequences, int64_t heads, int64_t group)
      : tasks_((num_sequences + 2 * kTasksWanted) * ceil_div(heads, group)) {
    if (!tasks_) return;
    double total = 1.0;
    for (int64_t s = 0; s < num_sequences; ++s) total += square(offsets[s + 1] - offsets[s]);
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t length = offsets[s + 1] - offsets[s];
      const int64_t per_range = round_up(ceil_div(length, ranges_of(length, square(length) / total)), kBlock);
      const int64_t ranges = ceil_div(length, max_of(1, per_range));
      for (int64_t begin = 0, range = 0; begin < length; begin += per_range, ++range) {
        const int64_t end = min_of(length, begin + per_range);
        const double work = square(length - begin) - square(length - end);
        for (int64_t head = 0; head < heads; head += group) {
          tasks_[count_++] = {offsets[s], length, begin,     end,          head, min_of(group, heads - head),
                              range,      ranges, distances, partial_rows, work};
          distances += length - begin;
        }
        if (range > 0) partial_rows += length - begin;
      }
    }
    std::qsort(tasks_.data(), static_cast<size_t>(count_), sizeof(AttentionTask), larger_work_first);
  }

  explicit operator bool() const { return static_cast<bool>(tasks_); }
  int64_t size() const { return count_; }
  const AttentionTask& operator[](int64_t i) const { return tasks_[i]; }

  int64_t distances = 0;
  int64_t partial_rows = 0;

 private:
  static double square(int64_t x) { return double(x) * double(x); }

  Buffer<AttentionTask> tasks_;
  int64_t count_ = 0;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
