// How jagged attention is cut into tasks: a function of lengths and mask alone, so that results do not depend on
// threads.
//
// Forward: a task is a range of rows of a sequence. Backward: a task is a range of keys, so that it owns their
// gradients; the gradients of rows that several ranges see are added up afterwards in the order of the plan. A batch
// of many sequences gives enough tasks with one range each; a long sequence among short ones is cut into up to
// kMaxRanges.
//
// Work is 2 * (pairs of a row and a key that it sees) - (rows or keys of the task): in causal attention a difference of
// squares. So a causal mask given as ranges leads to the same plan, and to the same bits, as no mask.
#pragma once

#include "attention_mask.h"

namespace turbogr {
namespace TURBOGR_ISA {

struct AttentionTask {
  int64_t start, length;  // the sequence, in tokens
  int64_t begin, end;     // rows or keys of the task, within the sequence
  int64_t head, heads;
  int64_t range, ranges;  // number of the range within its sequence, and how many there are
  int64_t first_block;    // forward only: blocks of kBlock tokens that the sequences before it have
  double work;
  const RowBlock* blocks;  // of the sequence; null in causal attention
  // Backward only: the rows that may see the task's keys, in whole blocks. Range 0 has all rows.
  int64_t rows_begin, rows_end;
  int64_t distances;  // index of the task's sum at distance 0; they run from -ahead to rows_end - begin - 1
  int64_t ahead;
  int64_t partial;  // where the task's rows begin among the partial sums; unused for range 0
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

// Pairs of keys [begin, end) and rows that see them.
inline double pairs_of_keys(const KeyRanges& ranges, int64_t start, int64_t length, int64_t begin, int64_t end) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < length; ++i) {
    const KeyRange keys = ranges.of(start, i);
    pairs += max_of(0, min_of(keys.end, end) - max_of(keys.begin, begin));
    pairs += begin <= i && i < end && (i < keys.begin || i >= keys.end) ? 1 : 0;
  }
  return static_cast<double>(pairs);
}

class AttentionPlan {
 public:
  // By rows: `rows_per_task` is a multiple of kBlock.
  AttentionPlan(const Mask& mask, const int64_t* offsets, int64_t num_sequences, int64_t num_tokens, int64_t heads,
                int64_t group, int64_t rows_per_task)
      : tasks_((num_tokens / rows_per_task + num_sequences) * ceil_div(heads, group)) {
    if (!tasks_) return;
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t length = offsets[s + 1] - offsets[s];
      const int64_t first_block = blocks;
      blocks += ceil_div(length, kBlock);
      longer_than_a_task |= length > rows_per_task;
      for (int64_t begin = 0; begin < length; begin += rows_per_task) {
        AttentionTask task{};
        task.first_block = first_block;
        task.start = offsets[s];
        task.length = length;
        task.begin = begin;
        task.end = min_of(length, begin + rows_per_task);
        task.ranges = 1;
        task.blocks = mask.blocks(s);
        task.work = work_of_rows(task);
        add(task, heads, group, 0);
      }
    }
    std::qsort(tasks_.data(), static_cast<size_t>(count_), sizeof(AttentionTask), larger_work_first);
  }

  // By keys. `distances` and `partial_rows` are how much room the sums need.
  AttentionPlan(const Mask& mask, const int64_t* offsets, int64_t num_sequences, int64_t heads, int64_t group)
      : tasks_((num_sequences + 2 * kTasksWanted) * ceil_div(heads, group)) {
    if (!tasks_) return;
    double total = 1.0;
    for (int64_t s = 0; s < num_sequences; ++s) total += work_of_sequence(mask, offsets, s);
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t length = offsets[s + 1] - offsets[s];
      const double work = work_of_sequence(mask, offsets, s);
      const int64_t per_range = round_up(ceil_div(length, ranges_of(length, work / total)), kBlock);
      AttentionTask task{};
      task.start = offsets[s];
      task.length = length;
      task.ranges = ceil_div(length, max_of(1, per_range));
      task.blocks = mask.blocks(s);
      for (int64_t begin = 0; begin < length; begin += per_range, ++task.range) {
        task.begin = begin;
        task.end = min_of(length, begin + per_range);
        task.work = task.ranges == 1 ? work : work_of_keys(mask, task);
        find_rows(task);
        task.partial = partial_rows;
        if (task.range > 0) partial_rows += task.rows_end - task.rows_begin;
        add(task, heads, group, task.ahead + task.rows_end - task.begin);
      }
    }
    std::qsort(tasks_.data(), static_cast<size_t>(count_), sizeof(AttentionTask), larger_work_first);
  }

  explicit operator bool() const { return static_cast<bool>(tasks_); }
  int64_t size() const { return count_; }
  const AttentionTask& operator[](int64_t i) const { return tasks_[i]; }

  // By rows only: blocks of tokens of all sequences, and whether a sequence has several tasks.
  int64_t blocks = 0;
  bool longer_than_a_task = false;
  int64_t distances = 0;
  int64_t partial_rows = 0;

 private:
  // Once per group of heads, each with its own sums by distance.
  void add(AttentionTask task, int64_t heads, int64_t group, int64_t num_distances) {
    for (task.head = 0; task.head < heads; task.head += group) {
      task.heads = min_of(group, heads - task.head);
      task.distances = distances + task.ahead;
      distances += num_distances;
      tasks_[count_++] = task;
    }
  }

  static double square(int64_t x) { return double(x) * double(x); }

  static double work_of_rows(const AttentionTask& task) {
    if (task.blocks == nullptr) return double(task.end - task.begin) * double(task.end + task.begin);
    double pairs = 0.0;
    for (int64_t row = task.begin; row < task.end; row += kBlock) pairs += double(task.blocks[row / kBlock].pairs);
    return 2.0 * pairs - double(task.end - task.begin);
  }

  static double work_of_sequence(const Mask& mask, const int64_t* offsets, int64_t s) {
    const int64_t length = offsets[s + 1] - offsets[s];
    if (mask.causal()) return square(length);
    AttentionTask task{};
    task.end = length;
    task.blocks = mask.blocks(s);
    return work_of_rows(task);
  }

  static double work_of_keys(const Mask& mask, const AttentionTask& task) {
    if (mask.causal()) return square(task.length - task.begin) - square(task.length - task.end);
    const double pairs = pairs_of_keys(mask.ranges(), task.start, task.length, task.begin, task.end);
    return 2.0 * pairs - double(task.end - task.begin);
  }

  static void find_rows(AttentionTask& task) {
    task.rows_begin = task.range == 0 ? 0 : task.begin;
    task.rows_end = task.length;
    if (task.blocks == nullptr) return;
    if (task.range > 0) {
      const KeyRange keys{task.begin, task.end};
      const auto sees = [&](int64_t row) { return task.blocks[row / kBlock].may_see(keys); };
      // Rows see themselves, so the task's own rows are always among them.
      task.rows_begin = 0;
      while (task.rows_begin < task.begin && !sees(task.rows_begin)) task.rows_begin += kBlock;
      int64_t blocks = ceil_div(task.length, kBlock);
      while (blocks > ceil_div(task.end, kBlock) && !sees((blocks - 1) * kBlock)) --blocks;
      task.rows_end = min_of(task.length, blocks * kBlock);
    }
    task.ahead = task.end - 1 - task.rows_begin;
  }

  Buffer<AttentionTask> tasks_;
  int64_t count_ = 0;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
