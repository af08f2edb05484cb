// Uniform integers as a function of (seed, key, column): turbogr/random.py's random_integers, bit for bit.

#include "random.h"

namespace turbogr {
namespace TURBOGR_ISA {

TURBOGR_KERNEL(random_integers)
(const int64_t* keys, int64_t* out, int64_t num_rows, int64_t num_columns, uint64_t seed, int64_t bound) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  const uint64_t range = static_cast<uint64_t>(bound);
  parallel_blocks(num_rows, rows_per_block(8 * num_columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowWords words(low, high, keys[row]);
      int64_t* y = out + row * num_columns;
      for (int64_t column = 0; column < num_columns; ++column) {
        const uint64_t coarse = words.at(static_cast<uint32_t>(2 * column)) * range;
        const uint64_t fine = words.at(static_cast<uint32_t>(2 * column + 1)) * range;
        y[column] = static_cast<int64_t>((coarse + (fine >> 32)) >> 32);
      }
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
