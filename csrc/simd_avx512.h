// Sixteen float lanes as one AVX-512 register. Compile with -mavx512f -mavx512bw -mavx512vl -mavx512dq.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "half.h"

namespace forerun {
namespace avx512 {

struct I16 {
  __m512i v;
};

struct V16 {
  __m512 v;
  static constexpr int kChains = 24, kFloatRows = 12;
  static constexpr int kPairs = 12, kAttendChains = 24;

  static V16 set1(float x) { return {_mm512_set1_ps(x)}; }
  static V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static V16 load(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static V16 load_even(const Bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
  static V16 load_odd(const Bf16* p) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(uint16_t* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
};

static inline V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline V16 neg(V16 a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
static inline V16 zero_where_less(V16 a, V16 b, V16 x) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), x.v)};
}
static inline I16 round_to_int(V16 a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline V16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline V16 scale_pow2(V16 a, I16 n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
static inline uint32_t max_abs_bits(V16 a, V16 b) {
  __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512i x = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), mask),
                               _mm512_and_si512(_mm512_castps_si512(b.v), mask));
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(x));
}
static inline void store_codes(I16 a, I16 b, int8_t* out, int32_t* sums) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(a.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm512_cvtepi32_epi8(b.v));
  sums[0] = _mm512_reduce_add_epi32(a.v);
  sums[1] = _mm512_reduce_add_epi32(b.v);
}
static inline float reduce_add(V16 a) {
  __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  y = _mm_add_ss(y, _mm_shuffle_ps(y, y, 1));
  return _mm_cvtss_f32(y);
}
static inline float reduce_max(V16 a) { return _mm512_reduce_max_ps(a.v); }

}  // namespace avx512
}  // namespace forerun
