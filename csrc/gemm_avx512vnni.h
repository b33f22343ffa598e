// AVX512-VNNI: weights are the unsigned register operand of vpdpbusd, activations the signed broadcast operand.
#pragma once
#include <immintrin.h>

#include "decode_avx512.h"
#include "gemm_blocks.h"
#include "prefetch.h"

namespace forerun {
namespace {

inline __m512i broadcast_quad(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// Weights are fetched ahead of their use: a tile group is a few dozen cycles of work, far less than the latency of
// memory, so the hardware's own prefetcher alone leaves the two adding up instead of overlapping.
//
// Few rows wait for memory only, and for them the nearest cache is the best. More rows leave little time for it:
// fetches to L1 in one stream would wait for its few line buffers, with the load ports behind them, so those go further
// ahead and to L2.
template <int MR>
constexpr bool kIsFetchedToL1 = MR <= 4;
template <int MR>
constexpr size_t kFetchBytes = kIsFetchedToL1<MR> ? 2048 : 8192;

template <int MR>
inline void fetch(const uint8_t* p) {
  if constexpr (kIsFetchedToL1<MR>)
    fetch_to_l1(p);
  else
    fetch_to_l2(p);
}

// What the rows of one block of activations have in common with each tile.
struct BlockActs {
  const int8_t* codes;
  const float *scale, *scaled_sum;
  const int32_t *bias, *half_bias;

  BlockActs(const Acts& acts, int block)
      : codes(acts.block_codes(block)),
        scale(acts.scale + acts.group_at(block)),
        scaled_sum(acts.scaled_sum + acts.group_at(block)),
        bias(acts.bias + acts.group_at(block)),
        half_bias(acts.half_bias + 2 * acts.group_at(block)) {}
};

// MR rows times RB tiles. One float chain per output over ascending groups: minimum first, then the scaled dot.
template <int MR, int RB, Format F>
inline void gemm_block(const PackedMatrix& w, int tile, const BlockActs& x, float* out, size_t ldo) {
  constexpr size_t kCodeBytes = code_bytes(F), kLines = kCodeBytes / 64;
  constexpr size_t kGroupBytes = kCodeBytes + scale_bytes(F) + super_bytes(F) / kSuperGroups;
  const size_t next = w.tile_bytes;
  const uint8_t* tiles = w.tile(tile);
  __m512 f[RB][MR];
  for (int r = 0; r < RB; r++)
    for (int m = 0; m < MR; m++) f[r][m] = _mm512_setzero_ps();
  // A tile is fetched as the one stream that it is in memory, scales and codes alike, and past its end goes on with the
  // tile that this stream takes next; so no line waits for memory but the very first.
  size_t fetched = w.codes_at + kFetchBytes<MR>;
  for (int g = 0; g < w.groups; g++, fetched += kGroupBytes) {
    const uint8_t* ahead = tiles + (fetched < next ? fetched : fetched + (RB - 1) * next);
    for (int r = 0; r < RB; r++)
      for (size_t line = kLines; line * 64 < kGroupBytes; line++) fetch<MR>(ahead + r * next + line * 64);
    const uint8_t* codes = tiles + w.codes_at + static_cast<size_t>(g) * kCodeBytes;
    const int8_t* a = x.codes + static_cast<size_t>(g) * kGroup * MR;
    __m512i acc[RB][MR];
    __m512 halves[RB][MR];  // of halved formats: integers, exact in float
    Scales<F> s[RB];
    for (int r = 0; r < RB; r++) s[r] = load_scales<F>(tiles + r * next, static_cast<size_t>(g));
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      if (j == 0 || (is_halved(F) && j == 2)) {
        const int32_t* half_bias = x.half_bias + (2 * g + j / 2) * MR;
        for (int r = 0; r < RB; r++)
          for (int m = 0; m < MR; m++) acc[r][m] = first_sum<F>(x.bias + g * MR + m, half_bias + m);
      }
      __m512i lo[RB], hi[RB];
      for (int r = 0; r < RB; r++) {
        for (size_t line = j * kLines / 4; line < (j + 1) * kLines / 4; line++) fetch<MR>(ahead + r * next + line * 64);
        decode_quads<F>(codes + r * next, j, &lo[r], &hi[r]);
      }
      for (int m = 0; m < MR; m++) {
        const __m512i quad = broadcast_quad(a + ((2 * j) * MR + m) * 4);
        for (int r = 0; r < RB; r++) acc[r][m] = _mm512_dpbusd_epi32(acc[r][m], lo[r], quad);
      }
      for (int m = 0; m < MR; m++) {
        const __m512i quad = broadcast_quad(a + ((2 * j + 1) * MR + m) * 4);
        for (int r = 0; r < RB; r++) acc[r][m] = _mm512_dpbusd_epi32(acc[r][m], hi[r], quad);
      }
      if (is_halved(F) && j == 1)
        for (int r = 0; r < RB; r++)
          for (int m = 0; m < MR; m++) halves[r][m] = first_half<F>(acc[r][m], s[r]);
    }
    for (int r = 0; r < RB; r++) {
      if constexpr (has_min(F))
        for (int m = 0; m < MR; m++) f[r][m] = add_min<F>(s[r], _mm512_set1_ps(x.scaled_sum[g * MR + m]), f[r][m]);
      for (int m = 0; m < MR; m++)
        f[r][m] = _mm512_fmadd_ps(group_sum<F>(acc[r][m], halves[r][m], s[r]),
                                  _mm512_mul_ps(s[r].scale, _mm512_set1_ps(x.scale[g * MR + m])), f[r][m]);
    }
  }
  for (int r = 0; r < RB; r++)
    for (int m = 0; m < MR; m++) _mm512_storeu_ps(out + m * ldo + 16 * r, f[r][m]);
}

// Tiles per microkernel: enough independent chains to hide the latency, few enough to stay in 32 registers.
template <int MR>
constexpr int tiles_at_once() {
  return MR <= 1 ? 4 : MR <= 4 ? 3 : 1;
}

struct Rows {
  template <Format F, int MR>
  static void multiply(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out,
                       size_t ldo) {
    constexpr int RB = tiles_at_once<MR>();
    const BlockActs x(acts, block);
    int t = 0;
    for (; t + RB <= num_tiles; t += RB) gemm_block<MR, RB, F>(w, tile + t, x, out + 16 * t, ldo);
    for (; t < num_tiles; t++) gemm_block<MR, 1, F>(w, tile + t, x, out + 16 * t, ldo);
  }
};

inline void gemm_quads(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo,
                       uint8_t*) {
  gemm_blocks<Rows>(w, tile, num_tiles, acts, out, ldo);
}

}  // namespace
}  // namespace forerun
