// HSTU attention: out_i = sum over j <= i of SiLU(q_i . k_j + bias_ij) / max_len * v_j, and its gradients.
//
// The backward recomputes scores tile by tile, so nothing of size length x length ever exists.

#include "attention.h"
#include "relative_bias.h"
#include "silu_scores.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

struct Hstu {
  BiasSource source;
  float scale;
  int64_t num_time_weights = 0;
  double* by_distance = nullptr;  // sums of all tasks
  double* by_bucket = nullptr;

  struct ForwardScratch {
    BiasTile tile;
    float* scores;

    void layout(Arena& arena, const Shape&, int64_t) {
      tile.layout(arena);
      scores = arena.take<float>(kBlock * kBlock);
    }
  };

  struct BackwardScratch {
    BiasTile tile;
    BiasGradient bias;
    float *scores, *grad_scores, *total;

    void layout(Arena& arena, const Shape&, int64_t num_weights) {
      tile.layout(arena);
      bias.layout(arena, num_weights);
      scores = arena.take<float>(kBlock * kBlock);
      grad_scores = arena.take<float>(kBlock * kBlock);
      total = arena.take<float>(kBlock * kBlock);
    }
  };

  void begin(int64_t, ForwardScratch&) const {}

  template <class Scratch>
  void prepare(const Span& s, Scratch& scratch) const {
    fill_bias(source, s.row, s.rows, range_of(source.query_times + s.row, s.rows), s.key, s.keys, s.offset,
              scratch.tile);
  }

  void attend(const Span& s, const Shape& shape, const ForwardHead& head, ForwardScratch& scratch) const {
    tile_scores(s.keys, s.rows_padded, shape.d, head.keys, shape.d_padded, head.queries_turned, scratch.tile.bias,
                scratch.scores, s.offset);
    silu_scores(scratch.scores, scale, s.keys, s.rows_padded, s.offset);
    tile_add_by_row(s.keys, s.rows, shape.e_padded, scratch.scores, head.values, shape.e_padded, head.outputs,
                    shape.e_padded, s.offset);
  }

  void finish(const Span&, const Shape&, const ForwardHead&, ForwardScratch&) const {}

  float grad_scale(int64_t) const { return scale; }
  int64_t num_sums() const { return num_time_weights; }

  void begin_task(const AttentionTask& task, int64_t number, BackwardScratch& scratch) const {
    scratch.bias.by_distance = by_distance + task.distances;
    scratch.bias.by_bucket = by_bucket + number * num_time_weights;
    std::memset(scratch.bias.by_distance, 0, static_cast<size_t>(task.length - task.begin) * sizeof(double));
    std::memset(scratch.bias.by_bucket, 0, static_cast<size_t>(num_time_weights) * sizeof(double));
  }

  void begin_rows(const Span&, const Shape&, BackwardScratch&, int64_t, int64_t) const {}

  void attend_backward(const Span& s, const Shape& shape, const BackwardHead& head, BackwardScratch& scratch) const {
    const int64_t dp = shape.d_padded, ep = shape.e_padded;
    if (head.slot == 0) clear(scratch.total, kBlock * kBlock);
    tile_scores(s.keys, s.rows_padded, shape.d, head.keys, dp, head.queries_turned, scratch.tile.bias, scratch.scores,
                s.offset);
    tile_scores(s.keys, s.rows_padded, shape.e, head.values, ep, head.grads_turned, nullptr, scratch.grad_scores,
                s.offset);
    silu_scores_backward(scratch.scores, scratch.grad_scores, scratch.total, s.keys, s.rows_padded, s.offset);
    tile_add_by_key(s.keys, s.rows, ep, scratch.scores, head.grads, ep, head.grad_values, ep, s.offset);
    tile_add_by_key(s.keys, s.rows, dp, scratch.grad_scores, head.queries, dp, head.grad_keys, dp, s.offset);
    tile_add_by_row(s.keys, s.rows, dp, scratch.grad_scores, head.keys, dp, head.grad_queries, dp, s.offset);
  }

  void finish_tile(const Span& s, BackwardScratch& scratch) const {
    add_by_distance(scratch.total, s.rows, s.keys, s.offset, scratch.bias);
    add_by_bucket(scratch.total, scratch.tile, s.rows, s.keys, s.offset, scratch.bias);
  }
};

}  // namespace

// The arguments are those of FuXi's kernels; the last, which tells kinds of time, means nothing here.
TURBOGR_KERNEL(hstu_forward)
(const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* query_times,
 const int64_t* key_times, const float* position_weight, const float* time_weight, const int64_t* boundaries,
 float* out, int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t d, int64_t e, int64_t q_stride,
 int64_t k_stride, int64_t v_stride, int64_t max_len, int64_t num_time_weights, int64_t) {
  const Shape shape(heads, d, e);
  const AttentionPlan plan(offsets, num_sequences, num_tokens, heads, shape.group, shape.rows_per_task());
  ByDistance by_distance(position_weight, max_len);
  if (!plan || !by_distance) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, num_time_weights - 1);
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const Hstu kind{{query_times, key_times, by_distance.data(), time_weight, &buckets},
                  1.0f / static_cast<float>(max_len)};
  parallel_tasks(plan.size(), [&](int64_t i) { forward_task(plan[i], shape, in, kind, out); });
  return kOk;
}

TURBOGR_KERNEL(hstu_backward)
(const float* grad_out, const float* q, const float* k, const float* v, const int64_t* offsets,
 const int64_t* query_times, const int64_t* key_times, const float* position_weight, const float* time_weight,
 const int64_t* boundaries, float* grad_q, float* grad_k, float* grad_v, float* grad_position_weight,
 float* grad_time_weight, int64_t num_sequences, int64_t heads, int64_t d, int64_t e, int64_t q_stride,
 int64_t k_stride, int64_t v_stride, int64_t max_len, int64_t num_time_weights, int64_t) {
  const Shape shape(heads, d, e);
  const AttentionPlan plan(offsets, num_sequences, heads, shape.group);
  ByDistance by_distance(position_weight, max_len);
  if (!plan || !by_distance) return kOutOfMemory;
  Buffer<float> partial_q(plan.partial_rows * heads * d);
  Buffer<double> sums_by_distance(plan.distances);
  Buffer<double> sums_by_bucket(plan.size() * num_time_weights);
  if (!partial_q || !sums_by_distance || !sums_by_bucket) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, num_time_weights - 1);
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const AttentionGradients grads{grad_out, grad_q, grad_k, grad_v, heads * d, heads * d, heads * e, partial_q.data()};
  const Hstu kind{{query_times, key_times, by_distance.data(), time_weight, &buckets},
                  1.0f / static_cast<float>(max_len),
                  num_time_weights,
                  sums_by_distance.data(),
                  sums_by_bucket.data()};
  parallel_tasks(plan.size(), [&](int64_t i) { backward_task(plan[i], i, shape, in, grads, kind); });
  add_partial_queries(plan, shape, grads);
  reduce_by_distance(plan, sums_by_distance.data(), max_len, grad_position_weight);
  reduce_tasks(plan, sums_by_bucket.data(), num_time_weights, grad_time_weight);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
