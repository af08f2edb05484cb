// HSTU attention: out_i = sum over the keys j that row i sees of SiLU(alpha * q_i . k_j + bias_ij) / max_len * v_j, and
// its gradients.
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
  bool biased;
  float scale, alpha;
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
    if (biased) fill_bias(source, s, scratch.tile);
  }

  void attend(const Span& s, const Shape& shape, const ForwardHead& head, ForwardScratch& scratch) const {
    panel_scores(s.keys, s.rows_padded, shape.d, head.keys, head.queries_turned, biased ? scratch.tile.bias : nullptr,
                 scratch.scores, s.band);
    silu_scores(s, scale, scratch.scores);
    panel_add_by_row(s.keys, s.rows, shape.e_padded, scratch.scores, head.values, head.outputs, s.band);
  }

  void finish(const Span&, const Shape&, const ForwardHead&, ForwardScratch&) const {}

  float query_scale() const { return alpha; }
  float grad_scale(int64_t) const { return scale; }
  int64_t num_sums() const { return num_time_weights; }

  void begin_task(const AttentionTask& task, int64_t number, BackwardScratch& scratch) const {
    if (biased) scratch.bias.begin(task, by_distance, by_bucket + number * num_time_weights);
  }

  void begin_rows(const Span&, const Shape&, BackwardScratch&, int64_t, int64_t) const {}

  void attend_backward(const Span& s, const Shape& shape, const BackwardHead& head, BackwardScratch& scratch) const {
    const int64_t dp = shape.d_padded, ep = shape.e_padded;
    panel_scores(s.keys, s.rows_padded, shape.d, head.keys, head.queries_turned, biased ? scratch.tile.bias : nullptr,
                 scratch.scores, s.band);
    panel_scores(s.keys, s.rows_padded, shape.e, head.values, head.grads_turned, nullptr, scratch.grad_scores, s.band);
    silu_scores_backward(s, scratch.scores, scratch.grad_scores, scratch.total,
                         !biased          ? Total::kNone
                         : head.slot == 0 ? Total::kSet
                                          : Total::kAdd);
    panel_add_by_key(s.keys, s.rows, ep, scratch.scores, head.grads, head.grad_values, s.band);
    panel_add_by_key(s.keys, s.rows, dp, scratch.grad_scores, head.queries, head.grad_keys, s.band);
    panel_add_by_row(s.keys, s.rows, dp, scratch.grad_scores, head.keys, head.grad_queries, s.band);
  }

  void finish_tile(const Span& s, BackwardScratch& scratch) const {
    if (!biased) return;
    clear_unseen(s, scratch.total);
    add_by_distance(s, scratch.total, scratch.bias);
    add_by_bucket(s, scratch.total, scratch.tile, scratch.bias);
  }
};

}  // namespace

// The arguments are those of FuXi's kernels; the unnamed one has no meaning here. Null weights leave the bias out.
TURBOGR_KERNEL(hstu_forward)
(const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* first, const int64_t* last,
 const int64_t* query_times, const int64_t* key_times, const float* position_weight, const float* time_weight,
 const int64_t* boundaries, float* out, int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t d, int64_t e,
 int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t max_len, int64_t num_time_weights, int64_t,
 float alpha) {
  const Shape shape(heads, d, e);
  const Mask mask({first, last}, offsets, num_sequences, num_tokens);
  if (!mask) return kOutOfMemory;
  const AttentionPlan plan(mask, offsets, num_sequences, num_tokens, heads, shape.group, shape.rows_per_task());
  ByDistance by_distance(position_weight, max_len, mask);
  if (!plan || !by_distance) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, max_of(0, num_time_weights - 1));
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const Hstu kind{{query_times, key_times, by_distance.data(), time_weight, &buckets},
                  position_weight != nullptr,
                  1.0f / static_cast<float>(max_len),
                  alpha};
  return run_forward(plan, shape, in, offsets, num_sequences, mask, kind, out);
}

TURBOGR_KERNEL(hstu_backward)
(const float* grad_out, const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* first,
 const int64_t* last, const int64_t* query_times, const int64_t* key_times, const float* position_weight,
 const float* time_weight, const int64_t* boundaries, float* grad_q, float* grad_k, float* grad_v,
 float* grad_position_weight, float* grad_time_weight, int64_t num_sequences, int64_t num_tokens, int64_t heads,
 int64_t d, int64_t e, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t max_len, int64_t num_time_weights,
 int64_t, float alpha) {
  const bool biased = position_weight != nullptr;
  const Shape shape(heads, d, e);
  const Mask mask({first, last}, offsets, num_sequences, num_tokens);
  if (!mask) return kOutOfMemory;
  const AttentionPlan plan(mask, offsets, num_sequences, heads, shape.group);
  ByDistance by_distance(position_weight, max_len, mask);
  if (!plan || !by_distance) return kOutOfMemory;
  Buffer<float> partial_q(plan.partial_rows * heads * d);
  Buffer<double> sums_by_distance(biased ? plan.distances : 0);
  Buffer<double> sums_by_bucket(plan.size() * num_time_weights);
  if (!partial_q || !sums_by_distance || !sums_by_bucket) return kOutOfMemory;
  const TimeBuckets buckets(boundaries, max_of(0, num_time_weights - 1));
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const AttentionGradients grads{grad_out, grad_q, grad_k, grad_v, heads * d, heads * d, heads * e, partial_q.data()};
  const Hstu kind{{query_times, key_times, by_distance.data(), time_weight, &buckets},
                  biased,
                  1.0f / static_cast<float>(max_len),
                  alpha,
                  num_time_weights,
                  sums_by_distance.data(),
                  sums_by_bucket.data()};
  parallel_tasks(plan.size(), [&](int64_t i) { backward_task(plan[i], i, shape, in, grads, mask, kind); });
  add_partial_queries(plan, shape, grads);
  if (!biased) return kOk;
  reduce_by_distance(plan, sums_by_distance.data(), max_len, grad_position_weight);
  reduce_tasks(plan, sums_by_bucket.data(), num_time_weights, grad_time_weight);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
