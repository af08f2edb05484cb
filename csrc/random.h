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

// The dropout of one row: which columns stay, and the factor of those that do. A rate of 0 keeps all.
class RowDropout {
 public:
  // `threshold` is round(rate * 2^32), below 2^32.
  RowDropout(uint64_t seed, int64_t threshold, float scale)
      : low_(static_cast<uint32_t>(seed)), high_(static_cast<uint32_t>(seed >> 32)),
        threshold_(static_cast<uint32_t>(threshold)), scale_(scale), active_(threshold > 0) {}

  void start_row(const int64_t* keys, int64_t row) {
    if (!active_) return;
    const uint64_t key = static_cast<uint64_t>(keys[row]);
    first_ = mix(mix(static_cast<uint32_t>(key) ^ low_) ^ static_cast<uint32_t>(key >> 32));
    second_ = mix(mix(first_ ^ high_) + kGolden);
  }

  // Factors of the columns from `column` on: 0 or 1 / (1 - rate).
  vf factors(int64_t column) const {
    if (!active_) return splat(1.0f);
    const vu columns = (vu)lane_numbers() + static_cast<uint32_t>(column);
    const vu words = mix(columns * kGolden + first_) ^ second_;
    return words >= threshold_ ? splat(scale_) : vf{};
  }

 private:
  uint32_t low_, high_, threshold_;
  float scale_;
  bool active_;
  uint32_t first_ = 0, second_ = 0;
};

}  // namespace TURBOGR_ISA
}  // namespace turbogr
