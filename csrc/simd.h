// A vector of floats as wide as the instruction set allows, on the vector extensions of GCC and Clang.
//
// Intrinsics are used only where the compilers have no portable equivalent. A source that uses this header is the same
// for every instruction set.
#pragma once

#include "runtime.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace turbogr {
namespace TURBOGR_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vs __attribute__((vector_size(kLanes * 2)));
typedef float vf_any __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t vs_any __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }
inline vi load(const int32_t* p) { return *reinterpret_cast<const vi_any*>(p); }
inline void store(int32_t* p, vi x) { *reinterpret_cast<vi_any*>(p) = x; }
inline vs load(const uint16_t* p) { return *reinterpret_cast<const vs_any*>(p); }
inline void store(uint16_t* p, vs x) { *reinterpret_cast<vs_any*>(p) = x; }

inline vf splat(float x) { return x - vf{}; }
inline vi splat(int32_t x) { return x - vi{}; }
inline vu splat(uint32_t x) { return x - vu{}; }

inline vi lane_numbers() {
  vi n{};
  for (int i = 0; i < kLanes; ++i) n[i] = i;
  return n;
}

// The first `count` lanes from memory, zeros in the others; reads nothing beyond them.
inline vf load_first(const float* p, int count) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), p);
#elif defined(__AVX2__)
  return (vf)_mm256_maskload_ps(p, (__m256i)(lane_numbers() < splat(int32_t(count))));
#else
  vf x{};
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return x;
#endif
}

inline void store_first(float* p, vf x, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1u), (__m512)x);
#elif defined(__AVX2__)
  // In pieces: a masked store takes dozens of micro-operations on some processors.
  __m128 part = _mm256_castps256_ps128((__m256)x);
  if (count & 4) {
    _mm_storeu_ps(p, part);
    part = _mm256_extractf128_ps((__m256)x, 1);
    p += 4;
  }
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), part);
    part = _mm_movehl_ps(part, part);
    p += 2;
  }
  if (count & 1) _mm_store_ss(p, part);
#else
  for (int i = 0; i < count; ++i) p[i] = x[i];
#endif
}

inline vi gather(const int32_t* table, vi at) {
#if defined(__AVX512F__)
  return (vi)_mm512_i32gather_epi32((__m512i)at, table, 4);
#elif defined(__AVX2__)
  return (vi)_mm256_i32gather_epi32(table, (__m256i)at, 4);
#else
  vi x;
  for (int i = 0; i < kLanes; ++i) x[i] = table[at[i]];
  return x;
#endif
}

inline vf gather(const float* table, vi at) {
#if defined(__AVX512F__)
  return (vf)_mm512_i32gather_ps((__m512i)at, table, 4);
#elif defined(__AVX2__)
  return (vf)_mm256_i32gather_ps(table, (__m256i)at, 4);
#else
  vf x;
  for (int i = 0; i < kLanes; ++i) x[i] = table[at[i]];
  return x;
#endif
}

#if defined(__AVX512F__)
inline vf min_of(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
inline vf max_of(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
inline vf min_of(vf a, vf b) { return a < b ? a : b; }
inline vf max_of(vf a, vf b) { return a > b ? a : b; }
#endif
inline vi max_of(vi a, vi b) { return a > b ? a : b; }
inline vi abs_of(vi a) { return a < 0 ? -a : a; }

inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }
inline vi bits_of(vf x) { return (vi)x; }

inline float sum(vf x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m128 y = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  y = _mm_add_ss(y, _mm_shuffle_ps(y, y, 1));
  return _mm_cvtss_f32(y);
#elif defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

inline float max_lane(vf x) {
  float m = x[0];
  for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

inline vf sqrt_of(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// Several vectors at once. Loops over long formulas take kAbreast of them: the steps of one vector wait for each other.
constexpr int kAbreast = 3;
template <int N>
struct Several {
  vf v[N];
};

// e^x to about 1e-7 relative; the argument is clamped to -87 ... 88, and a NaN gives a finite number (callers then
// multiply by, or add, something that is NaN).
template <int N>
TURBOGR_INLINE Several<N> exp_of(Several<N> x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  Several<N> shifted, r, p;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x.v[i] = min_of(max_of(x.v[i], splat(-87.0f)), splat(88.0f));
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) shifted.v[i] = x.v[i] * 1.44269504088896341f + magic;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    const vf n = shifted.v[i] - magic;
    r.v[i] = (x.v[i] - n * 0.693359375f) + n * 2.12194440e-4f;
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) p.v[i] = 1.9875691500e-4f * r.v[i] + 1.3981999507e-3f;
  constexpr float kCoefficients[] = {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
#pragma GCC unroll 4
  for (const float coefficient : kCoefficients) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) p.v[i] = p.v[i] * r.v[i] + coefficient;
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) p.v[i] = p.v[i] * (r.v[i] * r.v[i]) + (r.v[i] + 1.0f);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    p.v[i] = (vf)(bits_of(p.v[i]) + (bits_of(shifted.v[i]) << 23));  // the low 9 bits of `magic` are zeros
  }
  return p;
}

inline vf exp_of(vf x) { return exp_of(Several<1>{{x}}).v[0]; }

// Natural logarithm of positive normal numbers, to about 1e-7.
inline vf log_of(vf x) {
  const vi bits = bits_of(x);
  vi exponent = (bits - 0x3f3504f3) >> 23;  // so that the rest lies in [sqrt(1/2), sqrt(2))
  const vf m = (vf)(bits - (exponent << 23)) - 1.0f;
  vf p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const vf e = to_float(exponent);
  const vf square = m * m;
  vf y = p * m * square + e * -2.12194440e-4f;
  y = y - square * 0.5f;
  return (m + y) + e * 0.693359375f;
}

// 1 / x to about 1e-7 relative, for normal numbers: an estimate of 14 bits and one step of Newton's method, in a
// third of a division's time.
inline vf reciprocal(vf x) {
#if defined(__AVX512F__)
  const vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

template <int N>
TURBOGR_INLINE Several<N> sigmoid(Several<N> x) {
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x.v[i] = -x.v[i];
  x = exp_of(x);
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x.v[i] = reciprocal(1.0f + x.v[i]);
  return x;
}

inline vf sigmoid(vf x) { return sigmoid(Several<1>{{x}}).v[0]; }

template <int N>
TURBOGR_INLINE Several<N> load_several(const float* p) {
  Several<N> x;
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) x.v[i] = load(p + i * kLanes);
  return x;
}

// Calls body(at, count) for each vector of a row of n floats; count is kLanes but for the last.
template <class Body>
inline void for_vectors(int64_t n, Body&& body) {
  int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes) body(at, kLanes);
  if (at < n) body(at, static_cast<int>(n - at));
}

inline vf load_some(const float* p, int count) { return count == kLanes ? load(p) : load_first(p, count); }
inline void store_some(float* p, vf x, int count) {
  if (count == kLanes) {
    store(p, x);
  } else {
    store_first(p, x, count);
  }
}

}  // namespace TURBOGR_ISA
}  // namespace turbogr
