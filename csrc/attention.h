// The loops that all kinds of jagged attention share: packing of operands, the order of tiles, writing of results.
//
// A kind defines what is done with one tile of scores. It has
//   ForwardScratch, BackwardScratch   its own scratch, with layout(arena, shape, blocks) and layout(arena, shape, sums)
//   begin(slots, scratch)             once per forward task: `slots` pairs of a block of rows and a head
//   prepare(span, scratch)            once per tile, before its heads
//   attend(span, shape, head, scratch)           forward of one head of one tile
//   finish(span, shape, head, scratch)           when all keys of a block of rows are done
//   query_scale()                                factor of q
//   grad_scale(channel)                          factor of the output's gradient, per channel
//   begin_rows(span, shape, scratch, first_head, heads)   backward, once per block of rows
//   attend_backward(span, shape, head, scratch)  backward of one head of one tile
//   finish_tile(span, scratch)                   once per tile, after its heads
//   begin_task(task, number, scratch)            once per backward task
//   num_sums()                                   how many numbers a task sums up besides those by distance
//
// Legend: scores are tiles [key][row]; q, k, v, out and gradients are [token][head][...] with a stride per token. The
// output of a head has `channels` parts of e side by side.
#pragma once

#include "attention_plan.h"

namespace turbogr {
namespace TURBOGR_ISA {

struct Shape {
  int64_t heads, d, e, channels;
  int64_t d_padded, e_padded;  // in whole vectors
  int64_t group;               // heads that are taken together, to share what does not depend on the head

  Shape(int64_t num_heads, int64_t qk, int64_t v, int64_t num_channels = 1)
      : heads(num_heads),
        d(qk),
        e(v),
        channels(num_channels),
        d_padded(round_up(qk, kLanes)),
        e_padded(round_up(v, kLanes)),
        group(heads_together(num_heads, qk + v * num_channels)) {}

  int64_t rows_per_task() const { return max_of(1, kTaskFloats / (kBlock * group * (d + channels * e))) * kBlock; }
  int64_t out_stride() const { return heads * channels * e; }
};

// Pointers to the first token; q and k are null where a kind has no scores of content (and d is 0).
struct AttentionInputs {
  const float *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
};

struct ForwardHead {
  const float *queries_turned, *keys, *values;
  float* outputs;      // [kBlock][channels * e_padded]
  int64_t head, slot;  // number of the head; index of (block, head) among those of the task
};

struct BackwardHead {
  const float *queries, *queries_turned, *keys, *values;
  const float *grads, *grads_turned;  // [kBlock][channels * e_padded] and [channels * e][kBlock], scaled
  float *grad_queries, *grad_keys, *grad_values;
  int64_t slot;  // of the head within the task
};

inline void write_rows(const float* from, int64_t ld, int64_t rows, int64_t columns, float* to, int64_t stride,
                       float scale = 1.0f) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(columns,
                [&](int64_t c, int count) { store_some(to + r * stride + c, load(from + r * ld + c) * scale, count); });
  }
}

inline void clear(float* x, int64_t n) { std::memset(x, 0, static_cast<size_t>(n) * sizeof(float)); }

template <class Kind>
struct ForwardScratchOf {
  typename Kind::ForwardScratch kind;
  float *queries, *outputs, *keys, *values;
  RowEnds ends;

  void layout(Arena& arena, const Shape& shape) {
    const int64_t blocks = shape.rows_per_task() / kBlock;
    kind.layout(arena, shape, blocks);
    queries = arena.take<float>(blocks * shape.group * shape.d * kBlock);
    outputs = arena.take<float>(blocks * shape.group * kBlock * shape.channels * shape.e_padded);
    keys = arena.take<float>(shape.group * kBlock * shape.d_padded);
    values = arena.take<float>(shape.group * kBlock * shape.e_padded);
    ends.layout(arena);
  }
};

