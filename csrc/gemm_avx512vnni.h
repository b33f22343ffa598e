// AVX512-VNNI: weights are the unsigned register operand of vpdpbusd, activations the signed broadcast operand.
#pragma once
#include <immintrin.h>

#include "layout.h"

namespace forerun {
namespace {

inline __m512 load_half16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

inline __m512i broadcast_quad(const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// Weights are fetched ahead of their use: a tile group is a few dozen cycles of work, far less than the latency of memory, so
// the hardware's own prefetcher alone leaves the two adding up instead of overlapping.
//
// Few rows wait for memory only, and for them the nearest cache is the best. More rows leave little time for it: fetches to
// L1 in one stream would wait for its few line buffers, with the load ports behind them, so those go further ahead and to L2.
template <int MR>
constexpr bool kIsFetchedToL1 = MR <= 4;
template <int MR>
constexpr size_t kFetchBytes = kIsFetchedToL1<MR> ? 2048 : 8192;

template <int MR>
inline void fetch(const uint8_t* p) {
  if constexpr (kIsFetchedToL1<MR>)
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  else  // stays where it is written; compilers gather what nothing depends on at the top of the loop
    asm volatile("prefetcht1 %0" ::"m"(*p));
}

// MR rows times RB tiles. One float chain per output over ascending groups: minimum first, then the scaled dot.
template <int MR, int RB, bool kIsQ4>
inline void gemm_block(const PackedMatrix& w, int tile, const int8_t* a, const float* xs, const float* xsum,
                       const int32_t* bias, float* out, size_t ldo) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t* codes = w.tile(tile) + w.codes_at;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(w.tile(tile));
  const size_t next = w.tile_bytes, next_scale = w.tile_bytes / 2;
  __m512 f[RB][MR];
  for (int r = 0; r < RB; r++)
    for (int m = 0; m < MR; m++) f[r][m] = _mm512_setzero_ps();
  // A tile is fetched as the one stream that it is in memory, scales and codes alike, and past its end goes on with the tile
  // that this stream takes next; so no line waits for memory but the very first.
  constexpr size_t kGroupBytes = kIsQ4 ? 5 * 64 : 8 * 64 + 32;
  size_t fetched = w.codes_at + kFetchBytes<MR>;
  for (int g = 0; g < w.groups; g++, fetched += kGroupBytes) {
    const uint8_t* ahead = w.tile(tile) + (fetched < next ? fetched : fetched + (RB - 1) * next);
    for (int r = 0; r < RB; r++) fetch<MR>(ahead + r * next + kGroupBytes - 64);
    __m512i acc[RB][MR];
    for (int r = 0; r < RB; r++)
      for (int m = 0; m < MR; m++)
        acc[r][m] = kIsQ4 ? _mm512_setzero_si512() : _mm512_set1_epi32(bias[g * MR + m]);
    if constexpr (kIsQ4) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        __m512i lo[RB], hi[RB];
        for (int r = 0; r < RB; r++) {
          fetch<MR>(ahead + r * next + static_cast<size_t>(j) * 64);
          __m512i v = _mm512_load_si512(codes + r * next + static_cast<size_t>(j) * 64);
          lo[r] = _mm512_and_si512(v, nibble);
          hi[r] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
        }
        for (int m = 0; m < MR; m++) {
          const __m512i x = broadcast_quad(a + ((2 * j) * MR + m) * 4);
          for (int r = 0; r < RB; r++) acc[r][m] = _mm512_dpbusd_epi32(acc[r][m], lo[r], x);
        }
        for (int m = 0; m < MR; m++) {
          const __m512i x = broadcast_quad(a + ((2 * j + 1) * MR + m) * 4);
          for (int r = 0; r < RB; r++) acc[r][m] = _mm512_dpbusd_epi32(acc[r][m], hi[r], x);
        }
      }
      codes += 4 * 64;
    } else {
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; q++) {
        __m512i v[RB];
        for (int r = 0; r < RB; r++) {
          fetch<MR>(ahead + r * next + static_cast<size_t>(q) * 64);
          v[r] = _mm512_load_si512(codes + r * next + static_cast<size_t>(q) * 64);
        }
        for (int m = 0; m < MR; m++) {
          const __m512i x = broadcast_quad(a + (q * MR + m) * 4);
          for (int r = 0; r < RB; r++) acc[r][m] = _mm512_dpbusd_epi32(acc[r][m], v[r], x);
        }
      }
      codes += kQuads * 64;
    }
    a += kQuads * MR * 4;
    for (int r = 0; r < RB; r++) {
      const __m512 s = load_half16(scales + r * next_scale);
      if constexpr (kIsQ4) {
        const __m512 mn = load_half16(scales + r * next_scale + 16);
        for (int m = 0; m < MR; m++) f[r][m] = _mm512_fmadd_ps(mn, _mm512_set1_ps(xsum[g * MR + m]), f[r][m]);
      }
      for (int m = 0; m < MR; m++)
        f[r][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][m]), _mm512_mul_ps(s, _mm512_set1_ps(xs[g * MR + m])),
                                  f[r][m]);
    }
    scales += kIsQ4 ? 32 : 16;
  }
  for (int r = 0; r < RB; r++)
    for (int m = 0; m < MR; m++) _mm512_storeu_ps(out + m * ldo + 16 * r, f[r][m]);
}

