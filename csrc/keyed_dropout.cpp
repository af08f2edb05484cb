// keyed_dropout: dropout by the keys of the rows. Its backward is the same pass over the gradient.

#include "narrow.h"
#include "random.h"

namespace turbogr {
namespace TURBOGR_ISA {

namespace {

template <class Number>
void drop_rows(const Number* x, const int64_t* keys, Number* out, int64_t num_rows, int64_t width,
               const RowDropout& factors) {
  parallel_blocks(num_rows, rows_per_block(2 * width * int64_t(sizeof(Number))), [&](int64_t begin, int64_t end) {
    RowDropout dropout = factors;
    for (int64_t row = begin; row < end; ++row) {
      dropout.start_row(keys, row);
      for_vectors(width, [&](int64_t c, int count) {
        store_some(out + row * width + c, load_some(x + row * width + c, count) * dropout.factors(c), count);
      });
    }
  });
}

}  // namespace

TURBOGR_KERNEL(keyed_dropout)
(const float* x, const int64_t* keys, float* out, int64_t num_rows, int64_t width, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  drop_rows(x, keys, out, num_rows, width, RowDropout(seed, threshold, dropout_scale));
  return kOk;
}

// The same for bf16.
TURBOGR_KERNEL(keyed_dropout_bf16)
(const void* x, const int64_t* keys, void* out, int64_t num_rows, int64_t width, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  drop_rows(static_cast<const Bf16*>(x), keys, static_cast<Bf16*>(out), num_rows, width,
            RowDropout(seed, threshold, dropout_scale));
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
