// Sixteen float lanes as two AVX2 registers. Compile with -mavx2 -mfma -mf16c.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "half.h"

namespace forerun {
namespace avx2 {

struct I16 {
  __m256i lo, hi;
};

struct V16 {
  __m256 lo, hi;
  static constexpr int kChains = 6, kFloatRows = 6;
  static constexpr int kPairs = 6, kAttendChains = 6;

  static V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static V16 load(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  static V16 load_even(const Bf16* p) {
    auto lower = [](const Bf16* q) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
      return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    };
    return {lower(p), lower(p + 16)};
  }
  static V16 load_odd(const Bf16* p) {
    auto upper = [](const Bf16* q) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
      return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
    };
    return {upper(p), upper(p + 16)};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store(uint16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT));
  }
};

static inline V16 add(V16 a, V16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline V16 sub(V16 a, V16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline V16 mul(V16 a, V16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline V16 div(V16 a, V16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline V16 fma(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline V16 max(V16 a, V16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline V16 min(V16 a, V16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline V16 neg(V16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
static inline V16 zero_where_less(V16 a, V16 b, V16 x) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), x.lo),
          _mm256_andnot_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ), x.hi)};
}
static inline I16 round_to_int(V16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline V16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline V16 scale_pow2(V16 a, I16 n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), _mm256_slli_epi32(n.lo, 23))),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), _mm256_slli_epi32(n.hi, 23)))};
}
static inline uint32_t max_abs_bits(V16 a, V16 b) {
  __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i x = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                               _mm256_and_si256(_mm256_castps_si256(a.hi), mask));
  __m256i y = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(b.lo), mask),
                               _mm256_and_si256(_mm256_castps_si256(b.hi), mask));
  x = _mm256_max_epi32(x, y);
  __m128i z = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  z = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  z = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(z));
}
static inline int32_t reduce_add(I16 a) {
  __m256i s = _mm256_add_epi32(a.lo, a.hi);
  __m128i z = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  z = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  z = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0xb1));
  return _mm_cvtsi128_si32(z);
}
static inline void store_codes(I16 a, I16 b, int8_t* out, int32_t* sums) {
  __m256i words = _mm256_packs_epi32(a.lo, a.hi);   // per 128-bit half: a.lo, a.hi
  __m256i words2 = _mm256_packs_epi32(b.lo, b.hi);
  __m256i bytes = _mm256_packs_epi16(words, words2);
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  sums[0] = reduce_add(a);
  sums[1] = reduce_add(b);
}
static inline float reduce_add(V16 a) {
  __m256 x = _mm256_add_ps(a.lo, a.hi);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  y = _mm_add_ss(y, _mm_shuffle_ps(y, y, 1));
  return _mm_cvtss_f32(y);
}
static inline float reduce_max(V16 a) {
  __m256 x = _mm256_max_ps(a.lo, a.hi);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  y = _mm_max_ss(y, _mm_shuffle_ps(y, y, 1));
  return _mm_cvtss_f32(y);
}

}  // namespace avx2
}  // namespace forerun