// Packs the tile's keys and values of the task's heads.
template <class Kind>
void pack_keys(const AttentionTask& task, const Shape& shape, const AttentionInputs& in, const Span& s,
               ForwardScratchOf<Kind>& scratch) {
  const int64_t dp = shape.d_padded, ep = shape.e_padded, keys_padded = round_up(s.keys, kTileRows);
  for (int64_t h = 0; h < task.heads; ++h) {
    const int64_t head = task.head + h;
    if (in.k != nullptr) {
      pack_rows(in.k + s.key * in.k_stride + head * shape.d, in.k_stride, s.keys, shape.d, 1.0f,
                scratch.keys + h * kBlock * dp, keys_padded, dp);
    }
    pack_rows(in.v + s.key * in.v_stride + head * shape.e, in.v_stride, s.keys, shape.e, 1.0f,
              scratch.values + h * kBlock * ep, keys_padded, ep);
  }
}

template <class Kind>
void forward_task(const AttentionTask& task, const Shape& shape, const AttentionInputs& in, const Mask& mask,
                  const Kind& kind, float* out) {
  ForwardScratchOf<Kind> scratch = take_scratch<ForwardScratchOf<Kind>>(shape);
  const int64_t blocks = ceil_div(task.end - task.begin, kBlock);
  const int64_t dp = shape.d_padded, ep = shape.e_padded, width = shape.channels * ep;
  for (int64_t b = 0; in.q != nullptr && b < blocks; ++b) {
    const int64_t row = task.begin + b * kBlock, rows = min_of(kBlock, task.end - row);
    for (int64_t h = 0; h < task.heads; ++h) {
      pack_transposed(in.q + (task.start + row) * in.q_stride + (task.head + h) * shape.d, in.q_stride, rows, shape.d,
                      kind.query_scale(), scratch.queries + (b * task.heads + h) * shape.d * kBlock);
    }
  }
  clear(scratch.outputs, blocks * task.heads * kBlock * width);
  kind.begin(blocks * task.heads, scratch.kind);
  const auto head_of = [&](int64_t b, int64_t h) {
    const int64_t slot = b * task.heads + h;
    return ForwardHead{scratch.queries + slot * shape.d * kBlock,
                       scratch.keys + h * kBlock * dp,
                       scratch.values + h * kBlock * ep,
                       scratch.outputs + slot * kBlock * width,
                       task.head + h,
                       slot};
  };
  for (int64_t key = 0; key < (mask.causal() ? task.end : task.length); key += kBlock) {
    bool packed = false;
    for (int64_t b = 0; b < blocks; ++b) {
      Span span(task.start, task.length, task.begin + b * kBlock, key);
      if (!mask.look(task.blocks, task.start, span, scratch.ends)) continue;
      if (!packed) pack_keys(task, shape, in, span, scratch);
      packed = true;
      kind.prepare(span, scratch.kind);
      for (int64_t h = 0; h < task.heads; ++h) kind.attend(span, shape, head_of(b, h), scratch.kind);
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const Span span(task.start, task.length, task.begin + b * kBlock, 0);
    for (int64_t h = 0; h < task.heads; ++h) {
      const ForwardHead head = head_of(b, h);
      kind.finish(span, shape, head, scratch.kind);
      for (int64_t c = 0; c < shape.channels; ++c) {
        float* to = out + span.row * shape.out_stride() + (head.head * shape.channels + c) * shape.e;
        write_rows(head.outputs + c * ep, width, span.rows, shape.e, to, shape.out_stride());
      }
    }
  }
}

struct AttentionGradients {
  const float* out;  // [T, heads, channels * e]
  float *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  float* partial_q;  // rows of ranges after the first, [partial_rows, heads, d]
};

template <class Kind>
struct BackwardScratchOf {
  typename Kind::BackwardScratch kind;
  float *keys, *values, *grad_keys, *grad_values;                         // of the task's range of keys, per head
  float *queries, *queries_turned, *grads, *grads_turned, *grad_queries;  // of one block of rows, per head
  RowEnds ends;

  void layout(Arena& arena, const Shape& shape, int64_t range, int64_t num_sums) {
    kind.layout(arena, shape, num_sums);
    keys = arena.take<float>(shape.group * range * shape.d_padded);
    values = arena.take<float>(shape.group * range * shape.e_padded);
    grad_keys = arena.take<float>(shape.group * range * shape.d_padded);
    grad_values = arena.take<float>(shape.group * range * shape.e_padded);
    queries = arena.take<float>(shape.group * kBlock * shape.d_padded);
    queries_turned = arena.take<float>(shape.group * kBlock * shape.d);
    grads = arena.take<float>(shape.group * kBlock * shape.channels * shape.e_padded);
    grads_turned = arena.take<float>(shape.group * kBlock * shape.channels * shape.e);
    grad_queries = arena.take<float>(shape.group * kBlock * shape.d_padded);
    ends.layout(arena);
  }
};

// Packs a block of rows: queries and the gradients of the output.
template <class Kind>
void pack_block(const AttentionTask& task, const Shape& shape, const AttentionInputs& in,
                const AttentionGradients& grads, const Kind& kind, const Span& block,
                BackwardScratchOf<Kind>& scratch) {
  const int64_t dp = shape.d_padded, ep = shape.e_padded, width = shape.channels * ep;
  for (int64_t h = 0; h < task.heads; ++h) {
    if (in.q != nullptr) {
      const float* q = in.q + block.row * in.q_stride + (task.head + h) * shape.d;
      const float scale = kind.query_scale();
      pack_rows(q, in.q_stride, block.rows, shape.d, scale, scratch.queries + h * kBlock * dp, block.rows, dp);
      pack_transposed(q, in.q_stride, block.rows, shape.d, scale, scratch.queries_turned + h * kBlock * shape.d);
    }
    for (int64_t c = 0; c < shape.channels; ++c) {
      const float* g = grads.out + block.row * shape.out_stride() + ((task.head + h) * shape.channels + c) * shape.e;
      const float scale = kind.grad_scale(c);
      pack_rows(g, shape.out_stride(), block.rows, shape.e, scale, scratch.grads + h * kBlock * width + c * ep,
                block.rows, width);
      pack_transposed(g, shape.out_stride(), block.rows, shape.e, scale,
                      scratch.grads_turned + (h * shape.channels + c) * shape.e * kBlock);
    }
  }
}

// One block of rows against all blocks of keys of the task that it sees. Writes the block's gradients of queries, zeros
// if it sees none.
template <class Kind>
void backward_rows(const AttentionTask& task, const Shape& shape, const AttentionInputs& in,
                   const AttentionGradients& grads, const Mask& mask, const Kind& kind, int64_t row,
                   BackwardScratchOf<Kind>& scratch) {
  const Span block(task.start, task.length, row, task.begin);
  const int64_t range = round_up(task.end - task.begin, kBlock);
  const int64_t dp = shape.d_padded, ep = shape.e_padded, width = shape.channels * ep;
  bool packed = false;
  clear(scratch.grad_queries, task.heads * kBlock * dp);
  for (int64_t key = task.begin; key < task.end; key += kBlock) {
    Span span(task.start, task.length, row, key);
    if (!mask.look(task.blocks, task.start, span, scratch.ends)) continue;
    if (!packed) {
      pack_block(task, shape, in, grads, kind, block, scratch);
      kind.begin_rows(block, shape, scratch.kind, task.head, task.heads);
    }
    packed = true;
    const int64_t at = key - task.begin;
    kind.prepare(span, scratch.kind);
    for (int64_t h = 0; h < task.heads; ++h) {
      const BackwardHead head{
          scratch.queries + h * kBlock * dp,           scratch.queries_turned + h * kBlock * shape.d,
          scratch.keys + (h * range + at) * dp,        scratch.values + (h * range + at) * ep,
          scratch.grads + h * kBlock * width,          scratch.grads_turned + h * kBlock * shape.channels * shape.e,
          scratch.grad_queries + h * kBlock * dp,      scratch.grad_keys + (h * range + at) * dp,
          scratch.grad_values + (h * range + at) * ep, h};
      kind.attend_backward(span, shape, head, scratch.kind);
    }
    kind.finish_tile(span, scratch.kind);
  }
  if (in.q == nullptr) return;
  const bool first = task.range == 0;
  const int64_t stride = first ? grads.q_stride : shape.heads * shape.d;
  float* to = first ? grads.q + block.row * stride : grads.partial_q + (task.partial + row - task.rows_begin) * stride;
  for (int64_t h = 0; h < task.heads; ++h) {
    write_rows(scratch.grad_queries + h * kBlock * dp, dp, block.rows, shape.d, to + (task.head + h) * shape.d, stride,
               kind.query_scale());
  }
}

template <class Kind>
void backward_task(const AttentionTask& task, int64_t number, const Shape& shape, const AttentionInputs& in,
                   const AttentionGradients& grads, const Mask& mask, const Kind& kind) {
  const int64_t count = task.end - task.begin, range = round_up(count, kBlock), token = task.start + task.begin;
  const int64_t dp = shape.d_padded, ep = shape.e_padded;
  BackwardScratchOf<Kind> scratch = take_scratch<BackwardScratchOf<Kind>>(shape, range, kind.num_sums());
  kind.begin_task(task, number, scratch.kind);
  for (int64_t h = 0; h < task.heads; ++h) {
    const int64_t head = task.head + h;
    if (in.k != nullptr) {
      pack_rows(in.k + token * in.k_stride + head * shape.d, in.k_stride, count, shape.d, 1.0f,
                scratch.keys + h * range * dp, range, dp);
    }
    pack_rows(in.v + token * in.v_stride + head * shape.e, in.v_stride, count, shape.e, 1.0f,
              scratch.values + h * range * ep, range, ep);
  }
  clear(scratch.grad_keys, task.heads * range * dp);
  clear(scratch.grad_values, task.heads * range * ep);
  for (int64_t row = task.rows_begin; row < task.rows_end; row += kBlock) {
    backward_rows(task, shape, in, grads, mask, kind, row, scratch);
  }
  for (int64_t h = 0; h < task.heads; ++h) {
    const int64_t head = task.head + h;
    if (in.k != nullptr) {
      write_rows(scratch.grad_keys + h * range * dp, dp, count, shape.d,
                 grads.k + token * grads.k_stride + head * shape.d, grads.k_stride);
    }
    write_rows(scratch.grad_values + h * range * ep, ep, count, shape.e,
               grads.v + token * grads.v_stride + head * shape.e, grads.v_stride);
  }
}

// Adds the partial gradients of queries to those of the first range, in the order of the plan. In causal attention that
// is the order of the ranges, since their work falls from range to range.
inline void add_partial_queries(const AttentionPlan& plan, const Shape& shape, const AttentionGradients& grads) {
  parallel_tasks(plan.size(), [&](int64_t t) {
    const AttentionTask& first = plan[t];
    if (first.range != 0 || first.ranges == 1) return;
    for (int64_t other = 0; other < plan.size(); ++other) {
      const AttentionTask& task = plan[other];
      if (task.start != first.start || task.head != first.head || task.range == 0) continue;
      const int64_t stride = shape.heads * shape.d, head = task.head * shape.d;
      for (int64_t row = task.rows_begin; row < task.rows_end; ++row) {
        const float* from = grads.partial_q + (task.partial + row - task.rows_begin) * stride + head;
        float* to = grads.q + (task.start + row) * grads.q_stride + head;
        for_vectors(task.heads * shape.d, [&](int64_t c, int count) {
          store_some(to + c, load_some(to + c, count) + load_some(from + c, count), count);
        });
      }
    }
  });
}

// grad_position_weight [2 * max_len - 1] from the tasks' sums by distance, in the order of the plan.
inline void reduce_by_distance(const AttentionPlan& plan, const double* by_distance, int64_t max_len,
                               float* grad_position_weight) {
  constexpr int64_t kDistances = 256;
  parallel_blocks(2 * max_len - 1, kDistances, [&](int64_t first, int64_t last) {
    // Entry `at` of the table is that of distance max_len - 1 - at.
    const int64_t begin = max_len - last, end = max_len - first;
    double sum[kDistances] = {};
    for (int64_t t = 0; t < plan.size(); ++t) {
      const int64_t known = min_of(end, plan[t].rows_end - plan[t].begin);
      for (int64_t distance = max_of(begin, -plan[t].ahead); distance < known; ++distance) {
        sum[distance - begin] += by_distance[plan[t].distances + distance];
      }
    }
    for (int64_t distance = begin; distance < end; ++distance) {
      grad_position_weight[max_len - 1 - distance] = static_cast<float>(sum[distance - begin]);
    }
  });
}

// out [n] = the sum of the tasks' n numbers each, in the order of the plan.
inline void reduce_tasks(const AttentionPlan& plan, const double* per_task, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0.0;
    for (int64_t t = 0; t < plan.size(); ++t) sum += per_task[t * n + i];
    out[i] = static_cast<float>(sum);
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
