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
#include "attention_products.h"

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
  float* outputs;      // a block of panels of e_padded columns per channel
  int64_t head, slot;  // number of the head; index of (block, head) among those of the task
};

struct BackwardHead {
  const float *queries, *queries_turned, *keys, *values;
  const float *grads, *grads_turned;  // per channel, scaled
  float *grad_queries, *grad_keys, *grad_values;
  int64_t slot;  // of the head within the task
};

inline void clear(float* x, int64_t n) { std::memset(x, 0, static_cast<size_t>(n) * sizeof(float)); }

// Packs the keys and values of one head and one block of keys, the first of which is token `token`.
inline void pack_keys(const Shape& shape, const AttentionInputs& in, int64_t token, int64_t num_keys, int64_t head,
                      float* keys, float* values) {
  const int64_t rows = round_up(num_keys, kTileRows);
  if (in.k != nullptr) {
    pack_panels(in.k + token * in.k_stride + head * shape.d, in.k_stride, num_keys, shape.d, 1.0f, keys, rows);
  }
  pack_panels(in.v + token * in.v_stride + head * shape.e, in.v_stride, num_keys, shape.e, 1.0f, values, rows);
}

// Keys and values of the whole batch in panels, by block and head, for a forward in which several tasks read them. If
// every sequence is one task, it is empty, and tasks pack what they need.
class PackedKeys {
 public:
  PackedKeys(const AttentionPlan& plan, const Shape& shape, const AttentionInputs& in)
      : shape_(shape),
        in_(in),
        used_(plan.longer_than_a_task),
        keys_(used_ && in.k != nullptr ? plan.blocks * shape.heads * kBlock * shape.d_padded : 0),
        values_(used_ ? plan.blocks * shape.heads * kBlock * shape.e_padded : 0) {}
  explicit operator bool() const { return keys_ && values_; }
  bool used() const { return used_; }

  void pack(const int64_t* offsets, int64_t num_sequences) {
    if (!used_) return;
    int64_t first_block = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
      const int64_t length = offsets[s + 1] - offsets[s], blocks = ceil_div(length, kBlock);
      parallel_tasks(blocks, [&](int64_t b) {
        const int64_t key = b * kBlock;
        for (int64_t head = 0; head < shape_.heads; ++head) {
          pack_keys(shape_, in_, offsets[s] + key, min_of(kBlock, length - key), head, keys(first_block + b, head),
                    values(first_block + b, head));
        }
      });
      first_block += blocks;
    }
  }

  float* keys(int64_t block, int64_t head) {
    return in_.k == nullptr ? nullptr : &keys_[(block * shape_.heads + head) * kBlock * shape_.d_padded];
  }
  float* values(int64_t block, int64_t head) {
    return &values_[(block * shape_.heads + head) * kBlock * shape_.e_padded];
  }

 private:
  const Shape& shape_;
  const AttentionInputs& in_;
  bool used_;
  Buffer<float> keys_, values_;
};

template <class Kind>
struct ForwardScratchOf {
  typename Kind::ForwardScratch kind;
  float *queries, *outputs, *keys, *values;
  RowEnds ends;

  void layout(Arena& arena, const Shape& shape, bool packs_keys) {
    const int64_t blocks = shape.rows_per_task() / kBlock;
    kind.layout(arena, shape, blocks);
    queries = arena.take<float>(blocks * shape.group * shape.d * kBlock);
    outputs = arena.take<float>(blocks * shape.group * kBlock * shape.channels * shape.e_padded);
    keys = arena.take<float>(packs_keys ? shape.group * kBlock * shape.d_padded : 0);
    values = arena.take<float>(packs_keys ? shape.group * kBlock * shape.e_padded : 0);
    ends.layout(arena);
  }
};

