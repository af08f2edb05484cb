// HSTU attention: out_i = sum over j <= i of SiLU(q_i . k_j + bias_ij) / max_len * v_j, and its gradients.
//
// Legend: scores are tiles [key][row]; q, k, v, out and their gradients are [token][head][...] with a stride per token.
// The backward recomputes scores tile by tile, so nothing of size length x length ever exists.

#include "attention_plan.h"
#include "relative_bias.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

struct Shape {
  int64_t heads, d, e;         // sizes of a head of q and k, and of v
  int64_t d_padded, e_padded;  // in whole vectors
  int64_t group;               // heads that share a tile of bias

  Shape(int64_t num_heads, int64_t qk, int64_t v)
      : heads(num_heads), d(qk), e(v), d_padded(round_up(qk, kLanes)), e_padded(round_up(v, kLanes)),
        group(heads_together(num_heads, qk + v)) {}
};

// position_weight by distance: entry `distance` of the result is position_weight[max_len - 1 - distance].
class ByDistance {
 public:
  ByDistance(const float* position_weight, int64_t max_len) : max_len_(max_len), reversed_(max_len + 3 * kBlock) {
    if (!reversed_) return;
    for (int64_t distance = -2 * kBlock; distance < max_len + kBlock; ++distance) {
      const int64_t at = max_len - 1 - distance;
      reversed_[distance + 2 * kBlock] = 0 <= at && at < 2 * max_len - 1 ? position_weight[at] : 0.0f;
    }
  }
  explicit operator bool() const { return static_cast<bool>(reversed_); }
  const float* data() { return reversed_.data() + 2 * kBlock; }

 private:
  int64_t max_len_;
  Buffer<float> reversed_;
};

// scores -> SiLU(scores) where rows see the key, zeros elsewhere.
TURBOGR_OUTLINE void activate(float* scores, int64_t keys, int64_t rows, int64_t offset) {
  for (int64_t c = 0; c < keys; ++c) {
    float* row = scores + c * kBlock;
    for (int64_t r = max_of(0, c - offset) / kLanes * kLanes; r < rows; r += kLanes) {
      const vf x = load(row + r);
      store(row + r, x * sigmoid(x));
    }
  }
  clear_unseen(keys, scores, offset);
}

// scores -> SiLU(scores), and gradient of SiLU(scores) -> gradient of scores, added to `total` when it is given.
TURBOGR_OUTLINE void activate_backward(float* scores, float* gradient, float* total, int64_t keys, int64_t rows, int64_t offset) {
  for (int64_t c = 0; c < keys; ++c) {
    const int64_t at = c * kBlock;
    for (int64_t r = max_of(0, c - offset) / kLanes * kLanes; r < rows; r += kLanes) {
      const vf x = load(scores + at + r);
      const vf s = sigmoid(x);
      const vf y = x * s;
      store(scores + at + r, y);
      store(gradient + at + r, load(gradient + at + r) * (s + y * (1.0f - s)));
    }
  }
  clear_unseen(keys, scores, offset);
  clear_unseen(keys, gradient, offset);
  if (total == nullptr) return;
  for (int64_t c = 0; c < keys; ++c) {
    const int64_t at = c * kBlock;
    for (int64_t r = max_of(0, c - offset) / kLanes * kLanes; r < rows; r += kLanes) {
      store(total + at + r, load(total + at + r) + load(gradient + at + r));
    }
  }
}

struct ForwardScratch {
  BiasTile tile;
  float *queries, *outputs, *keys, *values, *scores;

  void layout(Arena& arena, const Shape& shape, int64_t rows_per_task) {
    tile.layout(arena);
    const int64_t blocks = rows_per_task / kBlock;
    queries = arena.take<float>(blocks * shape.group * shape.d * kBlock);
    outputs = arena.take<float>(blocks * shape.group * kBlock * shape.e_padded);
    keys = arena.take<float>(shape.group * kBlock * shape.d_padded);
    values = arena.take<float>(shape.group * kBlock * shape.e_padded);
    scores = arena.take<float>(kBlock * kBlock);
  }
};

struct Inputs {
  const float *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
};

