// Norms of rows, forward and backward, and matrices whose columns are stored in several pieces; shared by norm_linear
// and gated_linear.
//
// Of each row, a norm stores the mean (0 for RMSNorm) and the inverse deviation. Rows may be strided. `Number` is float
// or Bf16; all arithmetic is in fp32.
#pragma once

#include <cmath>

#include "narrow.h"
#include "random.h"

namespace turbogr {
namespace TURBOGR_ISA {
enum Norm : int64_t { kNone = 0, kLayer = 1, kRms = 2 };

struct Moments {
  float mean, inverse;
};

// The mean is computed first, then the squares of the differences, so that rows with a large mean stay exact.
template <class Number>
inline Moments moments_of(const Number* x, int64_t width, Norm norm, float eps) {
  if (norm == kNone) return {0.0f, 1.0f};
  float mean = 0.0f;
  if (norm == kLayer) {
    vf total{};
    for_vectors(width, [&](int64_t c, int count) { total += load_some(x + c, count); });
    mean = sum(total) / static_cast<float>(width);
  }
  vf squares{};
  for_vectors(width, [&](int64_t c, int count) {
    vf centred = load_some(x + c, count) - mean;
    if (count < kLanes) centred = lane_numbers() < splat(int32_t(count)) ? centred : vf{};
    squares += centred * centred;
  });
  return {mean, 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps)};
}

// Gradient of norm(x) -> gradient of x, where `normed(c, count)` gives norm(x); in place.
template <class Normed>
inline void through_norm(float* grad, int64_t width, Norm norm, float inverse, Normed&& normed) {
  if (norm == kNone) return;
  vf total{}, along{};
  for_vectors(width, [&](int64_t c, int count) {
    const vf g = load_some(grad + c, count);
    total += g;
    along += g * normed(c, count);  // lanes beyond the row hold a zero in g
  });
  const float mean = norm == kLayer ? sum(total) / static_cast<float>(width) : 0.0f;
  const float share = sum(along) / static_cast<float>(width);
  for_vectors(width, [&](int64_t c, int count) {
    const vf g = load_some(grad + c, count);
    store_some(grad + c, (g - mean - normed(c, count) * share) * inverse, count);
  });
}

// out = dropout(gate * norm(x)) of a row.
template <class Number>
inline void gate_row(const Number* x, const Number* gate, const Moments& m, const RowDropout& dropout, int64_t width,
                     Number* out) {
  for_vectors(width, [&](int64_t c, int count) {
    const vf normed = (load_some(x + c, count) - m.mean) * m.inverse;
    store_some(out + c, load_some(gate + c, count) * normed * dropout.factors(c), count);
  });
}

// `grad` is the gradient of gate_row's output and becomes that output again, for the gradient of the weight.
template <class Number>
inline void gate_row_backward(Number* grad, const Number* x, const Number* gate, const Moments& m, Norm norm,
                              const RowDropout& dropout, int64_t width, float* grad_x, Number* grad_gate) {
  const auto normed = [&](int64_t c, int count) { return (load_some(x + c, count) - m.mean) * m.inverse; };
  for_vectors(width, [&](int64_t c, int count) {
    const vf factors = dropout.factors(c), y = normed(c, count), by = load_some(gate + c, count);
    const vf g = load_some(grad + c, count) * factors;
    store_some(grad_gate + c, g * y, count);
    store_some(grad_x + c, g * by, count);
    store_some(grad + c, by * y * factors, count);
  });
  through_norm(grad_x, width, norm, m.inverse, normed);
}

// Gradient of SiLU(x) -> gradient of x, in place.
template <class Number>
inline void through_silu(const Number* x, int64_t width, float* grad) {
  for_vectors(width, [&](int64_t c, int count) {
    const vf v = load_some(x + c, count), s = sigmoid(v);
    store_some(grad + c, load_some(grad + c, count) * (s + v * s * (1.0f - s)), count);
  });
}

// A matrix whose columns are stored in several pieces; rows of piece i are strides[i] floats apart.
template <class Pointer>
struct Pieces {
  Pointer const* data;
  const int64_t *strides, *widths;
  int64_t count;
};

inline void scatter_row(const float* row, int64_t at, const Pieces<float*>& pieces) {
  for (int64_t i = 0; i < pieces.count; ++i) {
    if (pieces.widths[i] == 0) continue;  // may be null, which memcpy must not see
    float* to = pieces.data[i] + at * pieces.strides[i];
    std::memcpy(to, row, static_cast<size_t>(pieces.widths[i]) * sizeof(float));
    row += pieces.widths[i];
  }
}

// Writes the columns [column, column + count) of a row of floats to the pieces that have them, rounded to bf16.
inline void scatter_columns(const float* row, int64_t at, int64_t column, int64_t count, const Pieces<Bf16*>& pieces) {
  for (int64_t i = 0, first = 0; i < pieces.count; first += pieces.widths[i++]) {
    const int64_t begin = max_of(first, column), end = min_of(first + pieces.widths[i], column + count);
    if (begin >= end) continue;
    Bf16* const to = pieces.data[i] + at * pieces.strides[i] + begin - first;
    for_vectors(end - begin,
                [&](int64_t c, int some) { store_some(to + c, load_some(row + begin - column + c, some), some); });
  }
}

// The row of floats that pieces of bf16 hold.
inline void gather_row(const Pieces<const Bf16*>& pieces, int64_t at, float* row) {
  for (int64_t i = 0; i < pieces.count; ++i) {
    const Bf16* const from = pieces.data[i];
    for_vectors(pieces.widths[i], [&](int64_t c, int count) {
      store_some(row + c, from != nullptr ? load_some(from + at * pieces.strides[i] + c, count) : vf{}, count);
    });
    row += pieces.widths[i];
  }
}

// A piece that is null counts as zeros.
inline void gather_row(const Pieces<const float*>& pieces, int64_t at, float* row) {
  for (int64_t i = 0; i < pieces.count; ++i) {
    const size_t bytes = static_cast<size_t>(pieces.widths[i]) * sizeof(float);
    if (pieces.data[i] != nullptr) {
      std::memcpy(row, pieces.data[i] + at * pieces.strides[i], bytes);
    } else {
      std::memset(row, 0, bytes);
    }
    row += pieces.widths[i];
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
