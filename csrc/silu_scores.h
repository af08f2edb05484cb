// SiLU on tiles of scores [key][row], forward and backward.
#pragma once

#include "attention_mask.h"

namespace turbogr {
namespace TURBOGR_ISA {

// scores -> scale * SiLU(scores) where rows see the key, zeros elsewhere.
TURBOGR_OUTLINE inline void silu_scores(Span s, float scale, float* scores) {
  for (int64_t c = 0; c < s.keys; ++c) {
    float* row = scores + c * kBlock;
    for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
      const vf x = load(row + r);
      store(row + r, x * sigmoid(x) * scale);
    }
  }
  clear_unseen(s, scores);
}

// scores -> SiLU(scores), and the gradient of that -> gradient of scores, added to `total` when that is given.
TURBOGR_OUTLINE inline void silu_scores_backward(Span span, float* scores, float* gradient, float* total) {
  for (int64_t c = 0; c < span.keys; ++c) {
    const int64_t at = c * kBlock;
    for (int64_t r = span.first_row(c); r < span.rows_padded; r += kLanes) {
      const vf x = load(scores + at + r);
      const vf s = sigmoid(x);
      const vf y = x * s;
      store(scores + at + r, y);
      store(gradient + at + r, load(gradient + at + r) * (s + y * (1.0f - s)));
    }
  }
  clear_unseen(span, scores);
  clear_unseen(span, gradient);
  if (total == nullptr) return;
  for (int64_t c = 0; c < span.keys; ++c) {
    const int64_t at = c * kBlock;
    for (int64_t r = span.first_row(c); r < span.rows_padded; r += kLanes) {
      store(total + at + r, load(total + at + r) + load(gradient + at + r));
    }
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
