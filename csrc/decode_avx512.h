// Codes and scales of the packed formats as AVX-512 vectors; what the VNNI and the AMX products have in common.
#pragma once
#include <immintrin.h>

#include "layout.h"

namespace forerun {
namespace {

inline __m512 load_half16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

// Quads 2j and 2j + 1 of a group as the bytes that a product takes: the file's code, of offset formats w + 128.
template <Format F>
inline void decode_quads(const uint8_t* codes, int j, __m512i* lo, __m512i* hi) {
  if constexpr (code_bits(F) == 8) {
    *lo = _mm512_load_si512(codes + 2 * j * 64);
    *hi = _mm512_load_si512(codes + (2 * j + 1) * 64);
    return;
  }
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i v = _mm512_load_si512(codes + j * 64);
  *lo = _mm512_and_si512(v, nibble);
  *hi = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
  const uint8_t* high = codes + code_bytes(Format::Q4);
  if constexpr (code_bits(F) == 5) {
    const __m512i sixteen = _mm512_set1_epi8(16);
    if constexpr (is_offset(F)) {  // x - 16 + 128 = x + 0x70
      *lo = _mm512_or_si512(*lo, _mm512_set1_epi8(0x70));
      *hi = _mm512_or_si512(*hi, _mm512_set1_epi8(0x70));
    }
    uint64_t bits[2];
    __builtin_memcpy(bits, high + 16 * j, 16);
    *lo = _mm512_mask_add_epi8(*lo, _cvtu64_mask64(bits[0]), *lo, sixteen);
    *hi = _mm512_mask_add_epi8(*hi, _cvtu64_mask64(bits[1]), *hi, sixteen);
  }
  if constexpr (code_bits(F) == 6) {
    const __m512i pairs = _mm512_load_si512(high + j / 2 * 64), mask = _mm512_set1_epi8(0x30);
    const __m512i first = j % 2 ? pairs : _mm512_slli_epi16(pairs, 4);
    const __m512i second = j % 2 ? _mm512_srli_epi16(pairs, 2) : _mm512_slli_epi16(pairs, 2);
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    *lo = _mm512_ternarylogic_epi32(*lo, first, mask, kOrAnd);
    *hi = _mm512_ternarylogic_epi32(*hi, second, mask, kOrAnd);
  }
}

// The scales of a group of a tile. `min` is what is subtracted in K formats, else what is added.
template <Format F>
struct Scales {
  __m512 scale;
  __m512 min;
  __m512 halves[2];
};

inline __m512 load_bytes16(const uint8_t* p, bool is_signed) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

template <Format F>
inline Scales<F> load_scales(const uint8_t* tile, size_t g) {
  Scales<F> s;
  const uint8_t* own = tile + scales_at(F, g);
  const uint8_t* halfs = tile + supers_at(F, g);
  s.scale = load_half16(halfs);
  if constexpr (has_min(F)) s.min = load_half16(halfs + 32);
  if constexpr (is_halved(F)) {
    s.halves[0] = load_bytes16(own, true);
    s.halves[1] = load_bytes16(own + 16, true);
  } else if constexpr (is_super(F)) {  // exact: 11 bits times 6
    s.scale = _mm512_mul_ps(s.scale, load_bytes16(own, false));
    s.min = _mm512_mul_ps(s.min, load_bytes16(own + 16, false));
  }
  return s;
}

// What an integer sum begins with.
template <Format F>
inline __m512i first_sum(const int32_t* bias, const int32_t* half_bias) {
  if constexpr (is_halved(F)) return _mm512_set1_epi32(*half_bias);
  if constexpr (is_offset(F)) return _mm512_set1_epi32(*bias);
  return _mm512_setzero_si512();
}

// The first half's integer times its scale: below 2^23, so exact.
template <Format F>
inline __m512 first_half(__m512i sum, const Scales<F>& s) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), s.halves[0]);
}

// A group's integer as a float: of halved formats both halves times their scales, below 2^24 together.
template <Format F>
inline __m512 group_sum(__m512i sum, __m512 half, const Scales<F>& s) {
  const __m512 x = _mm512_cvtepi32_ps(sum);
  if constexpr (is_halved(F)) return _mm512_fmadd_ps(x, s.halves[1], half);
  return x;
}

template <Format F>
inline __m512 add_min(const Scales<F>& s, __m512 scaled_sum, __m512 f) {
  if constexpr (is_super(F)) return _mm512_fnmadd_ps(s.min, scaled_sum, f);
  return _mm512_fmadd_ps(s.min, scaled_sum, f);
}

}  // namespace
}  // namespace forerun
