// The five products of a tile of attention, and the layout of their operands.
//
// Operands that are read by vectors, and outputs that sum up, lie in panels: kTileColumns columns side by side, one row
// behind the other, kBlock rows; the last panel of a narrow matrix may be a single vector wide. So a product reads
// consecutive memory, whatever the strides of the tensors are, and a panel stays in the first-level cache. A matrix of
// `width` columns, in whole vectors, takes kBlock * width floats.
//
// Scores stay a row-major tile [key][row] (see tile_gemm.h), and so do the rules for bands and surplus rows.
#pragma once

#include "tile_gemm.h"

namespace turbogr {
namespace TURBOGR_ISA {

// Columns of the panel that begins at this column, of a matrix of `width` columns.
inline int64_t panel_columns(int64_t column, int64_t width) { return min_of(kTileColumns, width - column); }

// Sums of a micro-tile; they stay in registers from one call of add() to the next.
template <int Rows, int Vectors>
struct TileSums {
  vf sum[Rows][Vectors];

  TURBOGR_INLINE void clear() {
#pragma GCC unroll 12
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sum[i][v] = vf{};
    }
  }

  // sum[i] += a(i, k) * b[k], for `depth` values of k.
  template <bool kTransposed>
  TURBOGR_INLINE void add(int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; ++k) {
      vf b_now[Vectors];
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) b_now[v] = load(b + v * kLanes);
#pragma GCC unroll 12
      for (int i = 0; i < Rows; ++i) {
        const float x = kTransposed ? a[i] : a[i * lda];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sum[i][v] += x * b_now[v];
      }
      b += ldb;
      a += kTransposed ? lda : 1;
    }
  }

  // to[i] = start[i] + sum[i]; a null start counts as zeros. Adding it last keeps the error of long sums down.
  TURBOGR_INLINE void write(const float* start, float* to, int64_t ld) const {
#pragma GCC unroll 12
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        const int64_t at = i * ld + v * kLanes;
        store(to + at, start != nullptr ? sum[i][v] + load(start + at) : sum[i][v]);
      }
    }
  }
};

// Scores of the kTileRows keys from `key` on with Vectors vectors of rows, which have `stride` floats per k.
template <int Vectors>
TURBOGR_OUTLINE void score_tile(int64_t depth, const float* keys, int64_t key, const float* rows, int64_t stride,
                                const float* start, float* scores) {
  const int64_t width = round_up(depth, kLanes);
  TileSums<kTileRows, Vectors> sums;
  sums.clear();
  for (int64_t k = 0; k < depth; k += kTileColumns) {
    const float* const panel = keys + k * kBlock;
    if (width - k >= kTileColumns) {
      sums.template add<false>(min_of(kTileColumns, depth - k), panel + key * kTileColumns, kTileColumns,
                               rows + k * stride, stride);
    } else {
      sums.template add<false>(depth - k, panel + key * kLanes, kLanes, rows + k * stride, stride);
    }
  }
  sums.write(start, scores, kBlock);
}

// scores[key][row] = start[key][row] + sum over k of keys(key, k) * queries(row, k); `start` may be null. `keys` are
// panels of a matrix [kBlock][depth], `turned` is what turn_panels makes. `num_rows` is a multiple of kLanes.
inline void panel_scores(int64_t num_keys, int64_t num_rows, int64_t depth, const float* keys, const float* turned,
                         const float* start, float* scores, Band band) {
  for (int64_t n = 0; n < num_rows; n += kTileColumns) {
    const bool wide = n + kTileColumns <= num_rows;
    const int64_t seen = min_of(num_keys, n + (wide ? kTileColumns : kLanes) + band.upper);
    for (int64_t m = max_of(0, n + band.lower) / kTileRows * kTileRows; m < seen; m += kTileRows) {
      const int64_t at = m * kBlock + n;
      const float* const from = start != nullptr ? start + at : nullptr;
      if (wide) {
        score_tile<kTileVectors>(depth, keys, m, turned + n * depth, kTileColumns, from, scores + at);
      } else {
        score_tile<1>(depth, keys, m, turned + n * depth, panel_columns(n, kBlock), from, scores + at);
      }
    }
  }
}

struct KRange {
  int64_t begin, end;
};

// kTileRows rows of one panel of `out` += scores, as stored or transposed, times one panel of `b`.
template <bool kTransposed, int Vectors>
TURBOGR_OUTLINE void add_tile(int64_t depth, const float* scores, const float* b, float* out) {
  constexpr int64_t kColumns = Vectors * kLanes;
  TileSums<kTileRows, Vectors> sums;
  sums.clear();
  sums.template add<kTransposed>(depth, scores, kBlock, b, kColumns);
  sums.write(out, out, kColumns);
}

