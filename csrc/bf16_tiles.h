// Products of bf16 numbers with sums in fp32, on the units that processors have for them: AMX tiles or AVX512_BF16.
//
// c [rows][columns] (+)= a [rows][depth] b [depth][columns]. `a` is stored by rows. `b` is stored in pairs of rows,
// b[depth / 2][column][2], as both units read it. Depth is a multiple of kBf16Depth, with zeros where there is less;
// rows and columns are 16 or 32. The packers below round fp32 to bf16 (nearest, ties to even) and write both layouts
// from matrices stored either way.
//
// `bf16_unit()` is the unit in use. It is none until the Python side has found in a child process that one works. With
// tiles, the thread that multiplies must hold a `TileUse`.
#pragma once

#include "narrow.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define TURBOGR_HAS_BF16_TILES 1
#else
#define TURBOGR_HAS_BF16_TILES 0
#endif

namespace turbogr {
namespace TURBOGR_ISA {

constexpr int64_t kBf16Depth = 32;
constexpr int64_t kBf16Side = 32;
// Numbers from one pair of rows to the next in a panel of kBf16Side columns.
constexpr int64_t kPairStride = 2 * kBf16Side;

// The unit that this build of the kernels can use.
inline Bf16Unit bf16_unit_here() { return TURBOGR_HAS_BF16_TILES ? bf16_unit() : Bf16Unit::none; }

#if TURBOGR_HAS_BF16_TILES
#define TURBOGR_TARGET_TILES __attribute__((target("amx-tile,amx-bf16")))
#define TURBOGR_TARGET_DOTS __attribute__((target("avx512bf16")))

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compilers' functions for tiles do not say that they read memory.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

TURBOGR_TARGET_TILES TURBOGR_OUTLINE inline void configure_tiles() {
  const TileShapes shapes;
  asm volatile("" : : "r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}

TURBOGR_TARGET_TILES TURBOGR_OUTLINE inline void release_tiles() { _tile_release(); }

// Tiles 0 to 3 are sums, 4 and 5 of a, 6 and 7 of b. Strides are in numbers.
template <int kTall, int kWide>
TURBOGR_TARGET_TILES TURBOGR_OUTLINE void multiply_by_tiles(int64_t depth, const Bf16* a, int64_t lda, const Bf16* b,
                                                            int64_t ldb, float* c, int64_t ldc, bool add) {
  const int64_t a_step = lda * 2, b_step = ldb * 2, c_step = ldc * 4;
  memory_is_read();
  if (add) {
    _tile_loadd(0, c, c_step);
    if constexpr (kWide == 2) _tile_loadd(1, c + 16, c_step);
    if constexpr (kTall == 2) _tile_loadd(2, c + 16 * ldc, c_step);
    if constexpr (kTall == 2 && kWide == 2) _tile_loadd(3, c + 16 * ldc + 16, c_step);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kBf16Depth) {
    _tile_loadd(4, a, a_step);
    _tile_loadd(6, b, b_step);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kWide == 2) {
      _tile_loadd(7, b + 32, b_step);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTall == 2) {
      _tile_loadd(5, a + 16 * lda, a_step);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kTall == 2 && kWide == 2) _tile_dpbf16ps(3, 5, 7);
    a += kBf16Depth;
    b += kBf16Depth / 2 * ldb;
  }
  _tile_stored(0, c, c_step);
  if constexpr (kWide == 2) _tile_stored(1, c + 16, c_step);
  if constexpr (kTall == 2) _tile_stored(2, c + 16 * ldc, c_step);
  if constexpr (kTall == 2 && kWide == 2) _tile_stored(3, c + 16 * ldc + 16, c_step);
  memory_is_read();
}

// The same in pieces of eight rows, whose sums stay in registers.
template <int kTall, int kWide>
TURBOGR_TARGET_DOTS TURBOGR_OUTLINE void multiply_by_dots(int64_t depth, const Bf16* a, int64_t lda, const Bf16* b,
                                                          int64_t ldb, float* c, int64_t ldc, bool add) {
  constexpr int kRows = 8;
  for (int row = 0; row < 16 * kTall; row += kRows) {
    __m512 sums[kRows][kWide];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kWide; ++v) {
        sums[i][v] = add ? _mm512_loadu_ps(c + (row + i) * ldc + 16 * v) : _mm512_setzero_ps();
      }
    }
    const Bf16* b_at = b;
    for (int64_t k = 0; k < depth; k += 2, b_at += ldb) {
      __m512bh pairs[kWide];
#pragma GCC unroll 2
      for (int v = 0; v < kWide; ++v) pairs[v] = (__m512bh)_mm512_loadu_si512(b_at + 32 * v);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        int32_t pair;
        std::memcpy(&pair, a + (row + i) * lda + k, sizeof(pair));
        const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
        for (int v = 0; v < kWide; ++v) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], x, pairs[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kWide; ++v) _mm512_storeu_ps(c + (row + i) * ldc + 16 * v, sums[i][v]);
    }
  }
}

