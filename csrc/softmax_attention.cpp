// Softmax attention. The forward keeps a running maximum and sum per row and, in the end, the logarithm of the
// sum, from which the backward makes the probabilities again.

#include <cmath>

#include "attention.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr float kLowest = -1e30f;  // finite: the difference of two of them is 0, not NaN

// Which lanes of rows [row, row + kLanes) see the key.
template <bool kMasked>
inline vi seen_by(int64_t key, int64_t row, const Span& s) {
  if (kMasked) return s.sees(key, row);
  return lane_numbers() >= splat(static_cast<int32_t>(max_of(0, min_of(kLanes, key - s.band.upper - row))));
}

struct Softmax {
  float scale;
  float* log_sums;        // [T, heads]: written by the forward, read by the backward
  const float* out;       // [T, heads, e], for the backward
  const float* grad_out;  // [T, heads, e], for the backward

  struct ForwardScratch {
    float *scores, *factors;
    float *highest, *sums;  // [slots][kBlock]

    void layout(Arena& arena, const Shape& shape, int64_t blocks) {
      scores = arena.take<float>(kBlock * kBlock);
      factors = arena.take<float>(kBlock);
      highest = arena.take<float>(blocks * shape.group * kBlock);
      sums = arena.take<float>(blocks * shape.group * kBlock);
    }
  };

  struct BackwardScratch {
    float *scores, *grad_scores;
    float *log_sums, *products;  // [group][kBlock]; products of the output and its gradient

    void layout(Arena& arena, const Shape& shape, int64_t) {
      scores = arena.take<float>(kBlock * kBlock);
      grad_scores = arena.take<float>(kBlock * kBlock);
      log_sums = arena.take<float>(shape.group * kBlock);
      products = arena.take<float>(shape.group * kBlock);
    }
  };

  void begin(int64_t slots, ForwardScratch& scratch) const {
    clear(scratch.sums, slots * kBlock);
    for (int64_t i = 0; i < slots * kBlock; ++i) scratch.highest[i] = kLowest;
  }

  template <class Scratch>
  void prepare(const Span&, Scratch&) const {}

  void attend(const Span& s, const Shape& shape, const ForwardHead& head, ForwardScratch& scratch) const {
    panel_scores(s.keys, s.rows_padded, shape.d, head.keys, head.queries_turned, nullptr, scratch.scores, s.band);
    float *highest = scratch.highest + head.slot * kBlock, *sums = scratch.sums + head.slot * kBlock;
    if (s.masked()) {
      exponentiate<true>(s, highest, sums, scratch);
    } else {
      exponentiate<false>(s, highest, sums, scratch);
    }
    for (int64_t r = 0; r < s.rows; ++r) {
      if (scratch.factors[r] == 1.0f) continue;
      for_vectors_of_row(r, shape.e_padded, head.outputs,
                         [&](int64_t, float* at) { store(at, load(at) * scratch.factors[r]); });
    }
    panel_add_by_row(s.keys, s.rows, shape.e_padded, scratch.scores, head.values, head.outputs, s.band);
  }

  // scores -> exp(scale * scores - highest so far), and the factors that bring what was summed before to that level.
  template <bool kMasked>
  TURBOGR_OUTLINE void exponentiate(Span s, float* highest, float* sums, ForwardScratch& scratch) const {
    for (int64_t r = 0; r < s.rows_padded; r += kLanes) {
      const int64_t first = max_of(0, r + s.band.lower), keys = min_of(s.keys, r + kLanes + s.band.upper);
      const vf before = load(highest + r);
      vf top = before;
      for (int64_t c = first; c < keys; ++c) {
        const vf x = load(scratch.scores + c * kBlock + r) * scale;
        top = max_of(seen_by<kMasked>(c, r, s) ? x : splat(kLowest), top);
      }
      const vf factor = exp_of(before - top);
      vf total = load(sums + r) * factor;
      for (int64_t c = first; c < keys; ++c) {
        const vf x = load(scratch.scores + c * kBlock + r) * scale - top;
        const vf e = seen_by<kMasked>(c, r, s) ? exp_of(x) + (x - x) : vf{};  // x - x keeps a NaN
        store(scratch.scores + c * kBlock + r, e);
        total += e;
      }
      store(highest + r, top);
      store(sums + r, total);
      store(scratch.factors + r, factor);
    }
    clear_unseen(s, scratch.scores);
  }

  void finish(const Span& s, const Shape& shape, const ForwardHead& head, ForwardScratch& scratch) const {
    const float* highest = scratch.highest + head.slot * kBlock;
    const float* sums = scratch.sums + head.slot * kBlock;
    for (int64_t r = 0; r < s.rows; ++r) {
      log_sums[(s.row + r) * shape.heads + head.head] = highest[r] + std::log(sums[r]);
      for_vectors_of_row(r, shape.e_padded, head.outputs, [&](int64_t, float* at) { store(at, load(at) / sums[r]); });
    }
  }

