// Products of small matrices that are in cache: every operand is a row-major tile in scratch memory.
//
// A tile of scores is kept transposed, scores[key][row], rows along the lanes. Then nothing of the keys' side needs
// transposing, and products are of two kinds: A as stored, or A transposed. Both read A one number at a time and B one
// vector at a time, so one micro-kernel serves them. Attention has the same with panels (attention_products.h).
//
// Number of rows of an output is rounded up to kTileRows: scratch must have room for that, and the surplus
// is never used. A band of diagonals says where scores may exist; products skip the micro-tiles that are
// wholly outside of it. Other elements that do not exist must be zero.
#pragma once

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

constexpr int kTileRows = kRegisters == 32 ? 12 : 6;
constexpr int kTileVectors = 2;
constexpr int kTileColumns = kTileVectors * kLanes;

// Side of the blocks into which sequences are cut: whole micro-tiles for every instruction set. Attention is built
// twice, the second time with small blocks for short sequences; `turbogr bench tiles` compares them with others.
#if !defined(TURBOGR_BLOCK) && defined(TURBOGR_SMALL_BLOCKS)
#define TURBOGR_BLOCK 48
#elif !defined(TURBOGR_BLOCK)
#define TURBOGR_BLOCK 96
#endif
constexpr int64_t kBlock = TURBOGR_BLOCK;
static_assert(kBlock % kTileRows == 0 && kBlock % kLanes == 0, "blocks must hold whole micro-tiles");

// Rows of a block are padded to whole groups.
constexpr int64_t kGroup = 16;
static_assert(kGroup % kLanes == 0 && kBlock % kGroup == 0, "groups must hold whole vectors and fill a block");

// Key c of a tile may be seen by row r only if r + lower <= c <= r + upper. Causal attention has no lower bound.
struct Band {
  int64_t upper, lower;

  Band(int64_t upper_diagonal, int64_t lower_diagonal = -(int64_t(1) << 62))
      : upper(upper_diagonal), lower(lower_diagonal) {}
};

// c[i][v] = start[i][v] + (sum over k in [k_begin, k_end) of a(i, k) * b[k][v]), for Rows x Vectors of c; a
// null start counts as zeros. Adding the start last keeps the error of long sums down.
template <int Rows, int Vectors, bool kTransposed>
inline void micro_tile(int64_t k_begin, int64_t k_end, const float* a, int64_t lda, const float* b, int64_t ldb,
                       const float* start, int64_t ld_start, float* c, int64_t ldc) {
  vf sum[Rows][Vectors];
#pragma GCC unroll 12
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[i][v] = vf{};
  }
  const float* b_row = b + k_begin * ldb;
  const float* a_at = kTransposed ? a + k_begin * lda : a + k_begin;
  for (int64_t k = k_begin; k < k_end; ++k) {
    vf b_now[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) b_now[v] = load(b_row + v * kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < Rows; ++i) {
      const float x = kTransposed ? a_at[i] : a_at[i * lda];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[i][v] += x * b_now[v];
    }
    b_row += ldb;
    a_at += kTransposed ? lda : 1;
  }
#pragma GCC unroll 12
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      if (start) sum[i][v] += load(start + i * ld_start + v * kLanes);
      store(c + i * ldc + v * kLanes, sum[i][v]);
    }
  }
}

// scores[key][row] = start[key][row] + sum_k a[key][k] * b[k][row]; `start` may be null. `rows` is a multiple of
// kLanes.
TURBOGR_OUTLINE inline void tile_scores(int64_t keys, int64_t rows, int64_t depth, const float* a, int64_t lda,
                                        const float* b, const float* start, float* scores, Band band) {
  for (int64_t n = 0; n < rows; n += kTileColumns) {
    const bool wide = n + kTileColumns <= rows;
    const int64_t seen = min_of(keys, n + (wide ? kTileColumns : kLanes) + band.upper);
    for (int64_t m = max_of(0, n + band.lower) / kTileRows * kTileRows; m < seen; m += kTileRows) {
      const float* from = start ? start + m * kBlock + n : nullptr;
      float* to = scores + m * kBlock + n;
      if (wide) {
        micro_tile<kTileRows, kTileVectors, false>(0, depth, a + m * lda, lda, b + n, kBlock, from, kBlock, to, kBlock);
      } else {
        micro_tile<kTileRows, 1, false>(0, depth, a + m * lda, lda, b + n, kBlock, from, kBlock, to, kBlock);
      }
    }
  }
}

