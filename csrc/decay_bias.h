// The functional time channel and its gradients: amplitude * e^(rate * power) of the difference in seconds.
//
// kDays:         a * gamma^(x^beta), x = (1 + |difference|) in days: power x^beta, rate ln gamma.
// kInversePower: a * x^-b, x = 1 + max(difference, 0): power ln x, rate -b.
// kSeconds:      a * gamma^(x^beta), x = |difference|, and 0^beta = 0: power x^beta, rate ln gamma.
#pragma once

#include <cmath>

#include "relative_bias.h"

namespace turbogr {
namespace TURBOGR_ISA {

enum TimeForm : int64_t { kTable = 0, kDays = 1, kInversePower = 2, kSeconds = 3 };

struct Decay {
  TimeForm form;
  float amplitude, exponent, base, rate;
};

// The parameters of a form: a and b of kInversePower, else a, beta and gamma. A table has no decay.
inline Decay decay_of(int64_t form, const float* weights) {
  if (form == kTable) return {kTable, 0.0f, 0.0f, 1.0f, 0.0f};
  if (form == kInversePower) return {kInversePower, weights[0], 1.0f, 1.0f, -weights[1]};
  return {TimeForm(form), weights[0], weights[1], weights[2], std::log(weights[2])};
}

// exp_of, but a NaN stays one: a parameter that is NaN must not give a finite weight.
inline vf exp_or_nan(vf x) { return x == x ? exp_of(x) : x; }

// What a tile keeps for the gradients: the power and ln x of every pair.
struct DecayTile {
  float *power, *logs;  // [kBlock][kBlock]
  float* seconds;       // [kBlock], of one key

  void layout(Arena& arena) {
    power = arena.take<float>(kBlock * kBlock);
    logs = arena.take<float>(kBlock * kBlock);
    seconds = arena.take<float>(kBlock);
  }
};

// weights[key][row] of a tile; rows beyond the last repeat it. Times are those of all tokens.
TURBOGR_OUTLINE inline void fill_decay(const Decay& decay, Span s, const int64_t* query_times,
                                       const int64_t* all_key_times, const DecayTile& tile, float* weights) {
  const int64_t *row_times = query_times + s.row, *key_times = all_key_times + s.key;
  const float unit = decay.form == kDays ? 1.0f / 86400.0f : 1.0f;
  for (int64_t c = 0; c < s.keys; ++c) {
    const int64_t first = s.first_row(c), end = s.rows_padded;
    for (int64_t r = first; r < end; ++r) {
      const uint64_t difference =
          static_cast<uint64_t>(row_times[min_of(r, s.rows - 1)]) - static_cast<uint64_t>(key_times[c]);
      const bool negative = static_cast<int64_t>(difference) < 0;
      const uint64_t later = negative && decay.form == kInversePower ? 0 : difference;
      const uint64_t distance = negative && decay.form != kInversePower ? 0 - difference : later;
      tile.seconds[r] = static_cast<float>(static_cast<int64_t>(decay.form == kSeconds ? distance : distance + 1));
    }
    for (int64_t r = first; r < end; r += kLanes) {
      const int64_t at = c * kBlock + r;
      const vf x = load(tile.seconds + r);
      const vf logs = log_of(max_of(x, splat(1.0f)) * unit);  // without the maximum, ln 0 of kSeconds
      vf power = decay.form == kInversePower ? logs : exp_or_nan(logs * decay.exponent);
      if (decay.form == kSeconds) power = x > 0.0f ? power : vf{};
      store(tile.logs + at, logs);
      store(tile.power + at, power);
      store(weights + at, exp_or_nan(power * decay.rate) * decay.amplitude);
    }
  }
}

// Adds the gradients of the form's parameters from those of a tile's weights (zeros where there is no pair).
TURBOGR_OUTLINE inline void add_decay_gradient(const Decay& decay, Span s, const float* grad_weights,
                                               const DecayTile& tile, double* sums) {
  double amplitude = 0.0, exponent = 0.0, rate = 0.0;  // terms of both signs cancel, so only short sums are in float
  for (int64_t c = 0; c < s.keys; ++c) {
    vf key_amplitude{}, key_exponent{}, key_rate{};
    for (int64_t r = s.first_row(c); r < s.rows_padded; r += kLanes) {
      const int64_t at = c * kBlock + r;
      const vf power = load(tile.power + at);
      const vf exponents = power * decay.rate;
      const vf weight = exponents < -80.0f ? vf{} : exp_of(exponents);  // else a power beyond e^80 would make it count
      const vf by_amplitude = load(grad_weights + at) * weight;
      key_amplitude += by_amplitude;
      key_rate += by_amplitude * power;
      key_exponent += by_amplitude * power * load(tile.logs + at);
    }
    amplitude += static_cast<double>(sum(key_amplitude));
    exponent += static_cast<double>(sum(key_exponent));
    rate += static_cast<double>(sum(key_rate));
  }
  sums[0] += amplitude;
  if (decay.form == kInversePower) {
    sums[1] -= rate * decay.amplitude;
  } else {
    sums[1] += exponent * decay.amplitude * decay.rate;
    sums[2] += rate * decay.amplitude / decay.base;
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
