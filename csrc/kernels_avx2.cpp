// AVX2: u4 times s8 with maddubs. Two 8-row halves per tile. Wider codes are two parts of at most four bits each.
#include <immintrin.h>

#include "gemm_blocks.h"
#include "kernels.h"
#include "simd_avx2.h"
#include "float_kernels.h"

namespace forerun {
namespace {

// Bytes that the weights are fetched ahead, to L2: see gemm_avx512vnni.h.
constexpr size_t kFetchBytes = 8192;

// Quad `q` of 8 output rows: its low four bits, and of wider codes what lies above them.
template <Format F>
inline void decode_quad(const uint8_t* codes, int q, int rows, __m256i* low, __m256i* high) {
  const __m256i nibble = _mm256_set1_epi8(15);
  auto load = [&](const uint8_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p + 32 * rows)); };
  if constexpr (code_bits(F) == 8) {
    const __m256i v = load(codes + q * 64);
    *low = _mm256_and_si256(v, nibble);
    *high = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
    return;
  }
  const __m256i v = load(codes + q / 2 * 64);
  *low = _mm256_and_si256(q % 2 ? _mm256_srli_epi16(v, 4) : v, nibble);
  const uint8_t* above = codes + code_bytes(Format::Q4);
  if constexpr (code_bits(F) == 5) {
    int32_t word;
    __builtin_memcpy(&word, above + q * 8 + rows * 4, 4);
    // Each byte gets the eight bits that hold its own, then its own.
    const __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32(word), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);  // 0 or -1
    *high = _mm256_sub_epi8(_mm256_set1_epi8(is_offset(F) ? 7 : 0), is_set);     // x - 16 + 128 = x + 16 * 7
  }
  if constexpr (code_bits(F) == 6)
    *high = _mm256_and_si256(_mm256_srli_epi16(load(above + q / 4 * 64), q % 4 * 2), _mm256_set1_epi8(3));
}

// The scales of 8 output rows. `min` is what is subtracted in K formats, else what is added.
template <Format F>
struct Scales {
  __m256 scale, min, halves[2];

  Scales(const uint8_t* tile, size_t g, int rows) {
    auto half8 = [&](const uint8_t* p) {
      return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * rows)));
    };
    auto bytes8 = [&](const uint8_t* p) {
      const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * rows));
      return _mm256_cvtepi32_ps(is_halved(F) ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
    };
    const uint8_t* own = tile + scales_at(F, g);
    const uint8_t* halfs = tile + supers_at(F, g);
    scale = half8(halfs);
    if constexpr (has_min(F)) min = half8(halfs + 32);
    if constexpr (is_halved(F)) {
      halves[0] = bytes8(own);
      halves[1] = bytes8(own + 16);
    } else if constexpr (is_super(F)) {
      scale = _mm256_mul_ps(scale, bytes8(own));
      min = _mm256_mul_ps(min, bytes8(own + 16));
    }
  }
};