void forward_task(const AttentionTask& task, const Shape& shape, const Inputs& in, const BiasSource& source, float scale,
                  int64_t rows_per_task, float* out) {
  const ForwardScratch scratch = take_scratch<ForwardScratch>(shape, rows_per_task);
  const int64_t blocks = ceil_div(task.end - task.begin, kBlock);
  const int64_t query_size = shape.d * kBlock, output_size = kBlock * shape.e_padded;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t row = task.begin + b * kBlock, rows = min_of(kBlock, task.end - row);
    for (int64_t h = 0; h < task.heads; ++h) {
      pack_transposed(in.q + (task.start + row) * in.q_stride + (task.head + h) * shape.d, in.q_stride, rows, shape.d,
                      1.0f, scratch.queries + (b * task.heads + h) * query_size);
    }
  }
  std::memset(scratch.outputs, 0, static_cast<size_t>(blocks * task.heads * output_size) * sizeof(float));

  for (int64_t key = 0; key < task.end; key += kBlock) {
    const int64_t keys = min_of(kBlock, task.end - key), keys_padded = round_up(keys, kTileRows);
    for (int64_t h = 0; h < task.heads; ++h) {
      pack_rows(in.k + (task.start + key) * in.k_stride + (task.head + h) * shape.d, in.k_stride, keys, shape.d, 1.0f,
                scratch.keys + h * kBlock * shape.d_padded, keys_padded, shape.d_padded);
      pack_rows(in.v + (task.start + key) * in.v_stride + (task.head + h) * shape.e, in.v_stride, keys, shape.e, 1.0f,
                scratch.values + h * kBlock * shape.e_padded, keys_padded, shape.e_padded);
    }
    for (int64_t b = max_of(0, (key - task.begin) / kBlock); b < blocks; ++b) {
      const int64_t row = task.begin + b * kBlock, rows = min_of(kBlock, task.end - row);
      const int64_t rows_padded = round_up(rows, kGroup), offset = row - key;
      fill_bias(source, task.start + row, rows, range_of(source.query_times + task.start + row, rows), task.start + key,
                keys, offset, scratch.tile);
      for (int64_t h = 0; h < task.heads; ++h) {
        tile_scores(keys, rows_padded, shape.d, scratch.keys + h * kBlock * shape.d_padded, shape.d_padded,
                    scratch.queries + (b * task.heads + h) * query_size, scratch.tile.bias, scratch.scores, offset);
        activate(scratch.scores, keys, rows_padded, offset);
        tile_add_by_row(keys, rows, shape.e_padded, scratch.scores, scratch.values + h * kBlock * shape.e_padded,
                        shape.e_padded, scratch.outputs + (b * task.heads + h) * output_size, shape.e_padded, offset);
      }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t row = task.begin + b * kBlock, rows = min_of(kBlock, task.end - row);
    for (int64_t h = 0; h < task.heads; ++h) {
      const float* from = scratch.outputs + (b * task.heads + h) * output_size;
      float* to = out + ((task.start + row) * shape.heads + task.head + h) * shape.e;
      for (int64_t r = 0; r < rows; ++r) {
        for_vectors(shape.e, [&](int64_t c, int count) {
          store_some(to + r * shape.heads * shape.e + c, load(from + r * shape.e_padded + c) * scale, count);
        });
      }
    }
  }
}

struct BackwardScratch {
  BiasTile tile;
  BiasGradient bias;
  float *keys, *values, *grad_keys, *grad_values;                  // of the task's range of keys, per head
  float *queries, *queries_turned, *grads, *grads_turned, *grad_queries;  // of one block of rows, per head
  float *scores, *grad_scores, *total;

