// gated_mlp for weights that stay in cache: y = x + (SiLU(n Wg) * n Wu) Wd with n = dropout(norm(x)), block by block of
// rows.
//
// Only x, y and their gradients go through memory: the backward computes all that lies between again.

#include "panel_gemm.h"
#include "row_norm.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

struct MlpScratch {
  float *left, *gate, *up, *hidden, *product;
  void layout(Arena& arena, int64_t width, int64_t hidden_width) {
    left = take_rows(arena, width);
    gate = take_rows(arena, hidden_width);
    up = take_rows(arena, hidden_width);
    hidden = take_rows(arena, hidden_width);
    product = take_rows(arena, width);
  }
};

struct MlpBackwardScratch {
  MlpScratch forward;
  float *grad, *other;
  void layout(Arena& arena, int64_t width, int64_t hidden_width) {
    forward.layout(arena, width, hidden_width);
    grad = take_rows(arena, width);
    other = take_rows(arena, width);
  }
};

// to[row] = dropout(norm(x[row])).
inline Moments drop_row(const float* x, int64_t width, Norm norm, float eps, const RowDropout& dropout, float* to) {
  const Moments m = moments_of(x, width, norm, eps);
  for_vectors(width, [&](int64_t c, int count) {
    store_some(to + c, (load_some(x + c, count) - m.mean) * m.inverse * dropout.factors(c), count);
  });
  return m;
}

}  // namespace

// x and out [T, width], gate and up weights [width, hidden], down weight [hidden, width].
TURBOGR_KERNEL(gated_mlp)
(const float* x, const float* gate_weight, const float* up_weight, const float* down_weight, const int64_t* keys,
 float* out, int64_t num_rows, int64_t width, int64_t hidden, int64_t stride, int64_t norm, float eps, uint64_t seed,
 int64_t threshold, float dropout_scale) {
  const Panels to_gate(gate_weight, width, hidden, hidden, 1), to_up(up_weight, width, hidden, hidden, 1);
  const Panels down(down_weight, hidden, width, width, 1);
  if (!to_gate || !to_up || !down) return kOutOfMemory;
  parallel_blocks(num_rows, kPanelRows, [&](int64_t begin, int64_t end) {
    const MlpScratch scratch = take_scratch<MlpScratch>(width, hidden);
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t at = begin; at < end; ++at) {
      dropout.start_row(keys, at);
      drop_row(x + at * stride, width, Norm(norm), eps, dropout, scratch.left + (at - begin) * scratch_stride(width));
    }
    to_gate.multiply(scratch.left, end - begin, scratch.gate);
    to_up.multiply(scratch.left, end - begin, scratch.up);
    for (int64_t i = 0; i < end - begin; ++i) {
      const int64_t row = i * scratch_stride(hidden);
      for_vectors(hidden, [&](int64_t c, int count) {
        const vf v = load(scratch.gate + row + c);
        store_some(scratch.hidden + row + c, v * sigmoid(v) * load(scratch.up + row + c), count);
      });
    }
    down.multiply(scratch.hidden, end - begin, scratch.product);
    for (int64_t at = begin; at < end; ++at) {
      const float* const row = scratch.product + (at - begin) * scratch_stride(width);
      for_vectors(width, [&](int64_t c, int count) {
        store_some(out + at * width + c, load(row + c) + load_some(x + at * stride + c, count), count);
      });
    }
  });
  return kOk;
}

// From grad [T, width]: grad_x [T, width] and the gradients of the three weights.
TURBOGR_KERNEL(gated_mlp_backward)
(const float* grad, const float* x, const float* gate_weight, const float* up_weight, const float* down_weight,
 const int64_t* keys, float* grad_x, float* grad_gate_weight, float* grad_up_weight, float* grad_down_weight,
 int64_t num_rows, int64_t width, int64_t hidden, int64_t grad_stride, int64_t stride, int64_t norm, float eps,
 uint64_t seed, int64_t threshold, float dropout_scale) {
  const Panels to_gate(gate_weight, width, hidden, hidden, 1), to_up(up_weight, width, hidden, hidden, 1);
  const Panels from_gate(gate_weight, hidden, width, 1, hidden), from_up(up_weight, hidden, width, 1, hidden);
  const Panels from_out(down_weight, width, hidden, 1, width);
  WeightGradient of_gate(num_rows, width, hidden), of_up(num_rows, width, hidden), of_down(num_rows, hidden, width);
  if (!to_gate || !to_up || !from_gate || !from_up || !from_out || !of_gate || !of_up || !of_down) return kOutOfMemory;
  // Chunks of rows follow from their number alone, so the blocks of one gradient are those of all three.
  of_gate.for_blocks([&](int64_t begin, int64_t end) {
    const MlpBackwardScratch scratch = take_scratch<MlpBackwardScratch>(width, hidden);
    const MlpScratch& s = scratch.forward;
    const int64_t rows = end - begin, wide = scratch_stride(width), deep = scratch_stride(hidden);
    RowDropout dropout(seed, threshold, dropout_scale);
    Moments moments[kPanelRows];
    for (int64_t at = begin; at < end; ++at) {
      const int64_t i = at - begin;
      dropout.start_row(keys, at);
      moments[i] = drop_row(x + at * stride, width, Norm(norm), eps, dropout, s.left + i * wide);
      std::memcpy(scratch.grad + i * wide, grad + at * grad_stride, static_cast<size_t>(width) * sizeof(float));
    }
    to_gate.multiply(s.left, rows, s.gate);
    to_up.multiply(s.left, rows, s.up);
    from_out.multiply(scratch.grad, rows, s.hidden);
    for (int64_t i = 0; i < rows; ++i) {
      float *const gate = s.gate + i * deep, *const up = s.up + i * deep, *const inner = s.hidden + i * deep;
      for_vectors(hidden, [&](int64_t c, int count) {
        const vf v = load(gate + c), b = load(up + c), g = load(inner + c);
        const vf sigma = sigmoid(v), act = v * sigma;
        store_some(gate + c, g * b * (sigma + act * (1.0f - sigma)), count);
        store_some(up + c, g * act, count);
        store_some(inner + c, act * b, count);
      });
    }
    of_down.add(begin, end, s.hidden, scratch.grad);
    of_gate.add(begin, end, s.left, s.gate);
    of_up.add(begin, end, s.left, s.up);
    from_gate.multiply(s.gate, rows, s.product);
    from_up.multiply(s.up, rows, scratch.other);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t i = at - begin;
      const float* const from = x + at * stride;
      const Moments m = moments[i];
      float *const row = s.product + i * wide, *const by_up = scratch.other + i * wide;
      dropout.start_row(keys, at);
      for_vectors(width, [&](int64_t c, int count) {
        store_some(row + c, (load(row + c) + load(by_up + c)) * dropout.factors(c), count);
      });
      through_norm(row, width, Norm(norm), m.inverse,
                   [&](int64_t c, int count) { return (load_some(from + c, count) - m.mean) * m.inverse; });
      for_vectors(width, [&](int64_t c, int count) {
        store_some(grad_x + at * width + c, load(row + c) + load(scratch.grad + i * wide + c), count);
      });
    }
  });
  of_gate.finish(grad_gate_weight, nullptr);
  of_up.finish(grad_up_weight, nullptr);
  of_down.finish(grad_down_weight, nullptr);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