  float query_scale() const { return 1.0f; }
  float grad_scale(int64_t) const { return 1.0f; }
  int64_t num_sums() const { return 0; }
  void begin_task(const AttentionTask&, int64_t, BackwardScratch&) const {}

  void begin_rows(const Span& s, const Shape& shape, BackwardScratch& scratch, int64_t first_head,
                  int64_t heads) const {
    clear(scratch.log_sums, heads * kBlock);
    clear(scratch.products, heads * kBlock);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t r = 0; r < s.rows; ++r) {
        const int64_t at = (s.row + r) * shape.heads + first_head + h;
        vf product{};
        for_vectors(shape.e, [&](int64_t c, int count) {
          product += load_some(out + at * shape.e + c, count) * load_some(grad_out + at * shape.e + c, count);
        });
        scratch.log_sums[h * kBlock + r] = log_sums[at];
        scratch.products[h * kBlock + r] = sum(product);
      }
    }
  }

  void attend_backward(const Span& s, const Shape& shape, const BackwardHead& head, BackwardScratch& scratch) const {
    const int64_t dp = shape.d_padded, ep = shape.e_padded;
    panel_scores(s.keys, s.rows_padded, shape.d, head.keys, head.queries_turned, nullptr, scratch.scores, s.band);
    panel_scores(s.keys, s.rows_padded, shape.e, head.values, head.grads_turned, nullptr, scratch.grad_scores, s.band);
    differentiate(s, scratch.log_sums + head.slot * kBlock, scratch.products + head.slot * kBlock, scratch);
    panel_add_by_key(s.keys, s.rows, ep, scratch.scores, head.grads, head.grad_values, s.band);
    panel_add_by_key(s.keys, s.rows, dp, scratch.grad_scores, head.queries, head.grad_keys, s.band);
    panel_add_by_row(s.keys, s.rows, dp, scratch.grad_scores, head.keys, head.grad_queries, s.band);
  }

  // scores -> probabilities, and their gradients -> gradients of the scores.
  TURBOGR_OUTLINE void differentiate(Span s, const float* sums, const float* products, BackwardScratch& scratch) const {
    for (int64_t c = 0; c < s.keys; ++c) {
      for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
        const int64_t at = c * kBlock + r;
        const vf x = load(scratch.scores + at) * scale - load(sums + r);
        const vf p = exp_of(x) + (x - x);
        store(scratch.scores + at, p);
        store(scratch.grad_scores + at, p * (load(scratch.grad_scores + at) - load(products + r)) * scale);
      }
    }
    clear_unseen(s, scratch.scores);
    clear_unseen(s, scratch.grad_scores);
  }

  void finish_tile(const Span&, BackwardScratch&) const {}
};

}  // namespace

TURBOGR_KERNEL(softmax_forward)
(const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* first, const int64_t* last,
 float* out, float* log_sums, int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t d, int64_t e,
 int64_t q_stride, int64_t k_stride, int64_t v_stride, float scale) {
  const Shape shape(heads, d, e);
  const Mask mask({first, last}, offsets, num_sequences, num_tokens);
  if (!mask) return kOutOfMemory;
  const AttentionPlan plan(mask, offsets, num_sequences, num_tokens, heads, shape.group, shape.rows_per_task());
  if (!plan) return kOutOfMemory;
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const Softmax kind{scale, log_sums, nullptr, nullptr};
  return run_forward(plan, shape, in, offsets, num_sequences, mask, kind, out);
}

TURBOGR_KERNEL(softmax_backward)
(const float* grad_out, const float* q, const float* k, const float* v, const int64_t* offsets, const int64_t* first,
 const int64_t* last, const float* out, float* log_sums, float* grad_q, float* grad_k, float* grad_v,
 int64_t num_sequences, int64_t num_tokens, int64_t heads, int64_t d, int64_t e, int64_t q_stride, int64_t k_stride,
 int64_t v_stride, float scale) {
  const Shape shape(heads, d, e);
  const Mask mask({first, last}, offsets, num_sequences, num_tokens);
  if (!mask) return kOutOfMemory;
  const AttentionPlan plan(mask, offsets, num_sequences, heads, shape.group);
  if (!plan) return kOutOfMemory;
  Buffer<float> partial_q(plan.partial_rows * heads * d);
  if (!partial_q) return kOutOfMemory;
  const AttentionInputs in{q, k, v, q_stride, k_stride, v_stride};
  const AttentionGradients grads{grad_out, grad_q, grad_k, grad_v, heads * d, heads * d, heads * e, partial_q.data()};
  const Softmax kind{scale, log_sums, out, grad_out};
  parallel_tasks(plan.size(), [&](int64_t i) { backward_task(plan[i], i, shape, in, grads, mask, kind); });
  add_partial_queries(plan, shape, grads);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