// Tiles per microkernel: enough independent chains to hide the latency, few enough to stay in 32 registers.
template <int MR>
constexpr int tiles_at_once() {
  return MR <= 2 ? 4 : MR <= 4 ? 3 : 1;
}

template <int MR>
void gemm_rows(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out, size_t ldo) {
  constexpr int RB = tiles_at_once<MR>();
  const int8_t* a = acts.block_codes(block);
  const size_t at = acts.group_at(block);
  const float *xs = acts.scale + at, *xsum = acts.scaled_sum + at;
  const int32_t* bias = acts.bias + at;
  int t = 0;
  if (w.format == Format::Q4) {
    for (; t + RB <= num_tiles; t += RB) gemm_block<MR, RB, true>(w, tile + t, a, xs, xsum, bias, out + 16 * t, ldo);
    for (; t < num_tiles; t++) gemm_block<MR, 1, true>(w, tile + t, a, xs, xsum, bias, out + 16 * t, ldo);
  } else {
    for (; t + RB <= num_tiles; t += RB) gemm_block<MR, RB, false>(w, tile + t, a, xs, xsum, bias, out + 16 * t, ldo);
    for (; t < num_tiles; t++) gemm_block<MR, 1, false>(w, tile + t, a, xs, xsum, bias, out + 16 * t, ldo);
  }
}

inline void gemm_rows_of(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out,
                         size_t ldo) {
  switch (acts.block_size(block)) {
    case 1: return gemm_rows<1>(w, tile, num_tiles, acts, block, out, ldo);
    case 2: return gemm_rows<2>(w, tile, num_tiles, acts, block, out, ldo);
    case 3: return gemm_rows<3>(w, tile, num_tiles, acts, block, out, ldo);
    case 4: return gemm_rows<4>(w, tile, num_tiles, acts, block, out, ldo);
    case 5: return gemm_rows<5>(w, tile, num_tiles, acts, block, out, ldo);
    case 6: return gemm_rows<6>(w, tile, num_tiles, acts, block, out, ldo);
    case 7: return gemm_rows<7>(w, tile, num_tiles, acts, block, out, ldo);
    default: return gemm_rows<8>(w, tile, num_tiles, acts, block, out, ldo);
  }
}

inline void gemm_quads(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo,
                       uint8_t*) {
  for (int block = 0; block < acts.num_blocks(); block++)
    gemm_rows_of(w, tile, num_tiles, acts, block, out + static_cast<size_t>(block) * kBlockRows * ldo, ldo);
}

}  // namespace
}  // namespace forerun
