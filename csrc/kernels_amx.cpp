// AMX int8 where a pass has rows enough to fill a tile; everything else is the AVX512-VNNI table. The group integers
// are the same, and so are the float chains. Compile with the flags of kernels_avx512vnni.cpp.
#include "decode_avx512.h"
#include "kernels.h"

namespace forerun {
namespace {

// Tile products and vector arithmetic take turns over at most this many products. While any tile instruction is in
// flight, even a tilezero, a core does one 512-bit operation a cycle instead of two (64 FMAs: 31 cycles alone, 62
// beside one), so the two are kept apart. The integers between them stay in L1: 9 KB of them beside the weights and
// the activations that stream past (with 18 KB they push each other out). A turn costs about 45 cycles, so fewer
// lose as well.
constexpr int kProductsAtOnce = 9;
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

// One product covers a group, or of halved formats half a group. How the two operands of product i lie in memory.
template <Format F>
constexpr int kProducts = is_halved(F) ? 2 : 1;  // of a group
template <Format F>
inline const int8_t* acts_of(const int8_t* acts, size_t i) {
  if constexpr (is_halved(F)) return acts + i / 2 * kActsGroup + i % 2 * (kGroup / 2);
  return acts + i * kActsGroup;
}
template <Format F>
inline const uint8_t* codes_of(const uint8_t* codes, size_t i) {
  return codes + i * kCodesGroup / kProducts<F>;
}

// Tiles 0 to 3: int32 sums [rows][16 outputs]. 4, 5: activations [rows][inputs of a product].
// 6, 7: weights [quads][16 outputs][4].
void configure(int rows, int products) {
  TileConfig config;
  for (int t = 0; t < 8; t++) {
    const bool is_acts = t == 4 || t == 5, is_weights = t == 6 || t == 7;
    config.rows[t] = static_cast<uint8_t>(is_weights ? kQuads / products : rows);
    config.colsb[t] = static_cast<uint16_t>(is_acts ? kGroup / products : 64);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// Weight codes of one group as plain bytes, 512 of them.
template <Format F>
inline void unpack(const uint8_t* codes, uint8_t* out) {
  for (int j = 0; j < 4; j++) {
    __m512i lo, hi;
    decode_quads<F>(codes, j, &lo, &hi);
    _mm512_store_si512(out + 2 * j * 64, lo);
    _mm512_store_si512(out + (2 * j + 1) * 64, hi);
  }
}

// The integers of product i into sums tile kSums.
template <Format F, int kSums>
inline void multiply_one(const int8_t* acts, const uint8_t* codes, int i) {
  tile_zero<kSums>();
  tile_load<4 + kSums % 2>(acts_of<F>(acts, static_cast<size_t>(i)), kGroup);
  tile_load<6 + kSums % 2>(codes_of<F>(codes, static_cast<size_t>(i)), 64);
  tile_multiply<kSums, 4 + kSums % 2, 6 + kSums % 2>();
}

using Dots = int32_t[kAmxRows * 16];

// The integers of n products to dots[n]. A sums tile is stored three products after its own, when it is ready: 25
// cycles a product instead of 34.
template <Format F>
inline void multiply_groups(const int8_t* acts, const uint8_t* codes, int n, Dots* dots) {
  for (int i = 0; i < n + 3; i += 4) {
    if (i < n) multiply_one<F, 0>(acts, codes, i);
    if (i >= 3 && i - 3 < n) tile_store<1>(dots[i - 3], 64);
    if (i + 1 < n) multiply_one<F, 1>(acts, codes, i + 1);
    if (i >= 2 && i - 2 < n) tile_store<2>(dots[i - 2], 64);
    if (i + 2 < n) multiply_one<F, 2>(acts, codes, i + 2);
    if (i >= 1 && i - 1 < n) tile_store<3>(dots[i - 1], 64);
    if (i + 3 < n) multiply_one<F, 3>(acts, codes, i + 3);
    if (i < n) tile_store<0>(dots[i], 64);
  }
}

// Activations of one block, at its first group.
struct TileActs {
  const int8_t* codes;
  const float *scale, *scaled_sum;
  const int32_t *bias, *half_bias;
};

// Folds the integers of group g into the chains: minimum first, then the scaled integer.
template <int MR, Format F>
__attribute__((always_inline)) inline void fold_group(const Dots* dots, const uint8_t* tile, const TileActs& x,
                                                      size_t g, __m512 (&f)[MR]) {
  const Scales<F> s = load_scales<F>(tile, g);
  const float *scale = x.scale + g * kAmxRows, *scaled_sum = x.scaled_sum + g * kAmxRows;
  const int32_t* bias = is_halved(F) ? x.half_bias + 2 * g * kAmxRows : x.bias + g * kAmxRows;
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    __m512i dot = _mm512_load_si512(dots[0] + 16 * m);
    __m512 half = _mm512_setzero_ps();
    if constexpr (has_min(F)) f[m] = add_min<F>(s, _mm512_set1_ps(scaled_sum[m]), f[m]);
    if constexpr (is_halved(F) || is_offset(F)) dot = _mm512_add_epi32(dot, _mm512_set1_epi32(bias[m]));
    if constexpr (is_halved(F)) {
      half = first_half<F>(dot, s);
      dot = _mm512_add_epi32(_mm512_load_si512(dots[1] + 16 * m), _mm512_set1_epi32(bias[kAmxRows + m]));
    }
    f[m] = _mm512_fmadd_ps(group_sum<F>(dot, half, s), _mm512_mul_ps(s.scale, _mm512_set1_ps(scale[m])), f[m]);
  }
}

inline void prefetch_lines(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(p) + i, _MM_HINT_T0);
}

// Fetches what group g of an activation block takes into L1. All blocks pass by once a tile, so they come from L2.
template <Format F>
inline void prefetch_acts(const TileActs& x, size_t g) {
  const size_t at = g * kAmxRows;
  prefetch_lines(x.scale + at, 64);
  if (has_min(F)) prefetch_lines(x.scaled_sum + at, 64);
  if (is_offset(F)) prefetch_lines(x.bias + at, 64);
  if (is_halved(F)) prefetch_lines(x.half_bias + 2 * at, 128);
  prefetch_lines(x.codes + g * kActsGroup, kActsGroup);
}

// What is fetched into L2 while a block is multiplied, evenly: fetches in bursts wait for line buffers, and with them
// the loads behind them.
struct Ahead {
  const uint8_t* data;
  size_t group_bytes;  // that go with each group

