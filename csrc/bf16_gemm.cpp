// out = start + A B with the factors rounded to bf16 and sums in fp32, on the processor's unit for bf16, for matrices
// of any strides whose numbers are fp32 or bf16.
//
// The depth is cut into stretches. Of each, B is packed once into panels of 32 columns, and A either at once too or, if
// there are many rows, block by block by the task that multiplies it. Every element is summed in an order that depends
// on the depth alone, so nothing depends on the number of threads.

//
// bf16_linear is such a product with all that a projection does after it, for every number of the result while it is
// still in cache: bias, residual, SiLU, the pieces of the result.

#include "bf16_tiles.h"
#include "row_norm.h"

namespace turbogr {
namespace TURBOGR_ISA {
#if TURBOGR_HAS_BF16_TILES
namespace {

// Depth that is multiplied at once, so that a panel of B and the rows of A stay in the first-level cache.
constexpr int64_t kDepth = 512;
constexpr int64_t kStretch = 2 * kDepth;
constexpr int64_t kBlockColumns = 256;

// A matrix of numbers of one of two types; `data` is that of element (0, 0).
struct AnyMatrix {
  const void* data;
  bool narrow;
  int64_t row_stride, column_stride;

  template <class Body>
  void visit(int64_t row, int64_t column, Body&& body) const {
    const int64_t at = row * row_stride + column * column_stride;
    if (narrow) {
      body(static_cast<const Bf16*>(data) + at);
    } else {
      body(static_cast<const float*>(data) + at);
    }
  }
};

// Rows [m, m + rows) and depth [k, k + depth) of A, as rows of `ld` numbers.
void pack_left(const AnyMatrix& a, int64_t m, int64_t rows, int64_t k, int64_t depth, Bf16* to, int64_t ld) {
  const int64_t rows_out = round_up(rows, kBf16Side), depth_out = round_up(depth, kBf16Depth);
  a.visit(m, k, [&](const auto* from) {
    if (a.column_stride == 1) {
      pack_bf16_rows(from, a.row_stride, rows, depth, to, ld, rows_out, depth_out);
    } else {
      pack_bf16_rows_transposed(from, a.column_stride, depth, rows, to, ld, rows_out, depth_out);
    }
  });
}

// Depth [k, k + depth) of the columns [n, n + columns) of B, at most a panel.
void pack_right(const AnyMatrix& b, int64_t k, int64_t depth, int64_t n, int64_t columns, Bf16* to) {
  const int64_t depth_out = round_up(depth, kBf16Depth);
  b.visit(k, n, [&](const auto* from) {
    if (b.column_stride == 1) {
      pack_bf16_pairs(from, b.row_stride, depth, columns, to, kPairStride, depth_out, kBf16Side);
    } else {
      pack_bf16_pairs_transposed(from, b.column_stride, depth, columns, to, kPairStride, depth_out, kBf16Side);
    }
  });
}

struct BlockScratch {
  Bf16* left;
  float* sums;
  void layout(Arena& arena, int64_t rows, int64_t left_stride) {
    left = arena.take<Bf16>(rows * left_stride);
    sums = arena.take<float>(rows * kBlockColumns);
  }
};

// What a block's sums become: out [row ...][column ...] = start + sums, for one row.
struct Target {
  const void* start;
  void* out;
  bool start_narrow, out_narrow;
  int64_t start_stride, out_stride;