  void layout(Arena& arena, const Shape& shape, int64_t keys_of_task, int64_t num_time_weights) {
    tile.layout(arena);
    bias.layout(arena, num_time_weights);
    const int64_t range = round_up(keys_of_task, kBlock);
    keys = arena.take<float>(shape.group * range * shape.d_padded);
    values = arena.take<float>(shape.group * range * shape.e_padded);
    grad_keys = arena.take<float>(shape.group * range * shape.d_padded);
    grad_values = arena.take<float>(shape.group * range * shape.e_padded);
    queries = arena.take<float>(shape.group * kBlock * shape.d_padded);
    queries_turned = arena.take<float>(shape.group * kBlock * shape.d);
    grads = arena.take<float>(shape.group * kBlock * shape.e_padded);
    grads_turned = arena.take<float>(shape.group * kBlock * shape.e);
    grad_queries = arena.take<float>(shape.group * kBlock * shape.d_padded);
    scores = arena.take<float>(kBlock * kBlock);
    grad_scores = arena.take<float>(kBlock * kBlock);
    total = arena.take<float>(kBlock * kBlock);
  }
};

struct Gradients {
  const float* out;  // [T, heads, e]
  float *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  float* partial_q;     // rows of ranges after the first, [partial_rows, heads, d]
  double* by_distance;  // per task
  double* by_bucket;    // per task
};

void write_rows(const float* from, int64_t ld, int64_t rows, int64_t columns, float* to, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(columns, [&](int64_t c, int count) { store_some(to + r * stride + c, load(from + r * ld + c), count); });
  }
}

// One block of rows against all blocks of keys of the task that it sees.
void backward_rows(const AttentionTask& task, const Shape& shape, const Inputs& in, const Gradients& grads,
                   const BiasSource& source, float scale, int64_t row, const BackwardScratch& scratch) {
  const int64_t rows = min_of(kBlock, task.length - row), rows_padded = round_up(rows, kGroup);
  const int64_t range = round_up(task.end - task.begin, kBlock);
  const TimeRange row_range = range_of(source.query_times + task.start + row, rows);
  const int64_t dp = shape.d_padded, ep = shape.e_padded;
  for (int64_t h = 0; h < task.heads; ++h) {
    const float* q = in.q + (task.start + row) * in.q_stride + (task.head + h) * shape.d;
    const int64_t out_stride = shape.heads * shape.e;
    const float* g = grads.out + (task.start + row) * out_stride + (task.head + h) * shape.e;
    pack_rows(q, in.q_stride, rows, shape.d, 1.0f, scratch.queries + h * kBlock * dp, rows, dp);
    pack_transposed(q, in.q_stride, rows, shape.d, 1.0f, scratch.queries_turned + h * kBlock * shape.d);
    pack_rows(g, out_stride, rows, shape.e, scale, scratch.grads + h * kBlock * ep, rows, ep);
    pack_transposed(g, out_stride, rows, shape.e, scale, scratch.grads_turned + h * kBlock * shape.e);
  }
  std::memset(scratch.grad_queries, 0, static_cast<size_t>(task.heads * kBlock * dp) * sizeof(float));

  for (int64_t key = task.begin; key < min_of(task.end, row + rows); key += kBlock) {
    const int64_t keys = min_of(kBlock, task.end - key), offset = row - key, at = key - task.begin;
    fill_bias(source, task.start + row, rows, row_range, task.start + key, keys, offset, scratch.tile);
    float* total = task.heads > 1 ? scratch.total : nullptr;
    if (total != nullptr) std::memset(total, 0, kBlock * kBlock * sizeof(float));
    for (int64_t h = 0; h < task.heads; ++h) {
      const float* k = scratch.keys + (h * range + at) * dp;
      const float* v = scratch.values + (h * range + at) * ep;
      tile_scores(keys, rows_padded, shape.d, k, dp, scratch.queries_turned + h * kBlock * shape.d, scratch.tile.bias,
                  scratch.scores, offset);
      tile_scores(keys, rows_padded, shape.e, v, ep, scratch.grads_turned + h * kBlock * shape.e, nullptr,
                  scratch.grad_scores, offset);
      activate_backward(scratch.scores, scratch.grad_scores, total, keys, rows_padded, offset);
      tile_add_by_key(keys, rows, ep, scratch.scores, scratch.grads + h * kBlock * ep, ep,
                      scratch.grad_values + (h * range + at) * ep, ep, offset);
      tile_add_by_key(keys, rows, dp, scratch.grad_scores, scratch.queries + h * kBlock * dp, dp,
                      scratch.grad_keys + (h * range + at) * dp, dp, offset);
      tile_add_by_row(keys, rows, dp, scratch.grad_scores, k, dp, scratch.grad_queries + h * kBlock * dp, dp, offset);
    }
    add_bias_gradient(total != nullptr ? total : scratch.grad_scores, scratch.tile, rows, keys, offset, scratch.bias);
  }
  for (int64_t h = 0; h < task.heads; ++h) {
    const int64_t head = (task.head + h) * shape.d;
    const bool first = task.range == 0;
    float* to = first ? grads.q + (task.start + row) * grads.q_stride + head
                      : grads.partial_q + (task.partial + row - task.begin) * shape.heads * shape.d + head;
    write_rows(scratch.grad_queries + h * kBlock * dp, dp, rows, shape.d, to, first ? grads.q_stride : shape.heads * shape.d);
  }
}

