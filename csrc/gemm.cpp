// out = start + A B for matrices that are larger than the caches, of any strides.
//
// The depth is cut into stretches. Of each, B is packed once into panels as wide as a micro-tile, and then blocks of
// `out` take the sum over it, packing their part of A. A block of B stays in the second-level cache, twelve rows of A
// in the first. Every element is summed in an order that depends on the depth alone, so nothing depends on the number
// of threads, nor on how many other rows and columns there are.

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {
namespace {

// Depth that is summed in registers before it is added to `out`.
constexpr int64_t kDepth = 256;
// Depth of B that is packed at once.
constexpr int64_t kStretch = 4 * kDepth;
constexpr int64_t kBlockRows = 8 * kTileRows, kBlockColumns = 8 * kTileColumns;
// Floats between rows of A where it is packed by rows: an odd number of cache lines, as in panel_gemm.h.
constexpr int64_t kRowStride = kDepth + 16;

struct Matrix {
  const float* data;
  int64_t row_stride, column_stride;
  const float* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
  bool by_columns() const { return row_stride == 1 && column_stride != 1; }
};

struct GemmScratch {
  float *left, *tile;
  void layout(Arena& arena) {
    left = arena.take<float>(kBlockRows * kRowStride);
    tile = arena.take<float>(kTileRows * kTileColumns);
  }
};

// Writes rows [0, depth) of `count` columns of B from (k, n) on to to[depth][kTileColumns], zeros in other columns.
void pack_panel(const Matrix& b, int64_t k, int64_t n, int64_t depth, int64_t count, float* to) {
  if (count < kTileColumns) std::memset(to, 0, static_cast<size_t>(depth * kTileColumns) * sizeof(float));
  if (b.column_stride == 1) {
    for (int64_t i = 0; i < depth; ++i) {
      const float* from = b.at(k + i, n);
      for_vectors(count,
                  [&](int64_t c, int some) { store_some(to + i * kTileColumns + c, load_some(from + c, some), some); });
    }
    return;
  }
  const int64_t whole_depth = b.row_stride == 1 ? depth / kTurn * kTurn : 0;
  const int64_t whole_columns = count / kTurn * kTurn;
  for (int64_t i = 0; i < whole_depth; i += kTurn) {
    for (int64_t c = 0; c < whole_columns; c += kTurn) {
      turn(b.at(k + i, n + c), b.column_stride, 1.0f, to + i * kTileColumns + c, kTileColumns);
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    for (int64_t c = i < whole_depth ? whole_columns : 0; c < count; ++c)
      to[i * kTileColumns + c] = *b.at(k + i, n + c);
  }
}

// Packs `count` rows of A from (m, k) on in groups of kTileRows; rows that do not exist are zeros. A group is stored
// [depth][kTileRows] if A is stored by columns, else by rows with kRowStride floats between them.
void pack_rows_of_a(const Matrix& a, int64_t m, int64_t k, int64_t count, int64_t depth, float* to) {
  if (a.by_columns()) {
    for (int64_t i = 0; i < depth; ++i) {
      const float* from = a.at(m, k + i);
      for (int64_t r = 0; r < count; r += kTileRows) {
        float* const group = to + r * kRowStride + i * kTileRows;
        const int64_t filled = min_of(kTileRows, count - r);
        for_vectors(kTileRows, [&](int64_t c, int some) {
          store_some(group + c, load_first(from + r + c, static_cast<int>(min_of(some, max_of(0, filled - c)))), some);
        });
      }
    }
    return;
  }
  for (int64_t r = 0; r < round_up(count, kTileRows); ++r) {
    float* const row = to + r * kRowStride;
    if (r >= count) {
      std::memset(row, 0, static_cast<size_t>(depth) * sizeof(float));
    } else if (a.column_stride == 1) {
      std::memcpy(row, a.at(m + r, k), static_cast<size_t>(depth) * sizeof(float));
    } else {
      for (int64_t i = 0; i < depth; ++i) row[i] = *a.at(m + r, k + i);
    }
  }
}

// As micro_tile, for operands in the second-level cache: B is fetched some rows ahead, and `c`, whose rows compete for
// the same few cache sets, while the sums are made.
template <bool kByColumns>
inline void panel_tile(int64_t depth, const float* a, const float* b, const float* start, int64_t start_stride,
                       float* c, int64_t c_stride) {
  constexpr int64_t kAhead = 16 * kTileColumns;
  vf sum[kTileRows][kTileVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) {
    __builtin_prefetch(c + i * c_stride, 1);
    __builtin_prefetch(c + i * c_stride + kTileColumns - 1, 1);
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) sum[i][v] = vf{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    vf b_now[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      __builtin_prefetch(b + kAhead + v * kLanes);
      b_now[v] = load(b + v * kLanes);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kTileRows; ++i) {
      const float x = kByColumns ? a[i] : a[i * kRowStride];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) sum[i][v] += x * b_now[v];
    }
    b += kTileColumns;
    a += kByColumns ? kTileRows : 1;
  }
#pragma GCC unroll 12
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      if (start) sum[i][v] += load(start + i * start_stride + v * kLanes);
      store(c + i * c_stride + v * kLanes, sum[i][v]);
    }
  }
}

