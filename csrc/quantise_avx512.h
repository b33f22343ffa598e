// Quantisation of eight groups of 32 inputs at a time: of eight rows, or eight neighbours of one row. What is left of a
// group's own work when it is alone, two reductions and two divisions, is shared by all eight.
#pragma once
#include <immintrin.h>

#include "layout.h"

namespace forerun {
namespace {

constexpr int kEight = 8;

// Eight quantised groups. `pairs` holds two groups a vector; lane l of 128 bits has [first group's quad l, its quad
// 4 + l, second group's quad l, its quad 4 + l].
struct EightGroups {
  __m512i pairs[kEight / 2];
  __m256 scale;
  uint32_t non_finite;  // bit i: group i holds a NaN or an infinity, and its codes mean nothing
};

// The largest magnitudes of eight groups, as bits of a float; integers, so that a NaN is larger than all numbers.
inline __m256i largest_magnitudes(const __m512 (&a)[kEight], const __m512 (&b)[kEight]) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512i m[kEight];
  for (int i = 0; i < kEight; i++)
    m[i] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a[i]), mask),
                            _mm512_and_si512(_mm512_castps_si512(b[i]), mask));
  __m512i two[4], four[2];
  for (int i = 0; i < 4; i++)
    two[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]),
                              _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    four[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  __m512i x = _mm512_max_epi32(_mm512_shuffle_i32x4(four[0], four[1], 0x44),
                               _mm512_shuffle_i32x4(four[0], four[1], 0xee));
  x = _mm512_max_epi32(x, _mm512_shuffle_i32x4(x, x, 0xb1));
  return _mm512_castsi512_si256(_mm512_shuffle_i32x4(x, x, 0x08));
}

inline void round_groups(const __m512 (&a)[kEight], const __m512 (&b)[kEight], const float* inv, __m512i* pairs) {
  __m512i words[kEight];
#pragma GCC unroll 8
  for (int i = 0; i < kEight; i++) {
    const __m512 by = _mm512_set1_ps(inv[i]);
    words[i] = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(a[i], by)),
                                  _mm512_cvtps_epi32(_mm512_mul_ps(b[i], by)));
  }
#pragma GCC unroll 4
  for (int i = 0; i < kEight / 2; i++) pairs[i] = _mm512_packs_epi16(words[2 * i], words[2 * i + 1]);
}

// Group i starts at x + i * stride; groups past `num` are taken to be the last one.
inline EightGroups quantise_eight(const float* x, size_t stride, int num) {
  __m512 a[kEight], b[kEight];
#pragma GCC unroll 8
  for (int i = 0; i < kEight; i++) {
    const float* group = x + static_cast<size_t>(i < num ? i : num - 1) * stride;
    a[i] = _mm512_loadu_ps(group);
    b[i] = _mm512_loadu_ps(group + 16);
  }
  EightGroups out;
  const __m256i bits = largest_magnitudes(a, b);
  const __m256 amax = _mm256_castsi256_ps(bits);
  const __mmask8 is_finite = _mm256_cmplt_epi32_mask(bits, _mm256_set1_epi32(0x7f800000));
  // Below 1e-30 the reciprocal could leave the float range; such a group is zero.
  const __mmask8 is_wanted = _mm256_mask_cmp_ps_mask(is_finite, amax, _mm256_set1_ps(1e-30f), _CMP_GT_OQ);
  out.non_finite = static_cast<uint8_t>(~is_finite) & ((1u << num) - 1);
  out.scale = _mm256_maskz_div_ps(is_wanted, amax, _mm256_set1_ps(127.0f));
  alignas(32) float inv[kEight];
  _mm256_store_ps(inv, _mm256_maskz_div_ps(is_wanted, _mm256_set1_ps(127.0f), amax));
  round_groups(a, b, inv, out.pairs);
  return out;
}

// The codes by quads: vector j has quad 2j of groups 0 to 7, then quad 2j + 1.
inline void transpose_quads(const __m512i* pairs, __m512i (&quads)[4]) {
  const __m512i low = _mm512_setr_epi32(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(1));
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int half = 0; half < 2; half++) {  // quads 0 to 3, then 4 to 7, of four groups each
    const __m512i index = half ? high : low;
    const __m512i front = _mm512_permutex2var_epi32(pairs[0], index, pairs[1]);
    const __m512i back = _mm512_permutex2var_epi32(pairs[2], index, pairs[3]);
    quads[2 * half] = _mm512_permutex2var_epi64(front, first, back);
    quads[2 * half + 1] = _mm512_permutex2var_epi64(front, second, back);
  }
}

inline __m256i shifted_negative(__m256i x, int bits) {
  return _mm256_slli_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), x), bits);
}

// Scale, scaled sum and bias of the first `num` groups, side by side from `at` on. Returns the biases of their halves.
struct HalfBiases {
  __m256i half[2];
};
inline HalfBiases store_sums(const EightGroups& groups, const __m512i (&quads)[4], int num, const Acts& acts,
                             size_t at) {
  const __mmask8 mask = static_cast<__mmask8>((1 << num) - 1);
  const __m512i ones = _mm512_set1_epi8(1);
  __m256i sums[2];
  for (int i = 0; i < 2; i++) {
    __m512i pair = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, quads[2 * i]);
    pair = _mm512_dpbusd_epi32(pair, ones, quads[2 * i + 1]);
    sums[i] = _mm256_add_epi32(_mm512_castsi512_si256(pair), _mm512_extracti64x4_epi64(pair, 1));
  }
  const __m256i sum = _mm256_add_epi32(sums[0], sums[1]);
  _mm256_mask_storeu_ps(acts.scale + at, mask, groups.scale);
  _mm256_mask_storeu_ps(acts.scaled_sum + at, mask, _mm256_mul_ps(groups.scale, _mm256_cvtepi32_ps(sum)));
  _mm256_mask_storeu_epi32(acts.bias + at, mask, shifted_negative(sum, 7));
  return {{shifted_negative(sums[0], 5), shifted_negative(sums[1], 5)}};
}

