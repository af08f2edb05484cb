// The passes around the two projections of a block with weights too large for norm_linear.cpp and gated_linear.cpp:
// everything between PyTorch's GEMMs in one pass over each row.
//
// norm_linear:  y = activation(norm(x) W + b).      normalize -> GEMM -> activate;
//               backward: activate_backward -> GEMMs -> normalize_backward.
// gated_linear: y = residual + dropout(gate * norm(x)) W + b.   gate -> GEMM; backward: GEMM -> gate_backward -> GEMM.
//
// Of each row, a norm stores the mean (0 for RMSNorm) and the inverse deviation. Rows of x and gate may be strided.
//
// The kernels whose names end in `_bf16` read and write activations in bf16, around products in bf16 (bf16_gemm.cpp,
// which does what `activate` does here). `void` pointers are to bf16.

#include "row_norm.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// A row is computed in one buffer and then copied to its pieces, so that only its end is shorter than a vector.
struct RowScratch {
  float* row;
  void layout(Arena& arena, int64_t width) { row = arena.take<float>(round_up(width, kLanes)); }
};

inline void narrow_row(const float* row, int64_t width, Bf16* to) {
  for_vectors(width, [&](int64_t c, int count) { store_some(to + c, load_some(row + c, count), count); });
}

template <class Number>
void normalize_rows(const Number* x, Number* out, float* inverses, int64_t num_rows, int64_t width, int64_t stride,
                    Norm norm, float eps) {
  parallel_blocks(num_rows, rows_per_block(2 * width * int64_t(sizeof(Number))), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Number* from = x + row * stride;
      const Moments m = moments_of(from, width, norm, eps);
      inverses[row] = m.inverse;
      for_vectors(width, [&](int64_t c, int count) {
        store_some(out + row * width + c, (load_some(from + c, count) - m.mean) * m.inverse, count);
      });
    }
  });
}

template <class Number>
void gate_rows(const Number* x, const Number* gate, const int64_t* keys, Number* out, float* moments, int64_t num_rows,
               int64_t width, int64_t x_stride, int64_t gate_stride, Norm norm, float eps, const RowDropout& factors) {
  parallel_blocks(num_rows, rows_per_block(3 * width * int64_t(sizeof(Number))), [&](int64_t begin, int64_t end) {
    RowDropout dropout = factors;
    for (int64_t row = begin; row < end; ++row) {
      const Moments m = moments_of(x + row * x_stride, width, norm, eps);
      moments[2 * row] = m.mean;
      moments[2 * row + 1] = m.inverse;
      dropout.start_row(keys, row);
      gate_row(x + row * x_stride, gate + row * gate_stride, m, dropout, width, out + row * width);
    }
  });
}

}  // namespace

// out [T, width] = norm(x), inverses [T] its inverse deviations.
TURBOGR_KERNEL(normalize)
(const float* x, float* out, float* inverses, int64_t num_rows, int64_t width, int64_t stride, int64_t norm,
 float eps) {
  normalize_rows(x, out, inverses, num_rows, width, stride, Norm(norm), eps);
  return kOk;
}

TURBOGR_KERNEL(normalize_bf16)
(const void* x, void* out, float* inverses, int64_t num_rows, int64_t width, int64_t stride, int64_t norm, float eps) {
  normalize_rows(static_cast<const Bf16*>(x), static_cast<Bf16*>(out), inverses, num_rows, width, stride, Norm(norm),
                 eps);
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

// The same from a gradient in fp32, which is overwritten, to one in bf16.
TURBOGR_KERNEL(normalize_backward_bf16)
(float* grad, const void* normed, const float* inverses, void* out, int64_t num_rows, int64_t width, int64_t norm) {
  parallel_blocks(num_rows, rows_per_block(2 * width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Bf16* y = static_cast<const Bf16*>(normed) + row * width;
      through_norm(grad + row * width, width, Norm(norm), inverses[row],
                   [&](int64_t c, int count) { return load_some(y + c, count); });
      narrow_row(grad + row * width, width, static_cast<Bf16*>(out) + row * width);
    }
  });
  return kOk;
}

