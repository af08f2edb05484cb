// Uniform integers as a function of (seed, key, column): turbogr/random.py's random_integers, bit for bit.

#include "random.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

constexpr int kPairs = kLanes / 2;
typedef uint64_t vl __attribute__((vector_size(kLanes * 4)));
typedef int32_t vh __attribute__((vector_size(kLanes * 2)));

// Products of the low halves of the lanes with a number below 2^32.
inline vl times(vl x, uint64_t factor) {
#if defined(__AVX512F__)
  return (vl)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(static_cast<int64_t>(factor)));
#elif defined(__AVX2__)
  return (vl)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(static_cast<int64_t>(factor)));
#else
  return (x & 0xFFFFFFFFu) * factor;
#endif
}

// Integers of the kPairs columns from `column` on; each comes of two words, the coarse one first.
inline vh integers(const RowWords& words, int64_t column, uint64_t bound) {
  const vu pairs = words.from(static_cast<uint32_t>(2 * column));
  const vl both = (vl)pairs;  // little-endian: the coarse word is the low half
  return __builtin_convertvector((times(both, bound) + (times(both >> 32, bound) >> 32)) >> 32, vh);
}

}  // namespace

TURBOGR_KERNEL(random_integers)
(const int64_t* keys, int32_t* out, int64_t num_rows, int64_t num_columns, uint64_t seed, int64_t bound) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  parallel_blocks(num_rows, rows_per_block(4 * num_columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowWords words(low, high, keys[row]);
      int32_t* y = out + row * num_columns;
      int64_t column = 0;
      for (; column + kPairs <= num_columns; column += kPairs) {
        const vh drawn = integers(words, column, static_cast<uint64_t>(bound));
        std::memcpy(y + column, &drawn, sizeof(drawn));
      }
      if (column < num_columns) {
        const vh drawn = integers(words, column, static_cast<uint64_t>(bound));
        std::memcpy(y + column, &drawn, static_cast<size_t>(num_columns - column) * sizeof(int32_t));
      }
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