template <class Kind>
void forward_task(const AttentionTask& task, const Shape& shape, const AttentionInputs& in, const Mask& mask,
                  const Kind& kind, PackedKeys& all_keys, float* out) {
  const bool packs_keys = !all_keys.used();
  ForwardScratchOf<Kind> scratch = take_scratch<ForwardScratchOf<Kind>>(shape, packs_keys);
  const int64_t blocks = ceil_div(task.end - task.begin, kBlock);
  const int64_t dp = shape.d_padded, ep = shape.e_padded, width = shape.channels * ep;
  for (int64_t b = 0; in.q != nullptr && b < blocks; ++b) {
    const int64_t row = task.begin + b * kBlock, rows = min_of(kBlock, task.end - row);
    for (int64_t h = 0; h < task.heads; ++h) {
      turn_panels(in.q + (task.start + row) * in.q_stride + (task.head + h) * shape.d, in.q_stride, rows, shape.d,
                  kind.query_scale(), scratch.queries + (b * task.heads + h) * shape.d * kBlock);
    }
  }
  clear(scratch.outputs, blocks * task.heads * kBlock * width);
  kind.begin(blocks * task.heads, scratch.kind);
  for (int64_t key = 0; key < (mask.causal() ? task.end : task.length); key += kBlock) {
    bool packed = !packs_keys;
    for (int64_t b = 0; b < blocks; ++b) {
      Span span(task.start, task.length, task.begin + b * kBlock, key);
      if (!mask.look(task.blocks, task.start, span, scratch.ends)) continue;
      for (int64_t h = 0; !packed && h < task.heads; ++h) {
        pack_keys(shape, in, span.key, span.keys, task.head + h, scratch.keys + h * kBlock * dp,
                  scratch.values + h * kBlock * ep);
      }
      packed = true;
      kind.prepare(span, scratch.kind);
      for (int64_t h = 0; h < task.heads; ++h) {
        const int64_t slot = b * task.heads + h, head = task.head + h, block = task.first_block + key / kBlock;
        kind.attend(span, shape,
                    {scratch.queries + slot * shape.d * kBlock,
                     packs_keys ? scratch.keys + h * kBlock * dp : all_keys.keys(block, head),
                     packs_keys ? scratch.values + h * kBlock * ep : all_keys.values(block, head),
                     scratch.outputs + slot * kBlock * width, head, slot},
                    scratch.kind);
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const Span span(task.start, task.length, task.begin + b * kBlock, 0);
    for (int64_t h = 0; h < task.heads; ++h) {
      const int64_t slot = b * task.heads + h, head = task.head + h;
      float* const outputs = scratch.outputs + slot * kBlock * width;
      kind.finish(span, shape, {nullptr, nullptr, nullptr, outputs, head, slot}, scratch.kind);
      for (int64_t c = 0; c < shape.channels; ++c) {
        float* to = out + span.row * shape.out_stride() + (head * shape.channels + c) * shape.e;
        write_panels(outputs + c * kBlock * ep, span.rows, shape.e, to, shape.out_stride());
      }
    }
  }
}

// Runs the forward: packs keys and values if several tasks read them, then does all tasks.
template <class Kind>
int run_forward(const AttentionPlan& plan, const Shape& shape, const AttentionInputs& in, const int64_t* offsets,
                int64_t num_sequences, const Mask& mask, const Kind& kind, float* out) {
  PackedKeys all_keys(plan, shape, in);
  if (!all_keys) return kOutOfMemory;
  all_keys.pack(offsets, num_sequences);
  parallel_tasks(plan.size(), [&](int64_t i) { forward_task(plan[i], shape, in, mask, kind, all_keys, out); });
  return kOk;
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
      pack_panels(q, in.q_stride, block.rows, shape.d, scale, scratch.queries + h * kBlock * dp, block.rows);
      turn_panels(q, in.q_stride, block.rows, shape.d, scale, scratch.queries_turned + h * kBlock * shape.d);
    }
    for (int64_t c = 0; c < shape.channels; ++c) {
      const float* g = grads.out + block.row * shape.out_stride() + ((task.head + h) * shape.channels + c) * shape.e;
      const float scale = kind.grad_scale(c);
      pack_panels(g, shape.out_stride(), block.rows, shape.e, scale,
                  scratch.grads + h * kBlock * width + c * kBlock * ep, block.rows);
      turn_panels(g, shape.out_stride(), block.rows, shape.e, scale,
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
    write_panels(scratch.grad_queries + h * kBlock * dp, block.rows, shape.d, to + (task.head + h) * shape.d, stride,
                 kind.query_scale());
  }
}

// Calls body(head, its number in the task, first key within the task, number of keys).
template <class Body>
inline void for_blocks_of_keys(const AttentionTask& task, Body&& body) {
  for (int64_t h = 0; h < task.heads; ++h) {
    for (int64_t key = task.begin; key < task.end; key += kBlock) {
      body(task.head + h, h, key - task.begin, min_of(kBlock, task.end - key));
    }
  }
}

template <class Kind>
void backward_task(const AttentionTask& task, int64_t number, const Shape& shape, const AttentionInputs& in,
                   const AttentionGradients& grads, const Mask& mask, const Kind& kind) {
  const int64_t range = round_up(task.end - task.begin, kBlock);
  const int64_t dp = shape.d_padded, ep = shape.e_padded;
  BackwardScratchOf<Kind> scratch = take_scratch<BackwardScratchOf<Kind>>(shape, range, kind.num_sums());
  kind.begin_task(task, number, scratch.kind);
  for_blocks_of_keys(task, [&](int64_t head, int64_t slot, int64_t at, int64_t keys) {
    const int64_t token = task.start + task.begin + at, row = slot * range + at;
    if (in.k != nullptr) {
      pack_panels(in.k + token * in.k_stride + head * shape.d, in.k_stride, keys, shape.d, 1.0f,
                  scratch.keys + row * dp, kBlock);
    }
    pack_panels(in.v + token * in.v_stride + head * shape.e, in.v_stride, keys, shape.e, 1.0f,
                scratch.values + row * ep, kBlock);
  });
  clear(scratch.grad_keys, task.heads * range * dp);
  clear(scratch.grad_values, task.heads * range * ep);
  for (int64_t row = task.rows_begin; row < task.rows_end; row += kBlock) {
    backward_rows(task, shape, in, grads, mask, kind, row, scratch);
  }
  for_blocks_of_keys(task, [&](int64_t head, int64_t slot, int64_t at, int64_t keys) {
    const int64_t token = task.start + task.begin + at, row = slot * range + at;
    if (in.k != nullptr) {
      write_panels(scratch.grad_keys + row * dp, keys, shape.d, grads.k + token * grads.k_stride + head * shape.d,
                   grads.k_stride);
    }
    write_panels(scratch.grad_values + row * ep, keys, shape.e, grads.v + token * grads.v_stride + head * shape.e,
                 grads.v_stride);
  });
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