  void fetch(size_t g) const {
    for (size_t i = g * group_bytes / 64 * 64; i < (g + 1) * group_bytes / 64 * 64; i += 64)
      _mm_prefetch(reinterpret_cast<const char*>(data + i), _MM_HINT_T1);
  }
};

// Groups [first, end) of a tile. `codes` are theirs as bytes.
struct Span {
  const uint8_t* tile;
  const uint8_t* codes;
  int first, end;
};

// The first `rows` rows of one activation block, at most MR, times some groups of a tile, added to what the groups
// before them have left in `out`.
template <int MR, Format F>
void multiply_span(const Span& span, const Acts& acts, int block, int rows, const Ahead& ahead, float* out,
                   size_t ldo) {
  constexpr int kAtOnce = kProductsAtOnce / kProducts<F>;
  const size_t at = acts.group_at(block);
  const TileActs x{acts.block_codes(block), acts.scale + at, acts.scaled_sum + at, acts.bias + at,
                   acts.half_bias + 2 * at};
  alignas(64) Dots dots[kProductsAtOnce];
  const int groups = span.end - span.first, turns = (groups + kAtOnce - 1) / kAtOnce;
  __m512 f[MR];
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++) {
    float* to = out + static_cast<size_t>(m) * ldo;
    f[m] = span.first > 0 && m < rows ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
    __builtin_prefetch(to, 1, 3);  // fetched for writing while the products are made
  }
  for (int turn = 0, done = 0; turn < turns; turn++) {
    const int end = groups * (turn + 1) / turns, n = end - done;
    // What comes next: the next turn's activations, or after the last turn those of the next block.
    const int next = span.first + (end < groups ? end : acts.groups);
    multiply_groups<F>(x.codes + static_cast<size_t>(span.first + done) * kActsGroup,
                       span.codes + static_cast<size_t>(done) * kCodesGroup, n * kProducts<F>, dots);
    for (int i = 0; i < n; i++) {
      prefetch_acts<F>(x, static_cast<size_t>(next + i));  // tile loads that wait for L2 cost about 7 %
      ahead.fetch(static_cast<size_t>(done + i));
      fold_group<MR, F>(dots + i * kProducts<F>, span.tile, x, static_cast<size_t>(span.first + done + i), f);
    }
    done = end;
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
    if (m < rows) _mm512_storeu_ps(out + static_cast<size_t>(m) * ldo, f[m]);
}

// Codes of a span as bytes: those of the file where they are bytes, else unpacked.
template <Format F>
inline const uint8_t* bytes_of(const uint8_t* codes, int first, int end, uint8_t* scratch) {
  codes += static_cast<size_t>(first) * code_bytes(F);
  if constexpr (code_bits(F) == 8) return codes;
  for (size_t g = 0; g < static_cast<size_t>(end - first); g++, codes += code_bytes(F))
    unpack<F>(codes, scratch + g * kCodesGroup);
  return scratch;
}

template <Format F>
void gemm_format(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo,
                 uint8_t* scratch) {
  const int num_blocks = acts.num_blocks(), num_spans = (w.groups + kUnpackedGroups - 1) / kUnpackedGroups;
  const size_t group_bytes = w.tile_bytes / static_cast<size_t>(num_blocks * w.groups) + 1;
  int configured = 0;
  for (int t = 0; t < num_tiles; t++) {
    const uint8_t* data = w.tile(tile + t);
    Ahead ahead{data + w.tile_bytes, group_bytes};
    for (int s = 0, first = 0; s < num_spans; s++) {
      const int end = w.groups * (s + 1) / num_spans;
      const Span span{data, bytes_of<F>(data + w.codes_at, first, end, scratch), first, end};
      for (int block = 0; block < num_blocks; block++) {
        const int rows = acts.block_size(block);
        if (rows != configured) configure(configured = rows, kProducts<F>);
        const auto multiply = rows <= 4 ? multiply_span<4, F> : rows <= 8 ? multiply_span<8, F> : multiply_span<16, F>;
        multiply(span, acts, block, rows, ahead, out + static_cast<size_t>(block) * kAmxRows * ldo + 16 * t, ldo);
        ahead.data += static_cast<size_t>(end - first) * group_bytes;
      }
      first = end;
    }
  }
  asm volatile("tilerelease");
}

void gemm_quant(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo,
                uint8_t* scratch) {
  if (acts.block_rows != kAmxRows) return avx512vnni_kernels().gemm_quant(w, tile, num_tiles, acts, out, ldo, scratch);
  with_format(w.format, [&](auto format) {
    gemm_format<decltype(format)::value>(w, tile, num_tiles, acts, out, ldo, scratch);
  });
}

KernelTable make_table() {
  KernelTable table = avx512vnni_kernels();
  table.name = "amx";
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
