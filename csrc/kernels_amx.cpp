// AMX int8 where a pass has rows enough to fill a tile; everything else is the AVX512-VNNI table. The group integers
// are the same, and so are the float chains. Compile with the flags of kernels_avx512vnni.cpp.
#include "kernels.h"
#include "simd_avx512.h"
#include "float_kernels.h"
#include "append_avx512.h"
#include "gemm_avx512vnni.h"
#include "quantise_avx512.h"

namespace forerun {
namespace {

// Tile products and vector arithmetic take turns over at most this many groups. While any tile instruction is in
// flight, even a tilezero, a core does one 512-bit operation a cycle instead of two (64 FMAs: 31 cycles alone, 62
// beside one), so the two are kept apart. The integers between them stay in L1: 9 KB of them beside the weights and
// the activations that stream past (with 18 KB they push each other out). A turn costs about 45 cycles, so fewer
// groups lose as well.
constexpr int kGroupsAtOnce = 9;
constexpr size_t kActsGroup = kAmxRows * kGroup, kCodesGroup = kTileRows * kGroup;  // bytes

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// What a tile instruction touches, told to the compiler so that it need not assume all of memory.
struct Bytes {
  uint8_t bytes[16 * 64];
};

// The instructions with their tile numbers as template arguments, which the compilers' own macros do not take.
template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void tile_load(const void* p, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile), "m"(*static_cast<const Bytes*>(p)));
}
template <int kTile>
inline void tile_store(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*static_cast<Bytes*>(p)) : "r"(p), "r"(stride), "i"(kTile));
}
// kSums += signed bytes of kActs times unsigned bytes of kWeights.
template <int kSums, int kActs, int kWeights>
inline void tile_multiply() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kActs), "i"(kWeights));
}

// Tiles 0 to 3: int32 sums [rows][16 outputs]. 4, 5: activations [rows][32 inputs].
// 6, 7: weights [8 quads][16 outputs][4].
void configure(int rows) {
  TileConfig config;
  for (int t = 0; t < 8; t++) {
    const bool is_acts = t == 4 || t == 5, is_weights = t == 6 || t == 7;
    config.rows[t] = static_cast<uint8_t>(is_weights ? kQuads : rows);
    config.colsb[t] = is_acts ? kGroup : 64;
  }
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

// The integer products of one group into sums tile kSums.
template <int kSums>
inline void multiply_group(const int8_t* acts, const uint8_t* codes) {
  tile_zero<kSums>();
  tile_load<4 + kSums % 2>(acts, kGroup);
  tile_load<6 + kSums % 2>(codes, 64);
  tile_multiply<kSums, 4 + kSums % 2, 6 + kSums % 2>();
}

// The integer products of n groups to dots[n][16 rows][16 outputs]. A sums tile is stored three products after its own,
// when it is ready: 25 cycles a group instead of 34.
inline void multiply_groups(const int8_t* acts, const uint8_t* codes, int n, int32_t (*dots)[kAmxRows * 16]) {
  for (int i = 0; i < n + 3; i += 4, acts += 4 * kActsGroup, codes += 4 * kCodesGroup) {
    if (i < n) multiply_group<0>(acts, codes);
    if (i >= 3 && i - 3 < n) tile_store<1>(dots[i - 3], 64);
    if (i + 1 < n) multiply_group<1>(acts + kActsGroup, codes + kCodesGroup);
    if (i >= 2 && i - 2 < n) tile_store<2>(dots[i - 2], 64);
    if (i + 2 < n) multiply_group<2>(acts + 2 * kActsGroup, codes + 2 * kCodesGroup);
    if (i >= 1 && i - 1 < n) tile_store<3>(dots[i - 1], 64);
    if (i + 3 < n) multiply_group<3>(acts + 3 * kActsGroup, codes + 3 * kCodesGroup);
    if (i < n) tile_store<0>(dots[i], 64);
  }
}

// Folds the sums of group g into the chains: minimum first, then the scaled dot.
template <int MR, bool kIsQ4>
__attribute__((always_inline)) inline void fold_group(const int32_t* dots, const uint16_t* scales, const float* xs,
                                                      const float* xsum, const int32_t* bias, int g, __m512 (&f)[MR]) {
  const __m512 s = load_half16(scales + g * (kIsQ4 ? 32 : 16));
  __m512 mn = _mm512_setzero_ps();
  if constexpr (kIsQ4) mn = load_half16(scales + g * 32 + 16);
  xs += g * kAmxRows;
  xsum += g * kAmxRows;
  bias += g * kAmxRows;
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    __m512i dot = _mm512_load_si512(dots + 16 * m);
    if constexpr (kIsQ4)
      f[m] = _mm512_fmadd_ps(mn, _mm512_set1_ps(xsum[m]), f[m]);
    else
      dot = _mm512_add_epi32(dot, _mm512_set1_epi32(bias[m]));
    f[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(s, _mm512_set1_ps(xs[m])), f[m]);
  }
}