// Adds to one panel of `out`; limits(m) says which values of k the micro-tile of rows from m on has.
template <bool kTransposed, int Vectors, class Limits>
inline void add_panel(int64_t num_rows, const float* scores, const float* b, float* out, Limits&& limits) {
  constexpr int64_t kColumns = Vectors * kLanes;
  for (int64_t m = 0; m < num_rows; m += kTileRows) {
    const KRange k = limits(m);
    const float* const from = kTransposed ? scores + k.begin * kBlock + m : scores + m * kBlock + k.begin;
    add_tile<kTransposed, Vectors>(k.end - k.begin, from, b + k.begin * kColumns, out + m * kColumns);
  }
}

template <bool kTransposed, class Limits>
inline void add_panels(int64_t num_rows, int64_t width, const float* scores, const float* b, float* out,
                       Limits&& limits) {
  int64_t n = 0;
  for (; n + kTileColumns <= width; n += kTileColumns) {
    add_panel<kTransposed, kTileVectors>(num_rows, scores, b + n * kBlock, out + n * kBlock, limits);
  }
  if (n < width) add_panel<kTransposed, 1>(num_rows, scores, b + n * kBlock, out + n * kBlock, limits);
}

// out[row] += sum over keys seen by the row of scores[key][row] * b[key]; b and out are panels.
inline void panel_add_by_row(int64_t keys, int64_t rows, int64_t width, const float* scores, const float* b, float* out,
                             Band band) {
  add_panels<true>(rows, width, scores, b, out, [&](int64_t m) {
    return KRange{max_of(0, m + band.lower), min_of(keys, m + kTileRows + band.upper)};
  });
}

// out[key] += sum over rows that see the key of scores[key][row] * b[row]; b and out are panels.
inline void panel_add_by_key(int64_t keys, int64_t rows, int64_t width, const float* scores, const float* b, float* out,
                             Band band) {
  add_panels<false>(keys, width, scores, b, out, [&](int64_t m) {
    return KRange{max_of(0, m - band.upper), min_of(rows, m + kTileRows - band.lower)};
  });
}

// Calls body(column, address) for the vectors of a row of panels.
template <class Float, class Body>
inline void for_vectors_of_row(int64_t row, int64_t width, Float* panels, Body&& body) {
  for (int64_t n = 0; n < width; n += kTileColumns) {
    const int64_t wide = panel_columns(n, width);
    for (int64_t c = 0; c < wide; c += kLanes) body(n + c, panels + n * kBlock + row * wide + c);
  }
}

// Copies rows of a strided matrix to panels, zeros up to the next whole vector, and clears the rows after them up to
// `rows_out`, at most kBlock.
TURBOGR_OUTLINE inline void pack_panels(const float* src, int64_t stride, int64_t rows, int64_t columns, float scale,
                                        float* dst, int64_t rows_out) {
  const int64_t width = round_up(columns, kLanes);
  for (int64_t r = 0; r < rows; ++r) {
    const float* const from = src + r * stride;
    for_vectors_of_row(r, width, dst, [&](int64_t c, float* to) {
      store(to, load_some(from + c, static_cast<int>(min_of(kLanes, columns - c))) * scale);
    });
  }
  for (int64_t r = rows; r < rows_out; ++r) {
    for_vectors_of_row(r, width, dst, [](int64_t, float* to) { store(to, vf{}); });
  }
}

// Writes the first `columns` columns of panels to a strided matrix.
TURBOGR_OUTLINE inline void write_panels(const float* from, int64_t rows, int64_t columns, float* to, int64_t stride,
                                         float scale = 1.0f) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors_of_row(r, round_up(columns, kLanes), from, [&](int64_t c, const float* at) {
      store_some(to + r * stride + c, load(at) * scale, static_cast<int>(min_of(kLanes, columns - c)));
    });
  }
}

// Writes the transpose of a strided matrix [rows][columns], rows along the lanes: [panel of rows][column][row], zeros
// from `rows` up to the next multiple of kGroup.
TURBOGR_OUTLINE inline void turn_panels(const float* src, int64_t stride, int64_t rows, int64_t columns, float scale,
                                        float* dst) {
  for (int64_t n = 0; n < round_up(rows, kGroup); n += kTileColumns) {
    const int64_t wide = panel_columns(n, kBlock), filled = max_of(0, min_of(wide, rows - n));
    const int64_t whole_rows = filled / kTurn * kTurn, whole_columns = columns / kTurn * kTurn;
    const float* const from = src + n * stride;
    float* const to = dst + n * columns;
    for (int64_t r = 0; r < whole_rows; r += kTurn) {
      for (int64_t c = 0; c < whole_columns; c += kTurn) {
        turn(from + r * stride + c, stride, scale, to + c * wide + r, wide);
      }
      for (int64_t c = whole_columns; c < columns; ++c) {
        for (int64_t i = r; i < r + kTurn; ++i) to[c * wide + i] = from[i * stride + c] * scale;
      }
    }
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = whole_rows; r < filled; ++r) to[c * wide + r] = from[r * stride + c] * scale;
      for (int64_t r = filled; r < wide; ++r) to[c * wide + r] = 0.0f;
    }
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