void backward_task(const AttentionTask& task, int64_t number, const Shape& shape, const Inputs& in, const Gradients& grads,
                   const BiasSource& source, int64_t num_time_weights, float scale) {
  BackwardScratch scratch = take_scratch<BackwardScratch>(shape, task.end - task.begin, num_time_weights);
  const int64_t count = task.end - task.begin, range = round_up(count, kBlock);
  const int64_t dp = shape.d_padded, ep = shape.e_padded;
  scratch.bias.by_distance = grads.by_distance + task.distances;
  scratch.bias.by_bucket = grads.by_bucket + number * num_time_weights;
  std::memset(scratch.bias.by_distance, 0, static_cast<size_t>(task.length - task.begin) * sizeof(double));
  std::memset(scratch.bias.by_bucket, 0, static_cast<size_t>(num_time_weights) * sizeof(double));
  for (int64_t h = 0; h < task.heads; ++h) {
    const int64_t token = task.start + task.begin, head = task.head + h;
    pack_rows(in.k + token * in.k_stride + head * shape.d, in.k_stride, count, shape.d, 1.0f, scratch.keys + h * range * dp,
              range, dp);
    pack_rows(in.v + token * in.v_stride + head * shape.e, in.v_stride, count, shape.e, 1.0f,
              scratch.values + h * range * ep, range, ep);
  }
  std::memset(scratch.grad_keys, 0, static_cast<size_t>(task.heads * range * dp) * sizeof(float));
  std::memset(scratch.grad_values, 0, static_cast<size_t>(task.heads * range * ep) * sizeof(float));
  for (int64_t row = task.begin; row < task.length; row += kBlock) {
    backward_rows(task, shape, in, grads, source, scale, row, scratch);
  }
  for (int64_t h = 0; h < task.heads; ++h) {
    const int64_t token = task.start + task.begin, head = task.head + h;
    write_rows(scratch.grad_keys + h * range * dp, dp, count, shape.d, grads.k + token * grads.k_stride + head * shape.d,
               grads.k_stride);
    write_rows(scratch.grad_values + h * range * ep, ep, count, shape.e, grads.v + token * grads.v_stride + head * shape.e,
               grads.v_stride);
  }
}