// out[row][n] += sum over keys seen by the row of scores[key][row] * b[key][n]; `width` is a multiple of kLanes.
TURBOGR_OUTLINE inline void tile_add_by_row(int64_t keys, int64_t rows, int64_t width, const float* scores,
                                            const float* b, int64_t ldb, float* out, int64_t ldo, Band band) {
  int64_t n = 0;
  for (; n + kTileColumns <= width; n += kTileColumns) {
    for (int64_t m = 0; m < rows; m += kTileRows) {
      const int64_t first = max_of(0, m + band.lower), seen = min_of(keys, m + kTileRows + band.upper);
      float* c = out + m * ldo + n;
      micro_tile<kTileRows, kTileVectors, true>(first, seen, scores + m, kBlock, b + n, ldb, c, ldo, c, ldo);
    }
  }
  if (n < width) {
    for (int64_t m = 0; m < rows; m += kTileRows) {
      const int64_t first = max_of(0, m + band.lower), seen = min_of(keys, m + kTileRows + band.upper);
      float* c = out + m * ldo + n;
      micro_tile<kTileRows, 1, true>(first, seen, scores + m, kBlock, b + n, ldb, c, ldo, c, ldo);
    }
  }
}

// Writes zeros to scores[key][row] for the rows that do not see the key, in causal attention: c > r + offset.
inline void clear_unseen(int64_t keys, float* scores, int64_t offset) {
  for (int64_t c = max_of(0, offset + 1); c < keys; ++c) {
    std::memset(scores + c * kBlock, 0, static_cast<size_t>(min_of(kBlock, c - offset)) * sizeof(float));
  }
}

// Copies rows of a strided matrix to rows of `ld` floats, zeros up to the next whole vector, and clears the rows after
// them up to `rows_out`.
TURBOGR_OUTLINE inline void pack_rows(const float* src, int64_t stride, int64_t rows, int64_t columns, float scale,
                                      float* dst, int64_t rows_out, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = src + r * stride;
    float* to = dst + r * ld;
    for_vectors(columns, [&](int64_t c, int count) { store(to + c, load_some(from + c, count) * scale); });
  }
  std::memset(dst + rows * ld, 0, static_cast<size_t>((rows_out - rows) * ld) * sizeof(float));
}

#if defined(__AVX2__)
constexpr int kTurn = 8;
inline void turn(const float* src, int64_t stride, float scale, float* dst, int64_t ld) {
  __m256 r[8], t[8];
  const __m256 s = _mm256_set1_ps(scale);
  for (int i = 0; i < 8; ++i) r[i] = _mm256_mul_ps(_mm256_loadu_ps(src + i * stride), s);
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(dst + i * ld, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(dst + (i + 4) * ld, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#else
constexpr int kTurn = 4;
inline void turn(const float* src, int64_t stride, float scale, float* dst, int64_t ld) {
  for (int i = 0; i < kTurn; ++i) {
    for (int j = 0; j < kTurn; ++j) dst[j * ld + i] = src[i * stride + j] * scale;
  }
}
#endif

// Writes the transpose of a strided matrix to dst[columns][kBlock], zeros from `rows` up to the next multiple of
// kGroup.
TURBOGR_OUTLINE inline void pack_transposed(const float* src, int64_t stride, int64_t rows, int64_t columns,
                                            float scale, float* dst) {
  const int64_t whole_rows = rows / kTurn * kTurn, whole_columns = columns / kTurn * kTurn;
  for (int64_t r = 0; r < whole_rows; r += kTurn) {
    for (int64_t c = 0; c < whole_columns; c += kTurn)
      turn(src + r * stride + c, stride, scale, dst + c * kBlock + r, kBlock);
    for (int64_t c = whole_columns; c < columns; ++c) {
      for (int64_t i = r; i < r + kTurn; ++i) dst[c * kBlock + i] = src[i * stride + c] * scale;
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = whole_rows; r < rows; ++r) dst[c * kBlock + r] = src[r * stride + c] * scale;
    for (int64_t r = rows; r < round_up(rows, kGroup); ++r) dst[c * kBlock + r] = 0.0f;
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