// Integer products of the quads [begin, end). Eight u4 x s8 pair sums stay below 8 * 15 * 127 * 2 = 30480, inside s16.
template <int MR, Format F>
inline void multiply_quads(const uint8_t* codes, int rows, const int8_t* a, int begin, int end, __m256i (&dots)[MR]) {
  __m256i low_sums[MR], high_sums[MR];
  for (int m = 0; m < MR; m++) low_sums[m] = high_sums[m] = _mm256_setzero_si256();
  for (int q = begin; q < end; q++) {
    __m256i low, high;
    decode_quad<F>(codes, q, rows, &low, &high);
    for (int m = 0; m < MR; m++) {
      int32_t word;
      __builtin_memcpy(&word, a + (q * MR + m) * 4, 4);
      const __m256i x = _mm256_set1_epi32(word);
      low_sums[m] = _mm256_add_epi16(low_sums[m], _mm256_maddubs_epi16(low, x));
      if constexpr (code_bits(F) > 4) high_sums[m] = _mm256_add_epi16(high_sums[m], _mm256_maddubs_epi16(high, x));
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
  for (int m = 0; m < MR; m++) {
    dots[m] = _mm256_madd_epi16(low_sums[m], ones);
    if constexpr (code_bits(F) > 4)
      dots[m] = _mm256_add_epi32(dots[m], _mm256_slli_epi32(_mm256_madd_epi16(high_sums[m], ones), 4));
  }
}

template <int MR, Format F>
inline void gemm_half(const PackedMatrix& w, const uint8_t* tile, int rows, const Acts& acts, int block, float* out,
                      size_t ldo) {
  constexpr size_t kGroupBytes = code_bytes(F) + scale_bytes(F) + super_bytes(F) / kSuperGroups;
  const uint8_t* codes = tile + w.codes_at;
  const uint8_t* ahead = codes + kFetchBytes;
  const int8_t* a = acts.block_codes(block);
  const size_t at = acts.group_at(block);
  const float *xs = acts.scale + at, *xsum = acts.scaled_sum + at;
  const int32_t *bias = acts.bias + at, *half_bias = acts.half_bias + 2 * at;
  __m256 f[MR];
  for (int m = 0; m < MR; m++) f[m] = _mm256_setzero_ps();
  for (int g = 0; g < w.groups; g++, ahead += kGroupBytes, codes += code_bytes(F), a += kGroup * MR) {
    if (rows == 0)  // the other half reads the same lines
      for (size_t i = 0; i < kGroupBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + i), _MM_HINT_T1);
    const Scales<F> s(tile, static_cast<size_t>(g), rows);
    __m256i dots[MR];
    __m256 sums[MR];
    multiply_quads<MR, F>(codes, rows, a, 0, is_halved(F) ? kQuads / 2 : kQuads, dots);
    for (int m = 0; m < MR; m++) {
      if constexpr (is_halved(F)) dots[m] = _mm256_add_epi32(dots[m], _mm256_set1_epi32(half_bias[2 * g * MR + m]));
      if constexpr (is_offset(F)) dots[m] = _mm256_add_epi32(dots[m], _mm256_set1_epi32(bias[g * MR + m]));
      sums[m] = _mm256_cvtepi32_ps(dots[m]);
    }
    if constexpr (is_halved(F)) {  // integers below 2^24: exact
      for (int m = 0; m < MR; m++) sums[m] = _mm256_mul_ps(sums[m], s.halves[0]);
      multiply_quads<MR, F>(codes, rows, a, kQuads / 2, kQuads, dots);
      for (int m = 0; m < MR; m++) {
        dots[m] = _mm256_add_epi32(dots[m], _mm256_set1_epi32(half_bias[(2 * g + 1) * MR + m]));
        sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[m]), s.halves[1], sums[m]);
      }
    }
    for (int m = 0; m < MR; m++) {
      const __m256 x = _mm256_set1_ps(xsum[g * MR + m]);
      if constexpr (has_min(F)) f[m] = is_super(F) ? _mm256_fnmadd_ps(s.min, x, f[m]) : _mm256_fmadd_ps(s.min, x, f[m]);
      f[m] = _mm256_fmadd_ps(sums[m], _mm256_mul_ps(s.scale, _mm256_set1_ps(xs[g * MR + m])), f[m]);
    }
  }
  for (int m = 0; m < MR; m++) _mm256_storeu_ps(out + m * ldo + 8 * rows, f[m]);
}

struct Rows {
  template <Format F, int MR>
  static void multiply(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out,
                       size_t ldo) {
    for (int t = 0; t < num_tiles; t++)
      for (int rows = 0; rows < 2; rows++)
        gemm_half<MR, F>(w, w.tile(tile + t), rows, acts, block, out + 16 * t, ldo);
  }
};

void gemm_quant(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo, uint8_t*) {
  gemm_blocks<Rows>(w, tile, num_tiles, acts, out, ldo);
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
