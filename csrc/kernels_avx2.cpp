// AVX2: u4 times s8 with maddubs. Two 8-row halves per tile. A q8 code is two nibbles, so one routine serves both.
#include <immintrin.h>

#include "kernels.h"
#include "simd_avx2.h"
#include "float_kernels.h"

namespace forerun {
namespace {

// Bytes that the weights are fetched ahead, to L2: see gemm_avx512vnni.h.
constexpr size_t kFetchBytes = 8192;

// Eight u4 x s8 pair sums stay below 8 * 15 * 127 * 2 = 30480, inside s16.
template <int MR, bool kIsQ4>
inline void gemm_half(const PackedMatrix& w, const uint8_t* tile, int half, const int8_t* a, const float* xs,
                      const float* xsum, const int32_t* bias, float* out, size_t ldo) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(tile) + 8 * half;
  const uint8_t* codes = tile + w.codes_at + 32 * half;
  __m256 f[MR];
  for (int m = 0; m < MR; m++) f[m] = _mm256_setzero_ps();
  constexpr size_t kGroupBytes = kIsQ4 ? 5 * 64 : 8 * 64 + 32;
  const uint8_t* ahead = tile + w.codes_at + kFetchBytes;
  for (int g = 0; g < w.groups; g++, ahead += kGroupBytes) {
    if (half == 0)  // the other half reads the same lines
      for (size_t i = 0; i < kGroupBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T1);
    __m256i lo_acc[MR], hi_acc[MR];  // q4 uses lo_acc alone
    for (int m = 0; m < MR; m++) lo_acc[m] = hi_acc[m] = _mm256_setzero_si256();
    const int8_t* ag = a + static_cast<size_t>(g) * kQuads * MR * 4;
    auto quad = [&](int q, int m) {
      int32_t word;
      __builtin_memcpy(&word, ag + (q * MR + m) * 4, 4);
      return _mm256_set1_epi32(word);
    };
    if constexpr (kIsQ4) {
      for (int j = 0; j < 4; j++) {
        __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + (g * 4 + j) * 64));
        __m256i lo = _mm256_and_si256(v, nibble), hi = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
        for (int m = 0; m < MR; m++) {
          lo_acc[m] = _mm256_add_epi16(lo_acc[m], _mm256_maddubs_epi16(lo, quad(2 * j, m)));
          lo_acc[m] = _mm256_add_epi16(lo_acc[m], _mm256_maddubs_epi16(hi, quad(2 * j + 1, m)));
        }
      }
    } else {
      for (int q = 0; q < kQuads; q++) {
        __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + (g * kQuads + q) * 64));
        __m256i lo = _mm256_and_si256(v, nibble), hi = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
        for (int m = 0; m < MR; m++) {
          lo_acc[m] = _mm256_add_epi16(lo_acc[m], _mm256_maddubs_epi16(lo, quad(q, m)));
          hi_acc[m] = _mm256_add_epi16(hi_acc[m], _mm256_maddubs_epi16(hi, quad(q, m)));
        }
      }
    }
    auto half8 = [&](int index) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + index)));
    };
    __m256 s = half8(kIsQ4 ? g * 32 : g * 16);
    for (int m = 0; m < MR; m++) {
      __m256i dot = _mm256_madd_epi16(lo_acc[m], ones);
      if constexpr (kIsQ4) {
        f[m] = _mm256_fmadd_ps(half8(g * 32 + 16), _mm256_set1_ps(xsum[g * MR + m]), f[m]);
      } else {
        dot = _mm256_add_epi32(dot, _mm256_slli_epi32(_mm256_madd_epi16(hi_acc[m], ones), 4));
        dot = _mm256_add_epi32(dot, _mm256_set1_epi32(bias[g * MR + m]));
      }
      f[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(s, _mm256_set1_ps(xs[g * MR + m])), f[m]);
    }
  }
  for (int m = 0; m < MR; m++) _mm256_storeu_ps(out + m * ldo + 8 * half, f[m]);
}

template <int MR>
void gemm_rows(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out, size_t ldo) {
  const int8_t* a = acts.block_codes(block);
  const size_t at = acts.group_at(block);
  for (int t = 0; t < num_tiles; t++) {
    for (int half = 0; half < 2; half++) {
      if (w.format == Format::Q4)
        gemm_half<MR, true>(w, w.tile(tile + t), half, a, acts.scale + at, acts.scaled_sum + at, acts.bias + at,
                            out + 16 * t, ldo);
      else
        gemm_half<MR, false>(w, w.tile(tile + t), half, a, acts.scale + at, acts.scaled_sum + at, acts.bias + at,
                             out + 16 * t, ldo);
    }
  }
}

void gemm_block(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out, size_t ldo) {
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

void gemm_quant(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo, uint8_t*) {
  for (int block = 0; block < acts.num_blocks(); block++)
    gemm_block(w, tile, num_tiles, acts, block, out + static_cast<size_t>(block) * kBlockRows * ldo, ldo);
}

KernelTable make_table() {
  KernelTable table = float_kernel_table<avx2::V16>("avx2");
  table.gemm_quant = gemm_quant;
  return table;
}

}  // namespace

const KernelTable& avx2_kernels() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace forerun
