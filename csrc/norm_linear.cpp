// norm_linear for a weight that stays in cache: y = activation(norm(x) W + b), block by block of rows.
//
// Nothing but the product before SiLU goes through memory besides the operands: the backward computes the norm again.

#include "panel_gemm.h"
#include "row_norm.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

struct BackwardScratch {
  float *left, *grad, *grad_left;
  void layout(Arena& arena, int64_t width, int64_t columns) {
    left = take_rows(arena, width);
    grad = take_rows(arena, columns);
    grad_left = take_rows(arena, width);
  }
};

// to[row] = norm(x[row]).
inline Moments normalize_row(const float* x, int64_t width, Norm norm, float eps, float* to) {
  const Moments m = moments_of(x, width, norm, eps);
  for_vectors(width, [&](int64_t c, int count) { store(to + c, (load_some(x + c, count) - m.mean) * m.inverse); });
  return m;
}

}  // namespace

// x [T, width], weight [width, columns]; `bias` may be null, and so may `before` [T, columns], which receives the
// product if SiLU follows.
TURBOGR_KERNEL(norm_linear)
(const float* x, const float* weight, const float* bias, float* before, float* const* outs, const int64_t* widths,
 int64_t num_pieces, int64_t num_rows, int64_t width, int64_t columns, int64_t stride, int64_t norm, float eps,
 int64_t silu) {
  const Pieces<float*> pieces{outs, widths, widths, num_pieces};
  const Panels panels(weight, width, columns, columns, 1);
  if (!panels) return kOutOfMemory;
  parallel_blocks(num_rows, kPanelRows, [&](int64_t begin, int64_t end) {
    const ForwardScratch scratch = take_scratch<ForwardScratch>(width, columns);
    for (int64_t at = begin; at < end; ++at) {
      normalize_row(x + at * stride, width, Norm(norm), eps, scratch.left + (at - begin) * scratch_stride(width));
    }
    panels.multiply(scratch.left, end - begin, scratch.product);
    for (int64_t at = begin; at < end; ++at) {
      float* const row = scratch.product + (at - begin) * scratch_stride(columns);
      if (bias != nullptr || silu) {
        for_vectors(columns, [&](int64_t c, int count) {
          vf v = load(row + c);
          if (bias != nullptr) v += load_some(bias + c, count);
          if (silu) {
            store_some(before + at * columns + c, v, count);
            v = v * sigmoid(v);
          }
          store(row + c, v);
        });
      }
      scatter_row(row, at, pieces);
    }
  });
  return kOk;
}

// From the gradients of the pieces, each with a stride of its own and a null one zeros: grad_x [T, width], grad_weight
// and, unless it is null, grad_bias.
TURBOGR_KERNEL(norm_linear_backward)
(const float* const* grads, const int64_t* strides, const int64_t* widths, int64_t num_pieces, const float* x,
 const float* weight, const float* before, float* grad_x, float* grad_weight, float* grad_bias, int64_t num_rows,
 int64_t width, int64_t columns, int64_t stride, int64_t norm, float eps, int64_t silu) {
  const Pieces<const float*> pieces{grads, strides, widths, num_pieces};
  const Panels panels(weight, columns, width, 1, columns);
  WeightGradient of_weight(num_rows, width, columns);
  if (!panels || !of_weight) return kOutOfMemory;
  of_weight.for_blocks([&](int64_t begin, int64_t end) {
    const BackwardScratch scratch = take_scratch<BackwardScratch>(width, columns);
    float inverses[kPanelRows];
    for (int64_t at = begin; at < end; ++at) {
      const int64_t i = at - begin;
      inverses[i] =
          normalize_row(x + at * stride, width, Norm(norm), eps, scratch.left + i * scratch_stride(width)).inverse;
      float* const row = scratch.grad + i * scratch_stride(columns);
      gather_row(pieces, at, row);
      if (silu) through_silu(before + at * columns, columns, row);
    }
    panels.multiply(scratch.grad, end - begin, scratch.grad_left);
    for (int64_t at = begin; at < end; ++at) {
      const float* const normed = scratch.left + (at - begin) * scratch_stride(width);
      float* const row = scratch.grad_left + (at - begin) * scratch_stride(width);
      through_norm(row, width, Norm(norm), inverses[at - begin],
                   [&](int64_t c, int count) { return load_some(normed + c, count); });
      std::memcpy(grad_x + at * width, row, static_cast<size_t>(width) * sizeof(float));
    }
    of_weight.add(begin, end, scratch.left, scratch.grad);
  });
  of_weight.finish(grad_weight, grad_bias);
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
