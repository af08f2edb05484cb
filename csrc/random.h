// Counter-based random words: the same function as turbogr/random.py, bit for bit.
#pragma once

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

constexpr uint32_t kGolden = 0x9E3779B9u;

template <class Word>
inline Word mix(Word x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The words of one key, for any column.
struct RowWords {
  RowWords() = default;
  RowWords(uint32_t seed_low, uint32_t seed_high, int64_t key) {
    const uint64_t bits = static_cast<uint64_t>(key);
    first = mix(mix(static_cast<uint32_t>(bits) ^ seed_low) ^ static_cast<uint32_t>(bits >> 32));
    second = mix(mix(first ^ seed_high) + kGolden);
  }
  // The words of consecutive columns. The column is multiplied as a scalar: multiplying vectors of integers is slow.
  vu from(uint32_t column) const { return mix((vu)lane_numbers() * kGolden + (column * kGolden + first)) ^ second; }

  uint32_t first = 0, second = 0;
};

// The dropout of one row: which columns are kept, and their factor. A rate of 0 keeps all.
class RowDropout {
 public:
  // `threshold` is round(rate * 2^32), below 2^32.
  RowDropout(uint64_t seed, int64_t threshold, float scale)
      : low_(static_cast<uint32_t>(seed)),
        high_(static_cast<uint32_t>(seed >> 32)),
        threshold_(static_cast<uint32_t>(threshold)),
        scale_(scale),
        active_(threshold > 0) {}

  void start_row(const int64_t* keys, int64_t row) {
    if (!active_) return;
    words_ = RowWords(low_, high_, keys[row]);
  }

  // Factors of the columns from `column` on: 0 or 1 / (1 - rate).
  vf factors(int64_t column) const {
    if (!active_) return splat(1.0f);
    return words_.from(static_cast<uint32_t>(column)) >= threshold_ ? splat(scale_) : vf{};
  }

 private:
  uint32_t low_, high_, threshold_;
  float scale_;
  bool active_;
  RowWords words_;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
