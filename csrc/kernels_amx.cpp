// AMX int8 where a pass has rows enough to fill a tile; everything else is the AVX512-VNNI table. The group integers are
// the same, and so are the float chains. Compile with the flags of kernels_avx512vnni.cpp and -mamx-tile -mamx-int8.
#include "kernels.h"
#include "simd_avx512.h"
#include "float_kernels.h"
#include "gemm_avx512vnni.h"

namespace forerun {
namespace {

constexpr int kGroupsAhead = 4;  // groups whose tile products are under way while an earlier one is folded
constexpr int kRing = 8;         // a power of two above kGroupsAhead

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0, 1: int32 sums [rows][16 outputs]. 4, 5: activations [rows][32 inputs]. 6, 7: weights [8 quads][16 outputs][4].
void configure(int rows) {
  TileConfig config;
  for (int t = 0; t < 8; t++) {
    const bool is_acts = t == 4 || t == 5, is_weights = t == 6 || t == 7;
    config.rows[t] = static_cast<uint8_t>(is_weights ? kQuads : rows);
    config.colsb[t] = is_acts ? kGroup : 64;
  }
  // The intrinsic of some compilers hides all but the first bytes from the optimiser; this names the whole object.
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// Weight codes of one group as plain bytes, 512 of them.
inline void unpack_q4(const uint8_t* codes, uint8_t* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int j = 0; j < 4; j++) {
    const __m512i v = _mm512_load_si512(codes + j * 64);
    _mm512_store_si512(out + 2 * j * 64, _mm512_and_si512(v, nibble));
    _mm512_store_si512(out + (2 * j + 1) * 64, _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
  }
}

// The integer products of group g, stored to dots[MR][16]. Odd groups use the other set of tiles.
template <int kSet>
inline void issue(const int8_t* a, const uint8_t* codes, int g, int32_t* dots) {
  const int8_t* acts = a + static_cast<size_t>(g) * kAmxRows * kGroup;
  const uint8_t* weights = codes + static_cast<size_t>(g) * 512;
  if constexpr (kSet == 0) {
    _tile_zero(0);
    _tile_loadd(4, acts, kGroup);
    _tile_loadd(6, weights, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, dots, 64);
  } else {
    _tile_zero(1);
    _tile_loadd(5, acts, kGroup);
    _tile_loadd(7, weights, 64);
    _tile_dpbsud(1, 5, 7);
    _tile_stored(1, dots, 64);
  }
}

// Rows [0, MR) of one activation block times one tile.
template <int MR, bool kIsQ4>
void multiply_tile(const uint8_t* codes, const uint16_t* scales, int groups, const Acts& acts, int block, float* out,
                   size_t ldo) {
  const int8_t* a = acts.block_codes(block);
  const float *xs = acts.scale + acts.group_at(block), *xsum = acts.scaled_sum + acts.group_at(block);
  const int32_t* sums = acts.sum + acts.group_at(block);
  alignas(64) int32_t dots[kRing][kAmxRows * 16];
  __m512 f[MR];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) f[m] = _mm512_setzero_ps();
  auto fold = [&](int g) __attribute__((always_inline)) {
    const int32_t* d = dots[g & (kRing - 1)];
    const __m512 s = load_half16(scales + g * (kIsQ4 ? 32 : 16));
    __m512 mn = _mm512_setzero_ps();
    if constexpr (kIsQ4) mn = load_half16(scales + g * 32 + 16);
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++) {
      __m512i dot = _mm512_load_si512(d + 16 * m);
      if constexpr (kIsQ4)
        f[m] = _mm512_fmadd_ps(mn, _mm512_set1_ps(xsum[g * kAmxRows + m]), f[m]);
      else
        dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(128 * sums[g * kAmxRows + m]));
      f[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(s, _mm512_set1_ps(xs[g * kAmxRows + m])), f[m]);
    }
  };
  auto start = [&](int g) __attribute__((always_inline)) {
    if (g & 1)
      issue<1>(a, codes, g, dots[g & (kRing - 1)]);
    else
      issue<0>(a, codes, g, dots[g & (kRing - 1)]);
  };
  const int ahead = groups < kGroupsAhead ? groups : kGroupsAhead;
  for (int g = 0; g < ahead; g++) start(g);
  int g = 0;
  for (; g + kGroupsAhead + 1 < groups; g += 2) {
    issue<0>(a, codes, g + kGroupsAhead, dots[(g + kGroupsAhead) & (kRing - 1)]);
    fold(g);
    issue<1>(a, codes, g + kGroupsAhead + 1, dots[(g + kGroupsAhead + 1) & (kRing - 1)]);
    fold(g + 1);
  }
  for (; g < groups; g++) {
    if (g + kGroupsAhead < groups) start(g + kGroupsAhead);
    fold(g);
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) _mm512_storeu_ps(out + m * ldo, f[m]);
}

using TileKernel = void (*)(const uint8_t*, const uint16_t*, int, const Acts&, int, float*, size_t);

template <bool kIsQ4>
constexpr TileKernel kTileKernels[kAmxRows + 1] = {
    nullptr,
    multiply_tile<1, kIsQ4>,  multiply_tile<2, kIsQ4>,  multiply_tile<3, kIsQ4>,  multiply_tile<4, kIsQ4>,
    multiply_tile<5, kIsQ4>,  multiply_tile<6, kIsQ4>,  multiply_tile<7, kIsQ4>,  multiply_tile<8, kIsQ4>,
    multiply_tile<9, kIsQ4>,  multiply_tile<10, kIsQ4>, multiply_tile<11, kIsQ4>, multiply_tile<12, kIsQ4>,
    multiply_tile<13, kIsQ4>, multiply_tile<14, kIsQ4>, multiply_tile<15, kIsQ4>, multiply_tile<16, kIsQ4>,
};

void gemm_quant(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo,
                uint8_t* scratch) {
  if (acts.block_rows != kAmxRows) return gemm_quads(w, tile, num_tiles, acts, out, ldo, scratch);
  const bool is_q4 = w.format == Format::Q4;
  const TileKernel* kernels = is_q4 ? kTileKernels<true> : kTileKernels<false>;
  const int last = acts.num_blocks() - 1;
  int configured = 0;
  for (int t = 0; t < num_tiles; t++) {
    const uint8_t* data = w.tile(tile + t);
    const uint8_t* codes = data + w.codes_at;
    if (is_q4) {
      for (int g = 0; g < w.groups; g++) {
        for (int line = 0; line < 4; line++) prefetch(codes + (static_cast<size_t>(g) * 4 + line) * 64);
        unpack_q4(codes + static_cast<size_t>(g) * 256, scratch + static_cast<size_t>(g) * 512);
      }
      codes = scratch;
    }
    for (int block = 0; block <= last; block++) {
      const int rows = acts.block_size(block);
      if (rows != configured) configure(configured = rows);
      kernels[rows](codes, reinterpret_cast<const uint16_t*>(data), w.groups, acts, block,
                    out + static_cast<size_t>(block) * kAmxRows * ldo + 16 * t, ldo);
    }
  }
  _tile_release();
}

KernelTable make_table() {
  KernelTable table = float_kernel_table<avx512::V16>("amx");
  table.gemm_quant = gemm_quant;
  table.has_amx = true;
  return table;
}

}  // namespace

const KernelTable& amx_kernels() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace forerun
