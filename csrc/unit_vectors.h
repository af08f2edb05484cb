// Vectors scaled to unit length: norms, and gradients through the scaling.
#pragma once

#include <cmath>

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

constexpr float kNormEps = 1e-6f;

inline float dot(const float* a, const float* b, int64_t n) {
  vf total{};
  for_vectors(n, [&](int64_t c, int count) { total += load_some(a + c, count) * load_some(b + c, count); });
  return sum(total);
}

inline float inverse_norm(const float* x, int64_t n) {
  const float norm = std::sqrt(dot(x, x, n));
  return 1.0f / (norm < kNormEps ? kNormEps : norm);
}

inline void write_inverse_norms(const float* vectors, int64_t num, int64_t width, float* inverse_norms) {
  parallel_blocks(num, rows_per_block(width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) inverse_norms[i] = inverse_norm(vectors + i * width, width);
  });
}

// Gradient of the unit vector -> gradient of the vector, in place. A vector shorter than the epsilon was only scaled.
inline void through_norm(const float* x, float inverse, int64_t n, float* gradient) {
  const bool projected = inverse < 1.0f / kNormEps;
  const float along = projected ? dot(x, gradient, n) * inverse * inverse : 0.0f;
  for_vectors(n, [&](int64_t c, int count) {
    store_some(gradient + c, (load_some(gradient + c, count) - load_some(x + c, count) * along) * inverse, count);
  });
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
