// Adam and Adagrad on some rows of a table, in place.

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

// `mean_share` and `square_share` are 1 - beta, computed in double and then rounded to float.
TURBOGR_KERNEL(row_adam)
(float* weight, float* mean, float* square, const int64_t* index, const float* grad, int64_t num_rows, int64_t width,
 float mean_share, float beta2, float square_share, float eps, float decay, float step_size,
 float inverse_root_correction) {
  parallel_blocks(num_rows, rows_per_block(7 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + 2 < end) {
        const int64_t ahead = index[i + 2] * width;
        __builtin_prefetch(weight + ahead, 1);
        __builtin_prefetch(mean + ahead, 1);
        __builtin_prefetch(square + ahead, 1);
      }
      const int64_t at = index[i] * width;
      const float* g_row = grad + i * width;
      for_vectors(width, [&](int64_t c, int count) {
        const vf g = load_some(g_row + c, count);
        vf m = load_some(mean + at + c, count);
        m = m + (g - m) * mean_share;
        const vf v = load_some(square + at + c, count) * beta2 + g * g * square_share;
        store_some(mean + at + c, m, count);
        store_some(square + at + c, v, count);
        const vf w = load_some(weight + at + c, count) * decay;
        store_some(weight + at + c, w - m * step_size / (sqrt_of(v) * inverse_root_correction + eps), count);
      });
    }
  });
  return kOk;
}

TURBOGR_KERNEL(row_adagrad)
(float* weight, float* square, const int64_t* index, const float* grad, int64_t num_rows, int64_t width, float lr,
 float eps) {
  parallel_blocks(num_rows, rows_per_block(5 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + 4 < end) {
        __builtin_prefetch(weight + index[i + 4] * width, 1);
        __builtin_prefetch(square + index[i + 4] * width, 1);
      }
      const int64_t at = index[i] * width;
      const float* g_row = grad + i * width;
      for_vectors(width, [&](int64_t c, int count) {
        const vf g = load_some(g_row + c, count);
        const vf s = load_some(square + at + c, count) + g * g;
        store_some(square + at + c, s, count);
        store_some(weight + at + c, load_some(weight + at + c, count) - g * lr / (sqrt_of(s) + eps), count);
      });
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