// Holds the calling thread's tiles while it multiplies; nothing on other units.
class TileUse {
 public:
  explicit TileUse(Bf16Unit unit) : held_(unit == Bf16Unit::amx) {
    if (held_) configure_tiles();
  }
  ~TileUse() {
    if (held_) release_tiles();
  }
  TileUse(const TileUse&) = delete;
  TileUse& operator=(const TileUse&) = delete;

 private:
  bool held_;
};

// c [16 kTall][16 kWide] (+)= a b, see the top of this file. `unit` is not none.
template <int kTall = 2, int kWide = 2>
inline void multiply_bf16(Bf16Unit unit, int64_t depth, const Bf16* a, int64_t lda, const Bf16* b, int64_t ldb,
                          float* c, int64_t ldc, bool add) {
  if (unit == Bf16Unit::amx) {
    multiply_by_tiles<kTall, kWide>(depth, a, lda, b, ldb, c, ldc, add);
  } else {
    multiply_by_dots<kTall, kWide>(depth, a, lda, b, ldb, c, ldc, add);
  }
}

// Sixteen numbers as bf16 in the upper halves of the lanes; lanes from `count` on are zeros.
inline __m512i upper_halves(const float* p, int count = 16) { return (__m512i)round_to_bf16(load_some(p, count)); }
inline __m512i upper_halves(const Bf16* p, int count = 16) { return (__m512i)load_some(p, count); }

// Lanes of (even number, odd number) from two rows.
inline __m512i pair_up(__m512i even, __m512i odd) { return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd); }

// to[i] = the first, second, ... of each of the rows: transposes 16 x 16 words.
TURBOGR_INLINE void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }

// Rows of any numbers to rows of bf16: to[rows_out][columns_out], zeros outside of src[rows][columns]. columns_out is a
// multiple of 16.
template <class Number>
void pack_bf16_rows(const Number* src, int64_t stride, int64_t rows, int64_t columns, Bf16* to, int64_t ld,
                    int64_t rows_out, int64_t columns_out) {
  for (int64_t r = 0; r < rows_out; ++r) {
    for (int64_t c = 0; c < columns_out; c += 16) {
      const int count = r < rows ? static_cast<int>(max_of(0, min_of(16, columns - c))) : 0;
      const __m512i bits = count > 0 ? upper_halves(src + r * stride + c, count) : _mm512_setzero_si512();
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + r * ld + c),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    }
  }
}

// src[depth][columns] to pairs of rows to[depth_out / 2][columns_out][2], `ld` numbers from pair to pair, zeros
// outside. depth_out is even, columns_out a multiple of 16.
template <class Number>
void pack_bf16_pairs(const Number* src, int64_t stride, int64_t depth, int64_t columns, Bf16* to, int64_t ld,
                     int64_t depth_out, int64_t columns_out) {
  for (int64_t k = 0; k < depth_out; k += 2, to += ld) {
    for (int64_t c = 0; c < columns_out; c += 16) {
      const int count = static_cast<int>(max_of(0, min_of(16, columns - c)));
      const Number* const from = src + k * stride + c;
      const __m512i even = k < depth && count > 0 ? upper_halves(from, count) : _mm512_setzero_si512();
      const __m512i odd = k + 1 < depth && count > 0 ? upper_halves(from + stride, count) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + 2 * c, pair_up(even, odd));
    }
  }
}

