// Keys of several tokens into a page of float16 at once: sixteen dimensions of up to sixteen tokens are transposed in
// registers, where one token at a time would store every number alone.
#pragma once
#include <immintrin.h>

#include "float_kernels.h"
#include "simd_avx512.h"

namespace forerun {
namespace {

// Transposes 16 x 16 words. In: tokens[i] has 16 dimensions of token i. Out: rows[d] has dimension d of all tokens in
// its lower half, dimension 8 + d in its upper half.
inline void transpose_words(const __m256i (&tokens)[16], __m512i (&rows)[8]) {
  __m512i x[8], y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(tokens[i]), tokens[i + 8], 1);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // pairs of tokens
    y[i] = _mm512_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
    y[4 + i] = _mm512_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // fours: x[2i], x[2i + 1] from tokens 0 to 3, then from tokens 4 to 7
    const int half = i / 2 * 4, pair = i % 2 * 2;
    x[half + pair] = _mm512_unpacklo_epi32(y[half + pair], y[half + pair + 1]);
    x[half + pair + 1] = _mm512_unpackhi_epi32(y[half + pair], y[half + pair + 1]);
  }
  // Lanes of 128 bits are now dimensions [0, 8) and [8, 16) of tokens 0 to 7, then the same of tokens 8 to 15.
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const int half = i / 2 * 4, odd = i % 2;
    const __m512i low = _mm512_unpacklo_epi64(x[half + odd], x[half + 2 + odd]);
    const __m512i high = _mm512_unpackhi_epi64(x[half + odd], x[half + 2 + odd]);
    rows[half + 2 * odd] = _mm512_shuffle_i32x4(low, low, 0xd8);
    rows[half + 2 * odd + 1] = _mm512_shuffle_i32x4(high, high, 0xd8);
  }
}

inline void append_keys_avx512(const KvLayer& kv, int page, int lane, int num_tokens, int kv_head, const float* k,
                               size_t ldk) {
  if (kv.is_f32 || num_tokens == 1 || kv.head_dim % 16 != 0)
    return append_keys<avx512::V16>(kv, page, lane, num_tokens, kv_head, k, ldk);
  uint16_t* keys = static_cast<uint16_t*>(kv.data) + kv.offset(page, kv_head);
  const __mmask16 mask = static_cast<__mmask16>(((1u << num_tokens) - 1) << lane);
  for (int d = 0; d < kv.head_dim; d += 16) {
    __m256i tokens[16];
    for (int i = 0; i < 16; i++) tokens[i] = _mm256_setzero_si256();
    for (int i = 0; i < num_tokens; i++) {
      const __m512 token = _mm512_loadu_ps(k + static_cast<size_t>(i) * ldk + d);
      tokens[lane + i] = _mm512_cvtps_ph(token, _MM_FROUND_TO_NEAREST_INT);
    }
    __m512i rows[8];
    transpose_words(tokens, rows);
    uint16_t* out = keys + static_cast<size_t>(d) * kPageTokens;
    for (int i = 0; i < 8; i++) {
      _mm256_mask_storeu_epi16(out + i * kPageTokens, mask, _mm512_castsi512_si256(rows[i]));
      _mm256_mask_storeu_epi16(out + (i + 8) * kPageTokens, mask, _mm512_extracti64x4_epi64(rows[i], 1));
    }
  }
}

}  // namespace
}  // namespace forerun