// Adds up what the tasks left, in the order of the sequences and ranges whatever the order of execution.
void reduce(const AttentionPlan& plan, const Shape& shape, const Gradients& grads, int64_t max_len,
            int64_t num_time_weights, float* grad_position_weight, float* grad_time_weight) {
  parallel_blocks(max_len, 256, [&](int64_t begin, int64_t end) {
    double sum[256] = {};
    for (int64_t t = 0; t < plan.size(); ++t) {
      const int64_t known = min_of(end, plan[t].length - plan[t].begin);
      for (int64_t distance = begin; distance < known; ++distance) {
        sum[distance - begin] += grads.by_distance[plan[t].distances + distance];
      }
    }
    for (int64_t distance = begin; distance < end; ++distance) {
      grad_position_weight[max_len - 1 - distance] = static_cast<float>(sum[distance - begin]);
      if (distance > 0) grad_position_weight[max_len - 1 + distance] = 0.0f;
    }
  });
  for (int64_t b = 0; b < num_time_weights; ++b) {
    double sum = 0.0;
    for (int64_t t = 0; t < plan.size(); ++t) sum += grads.by_bucket[t * num_time_weights + b];
    grad_time_weight[b] = static_cast<float>(sum);
  }
  // Ranges of one sequence and head group keep their order in the plan: their work falls from range to range.
  parallel_tasks(plan.size(), [&](int64_t t) {
    const AttentionTask& first = plan[t];
    if (first.range != 0 || first.ranges == 1) return;
    for (int64_t next = t + 1; next < plan.size(); ++next) {
      const AttentionTask& task = plan[next];
      if (task.start != first.start || task.length != first.length || task.head != first.head || task.range == 0) continue;
      for (int64_t row = task.begin; row < task.length; ++row) {
        const int64_t head = task.head * shape.d;
        const float* from = grads.partial_q + (task.partial + row - task.begin) * shape.heads * shape.d + head;
        float* to = grads.q + (task.start + row) * grads.q_stride + head;
        for_vectors(task.heads * shape.d, [&](int64_t c, int count) {
          store_some(to + c, load_some(to + c, count) + load_some(from + c, count), count);
        });
      }
    }
  });
}

}  // namespace

TURBOGR_KERNEL(hstu_forward)
(const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* query_times,
 const int64_t* key_times, const float* position_weight, const float* time_weight, const int64_t* boundaries, float* out,
 int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t d, int64_t e, int64_t q_stride, int64_t k_stride,
 int64_t v_stride, int64_t max_len, int64_t num_time_weights) {
  const Shape shape(heads, d, e);
  const int64_t rows_per_task = max_of(1, 65536 / (kBlock * shape.group * (d + e))) * kBlock;
  const AttentionPlan plan(offsets, num_sequences, num_tokens, heads, shape.group, rows_per_task);
  ByDistance by_distance(position_weight, max_len);
  if (!plan || !by_distance) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, num_time_weights - 1);
  const BiasSource source{query_times, key_times, by_distance.data(), time_weight, &buckets};
  const Inputs in{q, k, v, q_stride, k_stride, v_stride};
  parallel_tasks(plan.size(), [&](int64_t i) {
    forward_task(plan[i], shape, in, source, 1.0f / static_cast<float>(max_len), rows_per_task, out);
  });
  return kOk;
}

TURBOGR_KERNEL(hstu_backward)
(const float* grad_out, const float* q, const float* k, const float* v, const int64_t* offsets,
 const int64_t* query_times, const int64_t* key_times, const float* position_weight, const float* time_weight,
 const int64_t* boundaries, float* grad_q, float* grad_k, float* grad_v, float* grad_position_weight,
 float* grad_time_weight, int64_t num_sequences, int64_t heads, int64_t d, int64_t e, int64_t q_stride, int64_t k_stride,
 int64_t v_stride, int64_t grad_q_stride, int64_t grad_k_stride, int64_t grad_v_stride, int64_t max_len,
 int64_t num_time_weights) {
  const Shape shape(heads, d, e);
  const AttentionPlan plan(offsets, num_sequences, heads, shape.group);
  ByDistance by_distance(position_weight, max_len);
  if (!plan || !by_distance) return kOutOfMemory;
  Buffer<float> partial_q(plan.partial_rows * heads * d);
  Buffer<double> sums_by_distance(plan.distances);
  Buffer<double> sums_by_bucket(plan.size() * num_time_weights);
  if (!partial_q || !sums_by_distance || !sums_by_bucket) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, num_time_weights - 1);
  const BiasSource source{query_times, key_times, by_distance.data(), time_weight, &buckets};
  const Inputs in{q, k, v, q_stride, k_stride, v_stride};
  const Gradients grads{grad_out,      grad_q,        grad_k,           grad_v, grad_q_stride,
                        grad_k_stride, grad_v_stride, partial_q.data(), sums_by_distance.data(), sums_by_bucket.data()};
  parallel_tasks(plan.size(), [&](int64_t i) {
    backward_task(plan[i], i, shape, in, grads, source, num_time_weights, 1.0f / static_cast<float>(max_len));
  });
  reduce(plan, shape, grads, max_len, num_time_weights, grad_position_weight, grad_time_weight);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
