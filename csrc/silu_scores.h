// SiLU on tiles of scores [key][row], forward and backward.
#pragma once

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {

// scores -> scale * SiLU(scores) where rows see the key, zeros elsewhere.
TURBOGR_OUTLINE inline void silu_scores(float* scores, float scale, int64_t keys, int64_t rows, int64_t offset) {
  for (int64_t c = 0; c < keys; ++c) {
    float* row = scores + c * kBlock;
    for (int64_t r = max_of(0, c - offset) / kLanes * kLanes; r < rows; r += kLanes) {
      const vf x = load(row + r);
      store(row + r, x * sigmoid(x) * scale);
    }
  }
  clear_unseen(keys, scores, offset);
}

// scores -> SiLU(scores), and the gradient of that -> gradient of scores, added to `total` when that is given.
TURBOGR_OUTLINE inline void silu_scores_backward(float* scores, float* gradient, float* total, int64_t keys,
                                                 int64_t rows, int64_t offset) {
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

}  // namespace TURBOGR_ISA
}  // namespace turbogr