// Half biases of rows that share a group: all first halves, then all second ones `mr` further on.
inline void store_half_biases(const HalfBiases& biases, int num, size_t mr, int32_t* out) {
  const __mmask8 mask = static_cast<__mmask8>((1 << num) - 1);
  for (size_t half = 0; half < 2; half++) _mm256_mask_storeu_epi32(out + half * mr, mask, biases.half[half]);
}

// Those of neighbouring groups of one row: both halves of the first, then of the next.
inline void store_half_biases_alone(const HalfBiases& biases, int num, int32_t* out) {
  const __m256i low = _mm256_unpacklo_epi32(biases.half[0], biases.half[1]);   // groups 0, 1, 4, 5
  const __m256i high = _mm256_unpackhi_epi32(biases.half[0], biases.half[1]);  // 2, 3, 6, 7
  const uint32_t mask = (1u << 2 * num) - 1;
  _mm256_mask_storeu_epi32(out, static_cast<__mmask8>(mask), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_mask_storeu_epi32(out + 8, static_cast<__mmask8>(mask >> 8), _mm256_permute2x128_si256(low, high, 0x31));
}

// Codes group by group, `num` of them, `stride` bytes apart.
inline void store_groups(const EightGroups& groups, int num, int8_t* codes, size_t stride) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int i = 0; i < num; i++) {
    const __m512i pair = _mm512_permutexvar_epi32(in_order, groups.pairs[i / 2]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + static_cast<size_t>(i) * stride),
                        i % 2 ? _mm512_extracti64x4_epi64(pair, 1) : _mm512_castsi512_si256(pair));
  }
}

// Codes as [quad][mr groups][4], `mask` of the groups.
inline void store_quads(const __m512i (&quads)[4], __mmask8 mask, size_t mr, int8_t* codes) {
  if (mr == kEight && mask == 0xff) {
    for (int j = 0; j < 4; j++) _mm512_storeu_si512(codes + j * 64, quads[j]);
    return;
  }
  for (size_t j = 0; j < 4; j++) {
    _mm256_mask_storeu_epi32(codes + 2 * j * mr * 4, mask, _mm512_castsi512_si256(quads[j]));
    _mm256_mask_storeu_epi32(codes + (2 * j + 1) * mr * 4, mask, _mm512_extracti64x4_epi64(quads[j], 1));
  }
}

// A row in a block of its own: its groups lie side by side.
inline uint32_t quantise_alone(const float* x, const Acts& acts, int row, int group, int num_groups) {
  const int block = row / acts.block_rows;
  int8_t* codes = acts.codes + static_cast<size_t>(block) * acts.block_rows * acts.inputs;
  uint32_t non_finite = 0;
  for (int i = 0; i < num_groups; i += kEight) {
    const int num = num_groups - i < kEight ? num_groups - i : kEight;
    const EightGroups groups = quantise_eight(x + i * kGroup, kGroup, num);
    __m512i quads[4];
    transpose_quads(groups.pairs, quads);
    const size_t at = acts.group_at(block) + static_cast<size_t>(group + i);
    store_half_biases_alone(store_sums(groups, quads, num, acts, at), num, acts.half_bias + 2 * at);
    store_groups(groups, num, codes + (group + i) * kGroup, kGroup);
    non_finite |= groups.non_finite;
  }
  return non_finite != 0;
}

inline uint32_t quantise_rows_avx512(const float* x, size_t ldx, int num_rows, const Acts& acts, int row, int group,
                                     int num_groups) {
  const int block = row / acts.block_rows;
  const bool is_amx = acts.block_rows == kAmxRows;
  if (!is_amx && acts.block_size(block) == 1) return quantise_alone(x, acts, row, group, num_groups);
  const size_t in_block = static_cast<size_t>(row - block * acts.block_rows);
  const size_t mr = static_cast<size_t>(is_amx ? kAmxRows : acts.block_size(block));
  int8_t* codes = acts.codes + static_cast<size_t>(block) * acts.block_rows * acts.inputs;
  const __mmask8 mask = static_cast<__mmask8>((1 << num_rows) - 1);
  uint32_t non_finite = 0;
  for (int i = 0; i < num_groups; i++) {
    const size_t g = static_cast<size_t>(group + i);
    const EightGroups groups = quantise_eight(x + i * kGroup, ldx, num_rows);
    __m512i quads[4];
    transpose_quads(groups.pairs, quads);
    const size_t at = acts.group_at(block) + g * mr;
    const HalfBiases biases = store_sums(groups, quads, num_rows, acts, at + in_block);
    store_half_biases(biases, num_rows, mr, acts.half_bias + 2 * at + in_block);
    if (is_amx)
      store_groups(groups, num_rows, codes + (g * mr + in_block) * kGroup, kGroup);
    else
      store_quads(quads, mask, mr, codes + g * kGroup * mr + in_block * 4);
    non_finite |= groups.non_finite;
  }
  return non_finite;
}

}  // namespace
}  // namespace forerun