// The columns of x [T, width] split into pieces [T, widths[i]], through SiLU if wanted.
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
      float* row = out + at * width;
      gather_row(pieces, at, row);
      if (silu) through_silu(x + at * width, width, row);
    }
  });
  return kOk;
}

// The same in bf16.
TURBOGR_KERNEL(activate_backward_bf16)
(const void* x, const void* const* grads, const int64_t* strides, const int64_t* widths, int64_t num_pieces, void* out,
 int64_t num_rows, int64_t width, int64_t silu) {
  const Pieces<const Bf16*> pieces{reinterpret_cast<const Bf16* const*>(grads), strides, widths, num_pieces};
  parallel_blocks(num_rows, rows_per_block(3 * width * 2), [&](int64_t begin, int64_t end) {
    float* const row = take_scratch<RowScratch>(width).row;
    for (int64_t at = begin; at < end; ++at) {
      gather_row(pieces, at, row);
      if (silu) through_silu(static_cast<const Bf16*>(x) + at * width, width, row);
      narrow_row(row, width, static_cast<Bf16*>(out) + at * width);
    }
  });
  return kOk;
}

// out [T, width] = dropout(gate * norm(x)).
TURBOGR_KERNEL(gate)
(const float* x, const float* gate, const int64_t* keys, float* out, float* moments, int64_t num_rows, int64_t width,
 int64_t x_stride, int64_t gate_stride, int64_t norm, float eps, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  gate_rows(x, gate, keys, out, moments, num_rows, width, x_stride, gate_stride, Norm(norm), eps,
            RowDropout(seed, threshold, dropout_scale));
  return kOk;
}

TURBOGR_KERNEL(gate_bf16)
(const void* x, const void* gate, const int64_t* keys, void* out, float* moments, int64_t num_rows, int64_t width,
 int64_t x_stride, int64_t gate_stride, int64_t norm, float eps, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  gate_rows(static_cast<const Bf16*>(x), static_cast<const Bf16*>(gate), keys, static_cast<Bf16*>(out), moments,
            num_rows, width, x_stride, gate_stride, Norm(norm), eps, RowDropout(seed, threshold, dropout_scale));
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
      dropout.start_row(keys, row);
      gate_row_backward(grad + row * width, x + row * x_stride, gate + row * gate_stride,
                        Moments{moments[2 * row], moments[2 * row + 1]}, Norm(norm), dropout, width,
                        grad_x + row * width, grad_gate + row * width);
    }
  });
  return kOk;
}

// The same in bf16, in which the gradient of the gate kernel's output comes too.
TURBOGR_KERNEL(gate_backward_bf16)
(void* grad, const void* x, const void* gate, const int64_t* keys, const float* moments, void* grad_x, void* grad_gate,
 int64_t num_rows, int64_t width, int64_t x_stride, int64_t gate_stride, int64_t norm, uint64_t seed, int64_t threshold,
 float dropout_scale) {
  parallel_blocks(num_rows, rows_per_block(5 * width * 2), [&](int64_t begin, int64_t end) {
    RowDropout dropout(seed, threshold, dropout_scale);
    float* const of_x = take_scratch<RowScratch>(width).row;
    for (int64_t row = begin; row < end; ++row) {
      dropout.start_row(keys, row);
      gate_row_backward(static_cast<Bf16*>(grad) + row * width, static_cast<const Bf16*>(x) + row * x_stride,
                        static_cast<const Bf16*>(gate) + row * gate_stride,
                        Moments{moments[2 * row], moments[2 * row + 1]}, Norm(norm), dropout, width, of_x,
                        static_cast<Bf16*>(grad_gate) + row * width);
      narrow_row(of_x, width, static_cast<Bf16*>(grad_x) + row * width);
    }
  });
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