// Two rows of 32 numbers as 32 pairs, to[0 ... 63].
TURBOGR_INLINE void interleave(__m512i even, __m512i odd, Bf16* to) {
  const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
  const __m512i first = _mm512_permutex2var_epi64(low, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high);
  const __m512i last = _mm512_permutex2var_epi64(low, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), high);
  _mm512_storeu_si512(to, first);
  _mm512_storeu_si512(to + 32, last);
}

TURBOGR_INLINE __m512i some_numbers(const Bf16* from, int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16(count > 0 ? (1u << count) - 1u : 0u, from);
}

inline void pack_bf16_pairs(const Bf16* src, int64_t stride, int64_t depth, int64_t columns, Bf16* to, int64_t ld,
                            int64_t depth_out, int64_t columns_out) {
  for (int64_t k = 0; k < depth_out; k += 2, to += ld) {
    for (int64_t c = 0; c < columns_out; c += 32) {
      const Bf16* const from = src + k * stride + c;
      const __m512i even = some_numbers(from, k < depth ? columns - c : 0);
      const __m512i odd = some_numbers(from + stride, k + 1 < depth ? columns - c : 0);
      if (columns_out - c >= 32) {
        interleave(even, odd, to + 2 * c);
      } else {
        alignas(64) Bf16 both[64];
        interleave(even, odd, both);
        std::memcpy(to + 2 * c, both, 64);
      }
    }
  }
}

// Up to 32 numbers of a row as 16 pairs.
template <class Number>
TURBOGR_INLINE __m512i pairs_of_row(const Number* from, int64_t count) {
  if (count <= 0) return _mm512_setzero_si512();
  const int low = static_cast<int>(min_of(16, count)), high = static_cast<int>(max_of(0, min_of(16, count - 16)));
  const __m512i first = upper_halves(from, low);
  const __m512i second = high > 0 ? upper_halves(from + 16, high) : _mm512_setzero_si512();
  const __m256i left = _mm512_cvtepi32_epi16(_mm512_srli_epi32(first, 16));
  const __m256i right = _mm512_cvtepi32_epi16(_mm512_srli_epi32(second, 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(left), right, 1);
}

TURBOGR_INLINE __m512i pairs_of_row(const Bf16* from, int64_t count) { return some_numbers(from, count); }

// The same pairs from the transpose, src[columns][depth]. depth_out is a multiple of 32, columns_out of 16.
template <class Number>
void pack_bf16_pairs_transposed(const Number* src, int64_t stride, int64_t depth, int64_t columns, Bf16* to, int64_t ld,
                                int64_t depth_out, int64_t columns_out) {
  for (int64_t c = 0; c < columns_out; c += 16) {
    for (int64_t k = 0; k < depth_out; k += 32) {
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) words[i] = pairs_of_row(src + (c + i) * stride + k, c + i < columns ? depth - k : 0);
      transpose_words(words);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (k / 2 + i) * ld + 2 * c, words[i]);
    }
  }
}

// The transpose of src[depth][rows] as rows of bf16: to[rows_out][depth_out], zeros outside. rows_out is a multiple of
// 16, depth_out of 32.
template <class Number>
void pack_bf16_rows_transposed(const Number* src, int64_t stride, int64_t depth, int64_t rows, Bf16* to, int64_t ld,
                               int64_t rows_out, int64_t depth_out) {
  for (int64_t r = 0; r < rows_out; r += 16) {
    const int count = static_cast<int>(max_of(0, min_of(16, rows - r)));
    for (int64_t k = 0; k < depth_out; k += 32) {
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const int64_t at = k + 2 * i;
        const Number* const from = src + at * stride + r;
        const __m512i even = at < depth && count > 0 ? upper_halves(from, count) : _mm512_setzero_si512();
        const __m512i odd = at + 1 < depth && count > 0 ? upper_halves(from + stride, count) : _mm512_setzero_si512();
        words[i] = pair_up(even, odd);
      }
      transpose_words(words);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (r + i) * ld + k, words[i]);
    }
  }
}
#endif

}  // namespace TURBOGR_ISA
}  // namespace turbogr
