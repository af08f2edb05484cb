// Dot products of a query with rows that are scattered in memory, and weighted sums of such rows.
#pragma once

#include "narrow.h"

namespace turbogr {
namespace TURBOGR_ISA {

// Lane i of the result is the sum of the lanes of x[i].
inline vf sum_each(const vf* x) {
#if defined(__AVX2__)
  constexpr int kParts = kLanes / 8;
  __m256 part[kParts];
  for (int p = 0; p < kParts; ++p) {
    __m256 y[8];
    for (int i = 0; i < 8; ++i) {
#if defined(__AVX512F__)
      const __m512 wide = (__m512)x[p * 8 + i];
      y[i] = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
#else
      y[i] = (__m256)x[i];
#endif
    }
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
    part[p] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
#if defined(__AVX512F__)
  return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(part[0]), part[1], 1);
#else
  return (vf)part[0];
#endif
#else
  vf y;
  for (int i = 0; i < kLanes; ++i) y[i] = sum(x[i]);
  return y;
#endif
}

// How many groups of kLanes rows are prefetched ahead of the one being scored.
constexpr int kAhead = 2;

// Prefetches the first cache lines of a row; the processor fetches the rest of a longer row by itself.
template <class Number>
inline void fetch_row(const Number* row) {
  constexpr int kStep = 64 / sizeof(Number);
  __builtin_prefetch(row);
  __builtin_prefetch(row + kStep);
  if (sizeof(Number) < 4) return;
  __builtin_prefetch(row + 2 * kStep);
  __builtin_prefetch(row + 3 * kStep);
}

// Dot products of the query with kLanes rows of Vectors whole vectors.
template <class Number, int Vectors>
vf score_whole(const float* query, const Number* const* rows, int64_t) {
  vf total[kLanes] = {};
#pragma GCC unroll 8
  for (int c = 0; c < Vectors; ++c) {
    const vf q = load(query + c * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) total[i] += q * load(rows[i] + c * kLanes);
  }
  return sum_each(total);
}

// Dot products of the query with kLanes rows of any width.
template <class Number>
vf score_any(const float* query, const Number* const* rows, int64_t width) {
  vf total[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    const vf q = load(query + c);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) total[i] += q * load(rows[i] + c);
  }
  if (c < width) {
    const int count = static_cast<int>(width - c);
    const vf q = load_first(query + c, count);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) total[i] += q * load_some(rows[i] + c, count);
  }
  return sum_each(total);
}

template <class Number>
using Score = vf (*)(const float*, const Number* const*, int64_t);

template <class Number>
Score<Number> choose_score(int64_t width) {
  static constexpr Score<Number> kWhole[] = {score_whole<Number, 1>, score_whole<Number, 2>, score_whole<Number, 3>,
                                             score_whole<Number, 4>, score_whole<Number, 5>, score_whole<Number, 6>,
                                             score_whole<Number, 7>, score_whole<Number, 8>};
  const bool whole = width > 0 && width % kLanes == 0 && width <= 8 * kLanes;
  return whole ? kWhole[width / kLanes - 1] : score_any<Number>;
}

// out[column ...] = decay * out[column ...] + sum_j weights[j] * rows[j][column ...] over Vectors vectors, the last of
// `last` columns. `out` has room for whole vectors.
template <class Number, int Vectors>
void add_columns(const Number* const* rows, const float* weights, int64_t n, int64_t column, int last, float decay,
                 float* out) {
  vf total[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) total[v] = load(out + column + v * kLanes) * decay;
  for (int64_t j = 0; j < n; ++j) {
    const Number* row = rows[j] + column;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors - 1; ++v) total[v] += weights[j] * load(row + v * kLanes);
    total[Vectors - 1] += weights[j] * load_some(row + (Vectors - 1) * kLanes, last);
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) store(out + column + v * kLanes, total[v]);
}

// out = decay * out + sum_j weights[j] * rows[j].
template <class Number>
void add_weighted(const Number* const* rows, const float* weights, int64_t n, int64_t width, float decay, float* out) {
  using Add = void (*)(const Number* const*, const float*, int64_t, int64_t, int, float, float*);
  static constexpr Add kAdds[] = {add_columns<Number, 1>, add_columns<Number, 2>, add_columns<Number, 3>,
                                  add_columns<Number, 4>, add_columns<Number, 5>, add_columns<Number, 6>,
                                  add_columns<Number, 7>, add_columns<Number, 8>};
  for (int64_t column = 0; column < width; column += 8 * kLanes) {
    const int64_t columns = min_of(8 * kLanes, width - column);
    const int64_t vectors = ceil_div(columns, kLanes);
    const int last = static_cast<int>(columns - (vectors - 1) * kLanes);
    kAdds[vectors - 1](rows, weights, n, column, last, decay, out);
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
