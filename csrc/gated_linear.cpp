// gated_linear for a weight that stays in cache: y = residual + dropout(gate * norm(x)) W + b, block by block of rows.

#include "panel_gemm.h"
#include "row_norm.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

struct BackwardScratch {
  float *left, *grad;
  void layout(Arena& arena, int64_t width, int64_t columns) {
    left = take_rows(arena, width);
    grad = take_rows(arena, columns);
  }
};

}  // namespace

// x and gate [T, width], residual and out [T, columns], weight [width, columns]; `bias` may be null. Moments [T, 2] are
// for the backward.
TURBOGR_KERNEL(gated_linear)
(const float* x, const float* gate, const float* residual, const float* weight, const float* bias, const int64_t* keys,
 float* out, float* moments, int64_t num_rows, int64_t width, int64_t columns, int64_t x_stride, int64_t gate_stride,
 int64_t residual_stride, int64_t norm, float eps, uint64_t seed, int64_t threshold, float dropout_scale) {
  const Panels panels(weight, width, columns, columns, 1);
  if (!panels) return kOutOfMemory;
  parallel_blocks(num_rows, kPanelRows, [&](int64_t begin, int64_t end) {
    const ForwardScratch scratch = take_scratch<ForwardScratch>(width, columns);
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t at = begin; at < end; ++at) {
      const Moments m = moments_of(x + at * x_stride, width, Norm(norm), eps);
      moments[2 * at] = m.mean;
      moments[2 * at + 1] = m.inverse;
      dropout.start_row(keys, at);
      gate_row(x + at * x_stride, gate + at * gate_stride, m, dropout, width,
               scratch.left + (at - begin) * scratch_stride(width));
    }
    panels.multiply(scratch.left, end - begin, scratch.product);
    for (int64_t at = begin; at < end; ++at) {
      const float* const row = scratch.product + (at - begin) * scratch_stride(columns);
      for_vectors(columns, [&](int64_t c, int count) {
        vf v = load(row + c) + load_some(residual + at * residual_stride + c, count);
        if (bias != nullptr) v += load_some(bias + c, count);
        store_some(out + at * columns + c, v, count);
      });
    }
  });
  return kOk;
}

// From grad [T, columns]: grad_x and grad_gate [T, width], grad_weight and grad_bias.
TURBOGR_KERNEL(gated_linear_backward)
(const float* grad, const float* x, const float* gate, const float* weight, const int64_t* keys, const float* moments,
 float* grad_x, float* grad_gate, float* grad_weight, float* grad_bias, int64_t num_rows, int64_t width,
 int64_t columns, int64_t grad_stride, int64_t x_stride, int64_t gate_stride, int64_t norm, uint64_t seed,
 int64_t threshold, float dropout_scale) {
  const Panels panels(weight, columns, width, 1, columns);
  WeightGradient of_weight(num_rows, width, columns);
  if (!panels || !of_weight) return kOutOfMemory;
  of_weight.for_blocks([&](int64_t begin, int64_t end) {
    const BackwardScratch scratch = take_scratch<BackwardScratch>(width, columns);
    RowDropout dropout(seed, threshold, dropout_scale);
    for (int64_t at = begin; at < end; ++at) {
      std::memcpy(scratch.grad + (at - begin) * scratch_stride(columns), grad + at * grad_stride,
                  static_cast<size_t>(columns) * sizeof(float));
    }
    panels.multiply(scratch.grad, end - begin, scratch.left);
    for (int64_t at = begin; at < end; ++at) {
      dropout.start_row(keys, at);
      gate_row_backward(scratch.left + (at - begin) * scratch_stride(width), x + at * x_stride, gate + at * gate_stride,
                        Moments{moments[2 * at], moments[2 * at + 1]}, Norm(norm), dropout, width, grad_x + at * width,
                        grad_gate + at * width);
    }
    of_weight.add(begin, end, scratch.left, scratch.grad);
  });
  of_weight.finish(grad_weight, grad_bias);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
