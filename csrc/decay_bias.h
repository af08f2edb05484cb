// The functional time channel: a * gamma^(x^beta), x = (1 + |difference in seconds|) in days, and its gradients.
#pragma once

#include <cmath>

#include "relative_bias.h"

namespace turbogr {
namespace TURBOGR_ISA {

struct Decay {
  float amplitude, exponent, base;
};

// exp_of, but a NaN stays one: a parameter that is NaN must not give a finite weight.
inline vf exp_or_nan(vf x) { return x == x ? exp_of(x) : x; }

// What a tile keeps for the gradients: x^beta and ln x of every pair.
struct DecayTile {
  float *power, *log_days;  // [kBlock][kBlock]
  float* seconds;           // [kBlock], of one key

  void layout(Arena& arena) {
    power = arena.take<float>(kBlock * kBlock);
    log_days = arena.take<float>(kBlock * kBlock);
    seconds = arena.take<float>(kBlock);
  }
};

// weights[key][row] of a tile; rows beyond the last repeat it. Times are those of all tokens.
TURBOGR_OUTLINE inline void fill_decay(const Decay& decay, Span s, const int64_t* query_times,
                                       const int64_t* all_key_times, const DecayTile& tile, float* weights) {
  const int64_t *row_times = query_times + s.row, *key_times = all_key_times + s.key;
  const float log_base = std::log(decay.base);
  for (int64_t c = 0; c < s.keys; ++c) {
    const int64_t first = s.first_row(c), end = s.rows_padded;
    for (int64_t r = first; r < end; ++r) {
      const uint64_t difference =
          static_cast<uint64_t>(row_times[min_of(r, s.rows - 1)]) - static_cast<uint64_t>(key_times[c]);
      const uint64_t distance = static_cast<int64_t>(difference) < 0 ? 0 - difference : difference;
      tile.seconds[r] = static_cast<float>(static_cast<int64_t>(distance + 1));
    }
    for (int64_t r = first; r < end; r += kLanes) {
      const int64_t at = c * kBlock + r;
      const vf log_days = log_of(load(tile.seconds + r) * (1.0f / 86400.0f));
      const vf power = exp_or_nan(log_days * decay.exponent);
      store(tile.log_days + at, log_days);
      store(tile.power + at, power);
      store(weights + at, exp_or_nan(power * log_base) * decay.amplitude);
    }
  }
}

// Adds the gradients of amplitude, exponent and base from those of a tile's weights (zeros where there is no pair).
TURBOGR_OUTLINE inline void add_decay_gradient(const Decay& decay, Span s, const float* grad_weights,
                                               const DecayTile& tile, double* sums) {
  const float log_base = std::log(decay.base);
  double amplitude = 0.0, exponent = 0.0, base = 0.0;  // terms of both signs cancel, so only short sums are in float
  for (int64_t c = 0; c < s.keys; ++c) {
    vf key_amplitude{}, key_exponent{}, key_base{};
    for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
      const int64_t at = c * kBlock + r;
      const vf power = load(tile.power + at);
      const vf by_amplitude = load(grad_weights + at) * exp_of(power * log_base);
      key_amplitude += by_amplitude;
      key_base += by_amplitude * power;
      key_exponent += by_amplitude * power * load(tile.log_days + at);
    }
    amplitude += static_cast<double>(sum(key_amplitude));
    exponent += static_cast<double>(sum(key_exponent));
    base += static_cast<double>(sum(key_base));
  }
  sums[0] += amplitude;
  sums[1] += exponent * decay.amplitude * log_base;
  sums[2] += base * decay.amplitude / decay.base;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