// Fetches what group g of an activation block takes into L1. All blocks pass by once a tile, so they come from L2.
template <bool kIsQ4>
inline void prefetch_acts(const int8_t* acts, const float* xs, const float* xsum, const int32_t* bias, int g) {
  const int at = g * kAmxRows;
  const void* minor = kIsQ4 ? static_cast<const void*>(xsum + at) : bias + at;
  _mm_prefetch(reinterpret_cast<const char*>(xs + at), _MM_HINT_T0);
  _mm_prefetch(static_cast<const char*>(minor), _MM_HINT_T0);
  acts += static_cast<size_t>(g) * kActsGroup;
#pragma GCC unroll 8
  for (size_t i = 0; i < kActsGroup; i += 64) _mm_prefetch(reinterpret_cast<const char*>(acts + i), _MM_HINT_T0);
}

// Fetches part `part` of `parts` of the tile at `data` into L2.
inline void prefetch_tile(const uint8_t* data, size_t bytes, int part, int parts) {
  const size_t share = bytes / static_cast<size_t>(parts) + 1;
  data += static_cast<size_t>(part) * share;
  for (size_t i = 0; i < share; i += 64) _mm_prefetch(reinterpret_cast<const char*>(data + i), _MM_HINT_T1);
}

// Rows [0, MR) of one activation block times one tile.
template <int MR, bool kIsQ4>
void multiply_tile(const uint8_t* codes, const uint16_t* scales, int groups, const Acts& acts, int block, float* out,
                   size_t ldo) {
  const int8_t* a = acts.block_codes(block);
  const float *xs = acts.scale + acts.group_at(block), *xsum = acts.scaled_sum + acts.group_at(block);
  const int32_t* bias = acts.bias + acts.group_at(block);
  alignas(64) int32_t dots[kGroupsAtOnce][kAmxRows * 16];
  const int turns = (groups + kGroupsAtOnce - 1) / kGroupsAtOnce;
  __m512 f[MR];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    f[m] = _mm512_setzero_ps();
    __builtin_prefetch(out + static_cast<size_t>(m) * ldo, 1, 3);  // fetched for writing while the products are made
  }
  for (int turn = 0, first = 0; turn < turns; turn++) {
    const int end = groups * (turn + 1) / turns;
    multiply_groups(a + static_cast<size_t>(first) * kActsGroup, codes + static_cast<size_t>(first) * kCodesGroup,
                    end - first, dots);
    for (int g = first; g < end; g++) {
      // The next turn's, or after the last turn those of the next block: tile loads that wait for L2 cost about 7 % in all.
      prefetch_acts<kIsQ4>(a, xs, xsum, bias, g + end - first);
      fold_group<MR, kIsQ4>(dots[g - first], scales, xs, xsum, bias, g, f);
    }
    first = end;
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
  const int num_blocks = acts.num_blocks();
  int configured = 0;
  for (int t = 0; t < num_tiles; t++) {
    const uint8_t* data = w.tile(tile + t);
    const uint8_t* codes = data + w.codes_at;
    if (is_q4) {
      for (int g = 0; g < w.groups; g++) {
        for (int line = 0; line < 4; line++) fetch<1>(codes + (static_cast<size_t>(g) * 4 + line) * 64 + kFetchBytes<1>);
        unpack_q4(codes + static_cast<size_t>(g) * 256, scratch + static_cast<size_t>(g) * kCodesGroup);
      }
      codes = scratch;
    }
    for (int block = 0; block < num_blocks; block++) {
      prefetch_tile(data + w.tile_bytes, w.tile_bytes, block, num_blocks);
      const int rows = acts.block_size(block);
      if (rows != configured) configure(configured = rows);
      kernels[rows](codes, reinterpret_cast<const uint16_t*>(data), w.groups, acts, block,
                    out + static_cast<size_t>(block) * kAmxRows * ldo + 16 * t, ldo);
    }
  }
  asm volatile("tilerelease");
}

KernelTable make_table() {
  KernelTable table = float_kernel_table<avx512::V16>("amx");
  table.quantise_rows = quantise_rows_avx512;
  table.append_keys = append_keys_avx512;
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