// out[rows][columns] = start + the product of a group of A's rows and a panel, for a whole micro-tile or less.
template <bool kByColumns>
void add_tile(int64_t depth, const float* a, const float* panel, int64_t rows, int64_t columns, const float* start,
              int64_t start_stride, float* out, int64_t out_stride, float* tile) {
  if (rows == kTileRows && columns == kTileColumns) {
    panel_tile<kByColumns>(depth, a, panel, start, start_stride, out, out_stride);
    return;
  }
  panel_tile<kByColumns>(depth, a, panel, nullptr, 0, tile, kTileColumns);
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(columns, [&](int64_t c, int count) {
      vf v = load(tile + r * kTileColumns + c);
      if (start) v += load_some(start + r * start_stride + c, count);
      store_some(out + r * out_stride + c, v, count);
    });
  }
}

}  // namespace

// A [rows, depth], B [depth, columns], out [rows, columns] with contiguous rows. `start` may be null, for zeros; its
// rows are contiguous, and with a stride of 0 all rows are the same. Depth is at least 1.
TURBOGR_KERNEL(gemm)
(const float* a, const float* b, const float* start, float* out, int64_t rows, int64_t columns, int64_t depth,
 int64_t a_row_stride, int64_t a_column_stride, int64_t b_row_stride, int64_t b_column_stride, int64_t start_stride,
 int64_t out_stride) {
  const Matrix left{a, a_row_stride, a_column_stride}, right{b, b_row_stride, b_column_stride};
  const int64_t num_panels = ceil_div(columns, kTileColumns);
  Buffer<float> panels(num_panels * kTileColumns * min_of(depth, kStretch));
  if (!panels) return kOutOfMemory;
  const int64_t row_blocks = ceil_div(rows, kBlockRows), column_blocks = ceil_div(columns, kBlockColumns);
  for (int64_t from = 0; from < depth; from += kStretch) {
    const int64_t stretch = min_of(kStretch, depth - from);
    // Panels are stored by parts of the depth, all panels of a part together.
    parallel_tasks(num_panels, [&](int64_t p) {
      const int64_t n = p * kTileColumns;
      for (int64_t k = 0; k < stretch; k += kDepth) {
        const int64_t part = min_of(kDepth, stretch - k);
        pack_panel(right, from + k, n, part, min_of(kTileColumns, columns - n),
                   &panels[(k * num_panels + p * part) * kTileColumns]);
      }
    });
    parallel_tasks(row_blocks * column_blocks, [&](int64_t task) {
      const GemmScratch scratch = take_scratch<GemmScratch>();
      const int64_t m = task % row_blocks * kBlockRows, n = task / row_blocks * kBlockColumns;
      const int64_t m_end = min_of(rows, m + kBlockRows), n_end = min_of(columns, n + kBlockColumns);
      for (int64_t k = 0; k < stretch; k += kDepth) {
        const int64_t part = min_of(kDepth, stretch - k);
        pack_rows_of_a(left, m, from + k, m_end - m, part, scratch.left);
        const bool first = from + k == 0;
        for (int64_t i = m; i < m_end; i += kTileRows) {
          const float* const group = scratch.left + (i - m) * kRowStride;
          for (int64_t j = n; j < n_end; j += kTileColumns) {
            const float* const panel = &panels[(k * num_panels + j / kTileColumns * part) * kTileColumns];
            float* const to = out + i * out_stride + j;
            const float* const begin = !first ? to : start ? start + i * start_stride + j : nullptr;
            const int64_t begin_stride = first ? start_stride : out_stride;
            const int64_t tall = min_of(kTileRows, m_end - i), wide = min_of(kTileColumns, n_end - j);
            (left.by_columns() ? add_tile<true> : add_tile<false>)(part, group, panel, tall, wide, begin, begin_stride,
                                                                   to, out_stride, scratch.tile);
          }
        }
      }
    });
  }
  return kOk;
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
