// SiLU on tiles of scores [key][row], forward and backward.
#pragma once

#include "attention_mask.h"

namespace turbogr {
namespace TURBOGR_ISA {

// scores[0 .. N vectors) -> scale * SiLU(scores).
template <int N>
TURBOGR_INLINE void silu(float scale, float* scores) {
  const Several<N> x = load_several<N>(scores), s = sigmoid(x);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) store(scores + i * kLanes, x.v[i] * s.v[i] * scale);
}

// scores -> scale * SiLU(scores) where rows see the key, zeros elsewhere.
TURBOGR_OUTLINE inline void silu_scores(Span s, float scale, float* scores) {
  for (int64_t c = 0; c < s.keys; ++c) {
    float* const row = scores + c * kBlock;
    int64_t r = s.first_row(c);
    for (; r + kAbreast * kLanes <= s.rows_padded; r += kAbreast * kLanes) silu<kAbreast>(scale, row + r);
    for (; r < s.rows_padded; r += kLanes) silu<1>(scale, row + r);
  }
  clear_unseen(s, scores);
}

// What silu_scores_backward does with the gradient of the scores besides.
enum class Total { kNone, kSet, kAdd };

template <int N, Total kTotal>
TURBOGR_INLINE void silu_gradient(float* scores, float* gradient, float* total) {
  const Several<N> x = load_several<N>(scores), s = sigmoid(x);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const int64_t at = i * kLanes;
    const vf y = x.v[i] * s.v[i];
    const vf g = load(gradient + at) * (s.v[i] + y * (1.0f - s.v[i]));
    store(scores + at, y);
    store(gradient + at, g);
    if (kTotal == Total::kSet) store(total + at, g);
    if (kTotal == Total::kAdd) store(total + at, load(total + at) + g);
  }
}

template <Total kTotal>
TURBOGR_OUTLINE void silu_gradients(Span span, float* scores, float* gradient, float* total) {
  for (int64_t c = 0; c < span.keys; ++c) {
    int64_t at = c * kBlock + span.first_row(c);
    const int64_t end = c * kBlock + span.rows_padded;
    for (; at + kAbreast * kLanes <= end; at += kAbreast * kLanes) {
      silu_gradient<kAbreast, kTotal>(scores + at, gradient + at, total + at);
    }
    for (; at < end; at += kLanes) silu_gradient<1, kTotal>(scores + at, gradient + at, total + at);
  }
}

// scores -> SiLU(scores), and the gradient of that -> gradient of scores, which `total` takes or adds up besides.
// Where no row of a vector is within the band, `total` is left as it is.
inline void silu_scores_backward(const Span& span, float* scores, float* gradient, float* total, Total how) {
  if (how == Total::kNone) silu_gradients<Total::kNone>(span, scores, gradient, scores);
  if (how == Total::kSet) silu_gradients<Total::kSet>(span, scores, gradient, total);
  if (how == Total::kAdd) silu_gradients<Total::kAdd>(span, scores, gradient, total);
  clear_unseen(span, scores);
  clear_unseen(span, gradient);
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
