// The passes around the two projections of a block: everything between the GEMMs in one go over each row.
//
// norm_linear:  y = activation(norm(x) W + b).      normalize -> GEMM -> activate;
//               backward: activate_backward -> GEMMs -> normalize_backward.
// gated_linear: y = residual + dropout(gate * norm(x)) W + b.   gate -> GEMM; backward: GEMM -> gate_backward -> GEMM.
//
// A norm keeps of each row the mean (0 for RMSNorm) and the inverse deviation. Rows of x and gate may be strided.

#include <cmath>

#include "random.h"
#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

enum Norm : int64_t { kNone = 0, kLayer = 1, kRms = 2 };

struct Moments {
  float mean, inverse;
};

// The mean is taken first and the squares around it, which keeps rows with a large mean exact.
inline Moments moments_of(const float* x, int64_t width, Norm norm, float eps) {
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

// Columns of a matrix that lie apart in memory; rows of piece i are strides[i] floats apart.
template <class Pointer>
struct Pieces {
  Pointer const* data;
  const int64_t *strides, *widths;
  int64_t count;
};

// A whole row of pieces is worked on in one buffer, so that only its end is shorter than a vector.
struct RowScratch {
  float* row;
  void layout(Arena& arena, int64_t width) { row = arena.take<float>(round_up(width, kLanes)); }
};

inline void scatter_row(const float* row, int64_t at, const Pieces<float*>& pieces) {
  for (int64_t i = 0; i < pieces.count; ++i) {
    if (pieces.widths[i] == 0) continue;  // may be null, which memcpy must not see
    float* to = pieces.data[i] + at * pieces.strides[i];
    std::memcpy(to, row, static_cast<size_t>(pieces.widths[i]) * sizeof(float));
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

}  // namespace

// out [T, width] = norm(x), inverses [T] its inverse deviations.
TURBOGR_KERNEL(normalize)
(const float* x, float* out, float* inverses, int64_t num_rows, int64_t width, int64_t stride, int64_t norm,
 float eps) {
  parallel_blocks(num_rows, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * stride;
      const Moments m = moments_of(from, width, Norm(norm), eps);
      inverses[row] = m.inverse;
      for_vectors(width, [&](int64_t c, int count) {
        store_some(out + row * width + c, (load_some(from + c, count) - m.mean) * m.inverse, count);
      });
    }
  });
  return kOk;
}

// grad [T, width]: gradient of norm(x) -> gradient of x, in place; `normed` is norm(x).
TURBOGR_KERNEL(normalize_backward)
(float* grad, const float* normed, const float* inverses, int64_t num_rows, int64_t width, int64_t norm) {
  parallel_blocks(num_rows, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* y = normed + row * width;
      through_norm(grad + row * width, width, Norm(norm), inverses[row],
                   [&](int64_t c, int count) { return load_some(y + c, count); });
    }
  });
  return kOk;
}

// The columns of x [T, width] dealt out to pieces [T, widths[i]], through SiLU if wanted.
TURBOGR_KERNEL(activate)
(const float* x, float* const* outs, const int64_t* widths, int64_t num_pieces, int64_t num_rows, int64_t width,
 int64_t silu) {
  const Pieces<float*> pieces{outs, widths, widths, num_pieces};
  parallel_blocks(num_rows, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    float* const out = take_scratch<RowScratch>(width).row;
    for (int64_t at = begin; at < end; ++at) {
      const float* row = x + at * width;
      if (silu) {
        for_vectors(width, [&](int64_t c, int count) {
          const vf v = load_some(row + c, count);
          store(out + c, v * sigmoid(v));
        });
      }
      scatter_row(silu ? out : row, at, pieces);
    }
  });
  return kOk;
}

// out [T, width] = gradient of `activate`'s x from those of its pieces, each with a stride of its own; a null piece
// counts as zeros.
TURBOGR_KERNEL(activate_backward)
(const float* x, const float* const* grads, const int64_t* strides, const int64_t* widths, int64_t num_pieces,
 float* out, int64_t num_rows, int64_t width, int64_t silu) {
  const Pieces<const float*> pieces{grads, strides, widths, num_pieces};
  parallel_blocks(num_rows, rows_per_block(3 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const float* before = x + at * width;
      float* row = out + at * width;
      gather_row(pieces, at, row);
      if (!silu) continue;
      for_vectors(width, [&](int64_t c, int count) {
        const vf v = load_some(before + c, count), s = sigmoid(v);
        store_some(row + c, load_some(row + c, count) * (s + v * s * (1.0f - s)), count);
      });
    }
  });
  return kOk;
}

// out [T, width] = dropout(gate * norm(x)).
TURBOGR_KERNEL(gate)
(const float* x, const float* gate, const int64_t* keys, float* out, float* moments, int64_t num_rows, int64_t width,
 int64_t x_stride, int64_t gate_stride, int64_t norm, float eps, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  parallel_blocks(num_rows, rows_per_block(3 * width * 4), [&](int64_t begin, int64_t end) {
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * x_stride;
      const float* by = gate + row * gate_stride;
      const Moments m = moments_of(from, width, Norm(norm), eps);
      moments[2 * row] = m.mean;
      moments[2 * row + 1] = m.inverse;
      dropout.start_row(keys, row);
      for_vectors(width, [&](int64_t c, int count) {
        const vf normed = (load_some(from + c, count) - m.mean) * m.inverse;
        store_some(out + row * width + c, load_some(by + c, count) * normed * dropout.factors(c), count);
      });
    }
  });
  return kOk;
}

// `grad` [T, width] is the gradient of the gate kernel's output and becomes that output again, for the gradient of the
// weight; grad_x and grad_gate [T, width] receive the gradients of x and of the gate.
TURBOGR_KERNEL(gate_backward)
(float* grad, const float* x, const float* gate, const int64_t* keys, const float* moments, float* grad_x,
 float* grad_gate, int64_t num_rows, int64_t width, int64_t x_stride, int64_t gate_stride, int64_t norm, uint64_t seed,
 int64_t threshold, float dropout_scale) {
  parallel_blocks(num_rows, rows_per_block(5 * width * 4), [&](int64_t begin, int64_t end) {
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t row = begin; row < end; ++row) {
      const float* from = x + row * x_stride;
      const float* by = gate + row * gate_stride;
      const Moments m{moments[2 * row], moments[2 * row + 1]};
      const auto normed = [&](int64_t c, int count) { return (load_some(from + c, count) - m.mean) * m.inverse; };
      float* g_row = grad + row * width;
      float* to_x = grad_x + row * width;
      float* to_gate = grad_gate + row * width;
      dropout.start_row(keys, row);
      for_vectors(width, [&](int64_t c, int count) {
        const vf factors = dropout.factors(c), y = normed(c, count), b = load_some(by + c, count);
        const vf g = load_some(g_row + c, count) * factors;
        store_some(to_gate + c, g * y, count);
        store_some(to_x + c, g * b, count);
        store_some(g_row + c, b * y * factors, count);
      });
      through_norm(to_x, width, Norm(norm), m.inverse, normed);
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
