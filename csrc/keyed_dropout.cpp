// keyed_dropout: dropout by the keys of the rows. Its backward is the same pass over the gradient.

#include "random.h"
#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

TURBOGR_KERNEL(keyed_dropout)
(const float* x, const int64_t* keys, float* out, int64_t num_rows, int64_t width, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  parallel_blocks(num_rows, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t row = begin; row < end; ++row) {
      dropout.start_row(keys, row);
      for_vectors(width, [&](int64_t c, int count) {
        store_some(out + row * width + c, load_some(x + row * width + c, count) * dropout.factors(c), count);
      });
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