  void finish_row(const float* sums, int64_t row, int64_t column, int64_t columns, bool more) const {
    const int64_t from = row * start_stride + column, to = row * out_stride + column;
    const float* const before = static_cast<const float*>(out) + to;
    for_vectors(columns, [&](int64_t c, int count) {
      vf v = load(sums + c);
      if (more) {
        v += load_some(before + c, count);
      } else if (start != nullptr) {
        v += start_narrow ? load_some(static_cast<const Bf16*>(start) + from + c, count)
                          : load_some(static_cast<const float*>(start) + from + c, count);
      }
      if (out_narrow) {
        store_some(static_cast<Bf16*>(out) + to + c, v, count);
      } else {
        store_some(static_cast<float*>(out) + to + c, v, count);
      }
    });
  }
};

// finish(sums, row, column, columns, more) gets the sums of a row of a block, which it may overwrite; with `more` they
// are to be added to those of the depth before. `stretch` is the depth whose sums it gets at once, a multiple of
// kBf16Depth.
template <class Finish>
int multiply_matrices(const AnyMatrix& left, const AnyMatrix& right, int64_t rows, int64_t columns, int64_t depth,
                      int64_t stretch, Finish&& finish) {
  const Bf16Unit unit = bf16_unit_here();
  const bool tall = rows > 2 * columns;  // else A is packed with B
  const int64_t block_rows = tall && stretch <= 1024 ? 256 : 128;
  const int64_t left_stride = stretch + kBf16Depth;  // an odd number of cache lines, if stretch is a power of two
  const int64_t num_panels = ceil_div(columns, kBf16Side), panel = stretch * kBf16Side;
  Buffer<Bf16> panels(num_panels * panel);
  Buffer<Bf16> packed_left(tall ? 0 : round_up(rows, kBf16Side) * left_stride);
  if (!panels || !packed_left) return kOutOfMemory;
  const int64_t block_columns = tall ? round_up(columns, kBf16Side) : kBlockColumns;
  const int64_t row_blocks = ceil_div(rows, block_rows), column_blocks = ceil_div(columns, block_columns);
  for (int64_t from = 0; from < depth; from += stretch) {
    const int64_t here = min_of(stretch, depth - from);
    const int64_t left_groups = tall ? 0 : ceil_div(rows, kBf16Side);
    parallel_tasks(num_panels + left_groups, [&](int64_t i) {
      if (i < num_panels) {
        pack_right(right, from, here, i * kBf16Side, min_of(kBf16Side, columns - i * kBf16Side), &panels[i * panel]);
      } else {
        const int64_t m = (i - num_panels) * kBf16Side;
        pack_left(left, m, min_of(kBf16Side, rows - m), from, here, &packed_left[m * left_stride], left_stride);
      }
    });
    parallel_tasks(row_blocks * column_blocks, [&](int64_t task) {
      const int64_t m0 = task / column_blocks * block_rows, n0 = task % column_blocks * block_columns;
      const int64_t count = min_of(block_rows, rows - m0);
      const BlockScratch scratch = take_scratch<BlockScratch>(block_rows, tall ? left_stride : 0);
      if (tall) pack_left(left, m0, count, from, here, scratch.left, left_stride);
      const Bf16* const block = tall ? scratch.left : &packed_left[m0 * left_stride];
      const TileUse tiles(unit);
      const int64_t last = min_of(columns, n0 + block_columns);
      for (int64_t n1 = n0; n1 < last; n1 += kBlockColumns) {
        const int64_t width = min_of(kBlockColumns, last - n1);
        for (int64_t k = 0; k < here; k += kDepth) {
          const int64_t deep = round_up(min_of(kDepth, here - k), kBf16Depth);
          for (int64_t n = 0; n < width; n += kBf16Side) {
            const Bf16* const b_panel = &panels[(n1 + n) / kBf16Side * panel + k / 2 * kPairStride];
            for (int64_t m = 0; m < count; m += kBf16Side) {
              multiply_bf16(unit, deep, block + m * left_stride + k, left_stride, b_panel, kPairStride,
                            scratch.sums + m * kBlockColumns + n, kBlockColumns, k > 0);
            }
          }
        }
        for (int64_t m = 0; m < count; ++m) finish(scratch.sums + m * kBlockColumns, m0 + m, n1, width, from > 0);
      }
    });
  }
  return kOk;
}

}  // namespace

// A [rows, depth], B [depth, columns], out [rows, columns] with contiguous rows; `_narrow` says which are bf16. Of A
// and B one stride is 1. `start` may be null, for zeros; its rows are contiguous, and with a stride of 0 all rows are
// the same. Depth is at least 1.
TURBOGR_KERNEL(bf16_gemm)
(const void* a, const void* b, const void* start, void* out, int64_t rows, int64_t columns, int64_t depth,
 int64_t a_row_stride, int64_t a_column_stride, int64_t b_row_stride, int64_t b_column_stride, int64_t start_stride,
 int64_t out_stride, int64_t a_narrow, int64_t b_narrow, int64_t start_narrow, int64_t out_narrow) {
  const AnyMatrix left{a, a_narrow != 0, a_row_stride, a_column_stride};
  const AnyMatrix right{b, b_narrow != 0, b_row_stride, b_column_stride};
  const Target target{start, out, start_narrow != 0, out_narrow != 0, start_stride, out_stride};
  // Sums of several stretches are added up in `out`, which then must be fp32.
  const int64_t whole = round_up(depth, kBf16Depth);
  return multiply_matrices(left, right, rows, columns, depth, out_narrow ? whole : min_of(kStretch, whole),
                           [&](const float* sums, int64_t row, int64_t column, int64_t width, bool more) {
                             target.finish_row(sums, row, column, width, more);
                           });
}

// Pieces [rows, widths[i]] of activation(x W + bias + residual), all but W [width, columns] and bias in bf16. `bias`
// and `residual` [rows, columns] may be null, and so may `before` [rows, columns], which receives what SiLU is taken
// of. Width is at least 1; of W one stride is 1.
TURBOGR_KERNEL(bf16_linear)
(const void* x, const float* weight, const float* bias, const void* residual, void* before, void* const* outs,
 const int64_t* widths, int64_t num_pieces, int64_t num_rows, int64_t width, int64_t columns, int64_t x_stride,
 int64_t weight_row_stride, int64_t weight_column_stride, int64_t residual_stride, int64_t silu) {
  const AnyMatrix left{x, true, x_stride, 1}, right{weight, false, weight_row_stride, weight_column_stride};
  const Pieces<Bf16*> pieces{reinterpret_cast<Bf16* const*>(outs), widths, widths, num_pieces};
  const Bf16* const added = static_cast<const Bf16*>(residual);
  Bf16* const kept = static_cast<Bf16*>(before);
  return multiply_matrices(left, right, num_rows, columns, width, round_up(width, kBf16Depth),
                           [&](float* sums, int64_t row, int64_t column, int64_t count, bool) {
                             for_vectors(count, [&](int64_t c, int some) {
                               vf v = load(sums + c);
                               if (bias != nullptr) v += load_some(bias + column + c, some);
                               if (added != nullptr) v += load_some(added + row * residual_stride + column + c, some);
                               if (silu) {
                                 if (kept != nullptr) store_some(kept + row * columns + column + c, v, some);
                                 v = v * sigmoid(v);
                               }
                               store(sums + c, v);
                             });
                             scatter_columns(sums, row, column, count, pieces);
                           });
}
#endif

}  // namespace TURBOGR_ISA
}  // namespace turbogr
