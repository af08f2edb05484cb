// Vectors of numbers narrower than a float: loaded as floats, stored rounded to the nearest, ties to even.
#pragma once

#include "simd.h"

namespace turbogr {
namespace TURBOGR_ISA {

// IEEE binary16.
struct Half {
  uint16_t bits;
};

inline vf load(const Half* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vu wide = __builtin_convertvector(load(&p->bits), vu);
  const vu magnitude = (wide & 0x7FFFu) << 13;
  const vf finite = (vf)magnitude * 0x1p112f;
  const vu bits = (wide & 0x7C00u) == 0x7C00u ? (magnitude | 0x7F800000u) : (vu)finite;
  return (vf)(bits | ((wide & 0x8000u) << 16));
#endif
}

inline uint16_t half_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and more
  if (magnitude >= 0x38800000u) {
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13));
  }
  float small;
  std::memcpy(&small, &magnitude, sizeof(small));
  small += 0.5f;  // the addition rounds to the steps of subnormal halves
  std::memcpy(&bits, &small, sizeof(bits));
  return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
}

inline void store(Half* p, vf x) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
#elif defined(__AVX2__)
  const __m128i halves = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
#else
  for (int i = 0; i < kLanes; ++i) p[i].bits = half_bits(x[i]);
#endif
}

// The upper half of a float.
struct Bf16 {
  uint16_t bits;
};

// The number rounded to bf16, as a float: its lower half is zero. Not a number stays one.
inline vf round_to_bf16(vf x) {
  const vu bits = (vu)x;
  const vu rounded = (bits + (0x7FFFu + (bits >> 16 & 1u))) & 0xFFFF0000u;
  const vu kept = (bits | 0x00400000u) & 0xFFFF0000u;
  return (vf)(x == x ? rounded : kept);
}

inline vf load(const Bf16* p) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  return (vf)(__builtin_convertvector(load(&p->bits), vu) << 16);
#endif
}

inline void store(Bf16* p, vf x) {
  const vu bits = (vu)round_to_bf16(x) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)bits));
#else
  store(&p->bits, __builtin_convertvector(bits, vs));
#endif
}

// Numbers of activations lie in tensors: nothing beyond the last is read or written.
inline vf load_some(const Bf16* p, int count) {
  if (count == kLanes) return load(p);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i halves = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1u), p);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  Bf16 some[kLanes] = {};
  for (int i = 0; i < count; ++i) some[i] = p[i];
  return load(some);
#endif
}

inline void store_some(Bf16* p, vf x, int count) {
  if (count == kLanes) return store(p, x);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i halves = _mm512_cvtepi32_epi16((__m512i)((vu)round_to_bf16(x) >> 16));
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1u), halves);
#else
  Bf16 some[kLanes];
  store(some, x);
  for (int i = 0; i < count; ++i) p[i] = some[i];
#endif
}

typedef int8_t vb __attribute__((vector_size(kLanes)));

inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return to_float((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vb bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, vf);
#endif
}

// For numbers from -127 to 127.
inline void store(int8_t* p, vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number in the low bits
  const vb bytes = __builtin_convertvector(bits_of(x + magic) - bits_of(magic), vb);
  std::memcpy(p, &bytes, sizeof(bytes));
}

// Arrays of narrow numbers hold whole vectors.
inline vf load_some(const Half* p, int) { return load(p); }
inline vf load_some(const int8_t* p, int) { return load(p); }

}  // namespace TURBOGR_ISA
}  // namespace turbogr
