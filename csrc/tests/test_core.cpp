// The core without Python, for the sanitizers: every kernel of every instruction set against the scalar table, bit by
// bit; the scalar table against plain formulas in double; packing, the pool, and a whole program.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "core_attention.h"
#include "core_program.h"
#include "core_support.h"
#include "rope_table.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forerun {
namespace test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kSentinel = -12345.5f;  // what outputs hold before a kernel runs

// ---- halves
// ----------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) float widen_in_hardware(uint16_t h) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
__attribute__((target("avx,f16c"))) uint16_t narrow_in_hardware(float f) {
  return static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(f), _MM_FROUND_TO_NEAREST_INT), 0));
}
#endif

void check_narrowing(uint32_t bits) {
#if defined(__x86_64__)
  const float f = float_of(bits);
  CHECK(float_to_half(f) == narrow_in_hardware(f), "float %08x", bits);
#else
  (void)bits;
#endif
}

void test_halves() {
  for (uint32_t h = 0; h < 0x10000; h++) {
    const float f = half_to_float(static_cast<uint16_t>(h));
    if (!std::isnan(f)) {
      CHECK(float_to_half(f) == h, "half %04x", h);
      const int exponent = static_cast<int>(h >> 10 & 31), mantissa = static_cast<int>(h & 1023);
      const double value = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
      CHECK(exponent == 31 || std::fabs(f) == value, "half %04x", h);
    }
  }
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("f16c")) return;
  for (uint32_t h = 0; h < 0x10000; h++) {
    const float f = half_to_float(static_cast<uint16_t>(h));
    CHECK(bits_of(f) == bits_of(widen_in_hardware(static_cast<uint16_t>(h))), "half %04x", h);
    // The halves themselves, the middle to the next one, and a step to either side of both.
    for (const uint32_t at : {bits_of(f), bits_of(f) + 0x1000u})
      for (const int step : {-1, 0, 1}) check_narrowing(at + static_cast<uint32_t>(step));
  }
  Rng rng(1);
  for (int i = 0; i < 200'000; i++) check_narrowing(static_cast<uint32_t>(rng.bits()));
  for (uint32_t bits = 0x32f00000u; bits < 0x38900000u; bits += 977) check_narrowing(bits);  // around subnormal halves
#endif
}

// ---- packing
// ---------------------------------------------------------------------------------------------------------

void test_packing() {
  Rng rng(2);
  for (const SourceFormat source : all_sources()) {
    for (const int outputs : {1, 15, 16, 17, 40, 95}) {
      const int inputs = block_len(source) * rng.between(1, block_len(source) == 1 ? 70 : 5);
      const std::vector<uint8_t> bytes = random_source(rng, source, outputs, inputs);
      std::vector<int32_t> rows(static_cast<size_t>(outputs));
      for (int n = 0; n < outputs; n++) rows[static_cast<size_t>(n)] = (n * 7 + 3) % outputs;
      for (const int32_t* order : {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(rows.data())}) {
        const Matrix m = pack(source, outputs, inputs, bytes, order);
        std::vector<float> got(static_cast<size_t>(inputs));
        for (int n = 0; n < outputs; n++) {
          reference().dequantise_row(m.packed, n, got.data());
          const int from = order ? order[n] : n;
          const uint8_t* row = bytes.data() + static_cast<size_t>(from) * source_row_bytes(source, inputs);
          for (int k = 0; k < inputs; k++)
            CHECK(got[static_cast<size_t>(k)] == weight_at(source, row, k), "%s row %d input %d", name_of(source), n,
                  k);
          for (const KernelTable* table : all_tables()) {
            std::vector<float> same(static_cast<size_t>(inputs));
            table->dequantise_row(m.packed, n, same.data());
            CHECK(same_bits(got, same), "%s %s", table->name, name_of(source));
          }
        }
      }
    }
  }
}

void test_packing_refuses() {
  std::vector<uint8_t> block(18, 0);
  const uint16_t too_large = float_to_half(8196.0f);  // the next half above 8188
  std::memcpy(block.data(), &too_large, 2);
  Matrix m(Format::Q4, 1, kGroup);
  CHECK(!pack_tiles(m.packed, 0, 1, SourceFormat::Q4_0, block.data(), nullptr), "a minimum of -8 * 8196");
  for (const SourceFormat source : quantised_sources()) {
    bool is_refused = false;
    try {
      source_row_bytes(source, block_len(source) + 16);
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    CHECK(is_refused, "%s with half a block", name_of(source));
  }
}

// ---- matrix products
// -------------------------------------------------------------------------------------------------

// What a table makes of quantised rows; whatever lies between and behind the rows of the output must stay.
std::vector<float> product(const KernelTable& table, const PackedMatrix& w, int tile, int num_tiles, const Acts& acts,
                           size_t ldo) {
  std::vector<float> out(static_cast<size_t>(acts.rows) * ldo, kSentinel);
  const Aligned<uint8_t> scratch(static_cast<size_t>(kTileRows) * static_cast<size_t>(acts.inputs));
  table.gemm_quant(w, tile, num_tiles, acts, out.data(), ldo, scratch.get());
  return out;
}

// Every table and every layout of the activations gives these bits.
void check_products(const PackedMatrix& w, int tile, int num_tiles, const std::vector<float>& x, int rows, size_t ldo,
                    const std::vector<float>& want, const char* format) {
  for (const KernelTable* table : all_tables()) {
    for (const int block_rows : {kBlockRows, kAmxRows}) {
      if (block_rows == kAmxRows && !table->has_amx) continue;
      ActRows acts(rows, w.inputs, block_rows);
      CHECK(acts.quantise(*table, x.data(), static_cast<size_t>(w.inputs)), "finite rows");
      CHECK(same_bits(want, product(*table, w, tile, num_tiles, acts.acts, ldo)),
            "%s %s: %d rows in blocks of %d, %d tiles, %d inputs", table->name, format, rows, block_rows, num_tiles,
            w.inputs);
    }
  }
}

void check_random_product(Rng& rng, SourceFormat source, int rows, int num_tiles, int groups) {
  const int inputs = round_up(groups * kGroup, block_len(source)), tile = rng.between(0, 2);
  const Matrix m = random_matrix(rng, source, (tile + num_tiles) * kTileRows - rng.between(0, 15), inputs);
  const std::vector<float> x = random_rows(rng, rows, inputs);
  const size_t ldo = static_cast<size_t>(num_tiles * kTileRows + rng.between(0, 5));
  ActRows acts(rows, inputs, kBlockRows);
  acts.quantise(reference(), x.data(), static_cast<size_t>(inputs));
  check_products(m.packed, tile, num_tiles, x, rows, ldo,
                 product(reference(), m.packed, tile, num_tiles, acts.acts, ldo), name_of(source));
}

void test_quantised_products() {
  Rng rng(3);
  constexpr int kGroups[] = {1, 2, 3, 5, 7, 8, 17, 18, 19, 36, 37, 48};  // up to 1536 inputs
  for (const SourceFormat source : quantised_sources()) {
    for (int rows = 1; rows <= 40; rows++)
      check_random_product(rng, source, rows, rng.between(1, 9), kGroups[rows % 12 % (rows > 16 ? 8 : 12)]);
    for (const int groups : kGroups) check_random_product(rng, source, groups % 2 ? 3 : 17, groups % 3 + 1, groups);
    for (int num_tiles = 1; num_tiles <= 9; num_tiles++)
      for (const int rows : {1, 2, 8}) check_random_product(rng, source, rows, num_tiles, 3);
  }
}

// Every weight and every activation at the end of its range, over the longest row: no integer step may overflow.
void test_extreme_products() {
  constexpr int kInputs = 1536, kRows = 17;
  for (const SourceFormat source : {SourceFormat::Q4_1, SourceFormat::Q8_0}) {
    const bool is_q8 = source == SourceFormat::Q8_0;
    for (const int code : is_q8 ? std::vector<int>{0x80, 0x7f, 0xff, 0x00} : std::vector<int>{0x00, 0xff, 0x88}) {
      std::vector<uint8_t> bytes(source_row_bytes(source, kInputs) * kTileRows, static_cast<uint8_t>(code));
      const uint16_t scales[] = {float_to_half(1.0f), float_to_half(-2.0f)};
      for (size_t at = 0; at < bytes.size(); at += is_q8 ? 34 : 20)
        std::memcpy(bytes.data() + at, scales, is_q8 ? 2 : 4);
      const Matrix m = pack(source, kTileRows, kInputs, bytes);
      for (const float sign : {1.0f, -1.0f}) {
        const std::vector<float> x(static_cast<size_t>(kRows) * kInputs, 127.0f * sign);
        // A multiple of 32 below 2^29, and so is every partial sum: nothing rounds.
        const std::vector<float> want(static_cast<size_t>(kRows) * kTileRows,
                                      0.0f + kInputs * 127.0f * sign * weight_at(source, bytes.data(), 0));
        check_products(m.packed, 0, 1, x, kRows, kTileRows, want, name_of(source));
      }
    }
  }
}

// The reference itself against the sum it stands for.
void test_reference_product() {
  Rng rng(4);
  for (const SourceFormat source : quantised_sources()) {
    constexpr int kInputs = 2 * 256, kOutputs = 20, kRows = 11;
    const Matrix m = random_matrix(rng, source, kOutputs, kInputs);
    const std::vector<float> x = random_rows(rng, kRows, kInputs);
    ActRows acts(kRows, kInputs, kBlockRows);
    acts.quantise(reference(), x.data(), kInputs);
    const std::vector<float> got = product(reference(), m.packed, 0, m.packed.tiles, acts.acts, 32);
    std::vector<float> w(kInputs);
    for (int n = 0; n < kOutputs; n++) {
      reference().dequantise_row(m.packed, n, w.data());
      for (int row = 0; row < kRows; row++) {
        double sum = 0, size = 0;
        for (int k = 0; k < kInputs; k++) {
          const double term = static_cast<double>(w[static_cast<size_t>(k)]) * acts.code(row, k) *
                              static_cast<double>(acts.scale_of(row, k / kGroup));
          sum += term;
          size += std::fabs(term);
        }
        const double off = std::fabs(sum - got[static_cast<size_t>(row) * 32 + static_cast<size_t>(n)]);
        CHECK(off <= 4e-6 * size + 1e-30, "%s row %d output %d is off by %g of %g", name_of(source), row, n, off, size);
      }
    }
  }
}

// What a table makes of float rows; whatever lies between and behind the rows of the output must stay.
std::vector<float> float_product(const KernelTable& table, const PackedMatrix& w, int tile, int num_tiles,
                                 const std::vector<float>& x, size_t ldx, int rows, size_t ldo) {
  std::vector<float> out(static_cast<size_t>(rows) * ldo, kSentinel);
  const Aligned<uint8_t> scratch(unpacked_bytes(w));
  table.gemm_float(w, tile, num_tiles, x.data(), ldx, rows, out.data(), ldo, scratch.get());
  return out;
}

// Every table, and the same weights as float32, give these bits, which are one chain over ascending k.
void check_float_product(Rng& rng, SourceFormat source, int rows, int num_tiles, int inputs) {
  const int tile = rng.between(0, 2), outputs = (tile + num_tiles) * kTileRows - rng.between(0, 15);
  const Matrix m = random_matrix(rng, source, outputs, inputs);
  std::vector<uint8_t> wide(static_cast<size_t>(outputs) * static_cast<size_t>(inputs) * sizeof(float));
  for (int n = 0; n < outputs; n++)
    reference().dequantise_row(m.packed, n, reinterpret_cast<float*>(wide.data()) + static_cast<size_t>(n) * inputs);
  const Matrix expanded = pack(SourceFormat::F32, outputs, inputs, wide);
  const size_t ldx = static_cast<size_t>(inputs + rng.between(0, 9));
  const size_t ldo = static_cast<size_t>(num_tiles * kTileRows + 3);
  const std::vector<float> x = random_floats(rng, (static_cast<size_t>(rows) - 1) * ldx + static_cast<size_t>(inputs));
  const std::vector<float> want = float_product(reference(), expanded.packed, tile, num_tiles, x, ldx, rows, ldo);
  for (const KernelTable* table : all_tables())
    for (const PackedMatrix* w : {&m.packed, &expanded.packed})
      CHECK(same_bits(want, float_product(*table, *w, tile, num_tiles, x, ldx, rows, ldo)),
            "%s %s: %d rows, %d tiles, %d inputs", table->name, name_of(source), rows, num_tiles, inputs);
  const int row = rng.between(0, rows - 1), n = rng.between(0, outputs - tile * kTileRows - 1);
  const float* w = reinterpret_cast<const float*>(wide.data()) + static_cast<size_t>(tile * kTileRows + n) * inputs;
  float sum = 0;
  const float* from = x.data() + static_cast<size_t>(row) * ldx;
  for (int k = 0; k < inputs; k++) sum = std::fmaf(from[k], w[k], sum);
  CHECK(want[static_cast<size_t>(row) * ldo + static_cast<size_t>(n)] == sum, "%s: %d inputs", name_of(source), inputs);
}

void test_float_products() {
  Rng rng(5);
  for (const SourceFormat source : float_sources()) {
    for (const int inputs : {1, 2, 7, 33, 576})
      for (int rows = 1; rows <= 40; rows += rows < 18 ? 1 : 7)
        check_float_product(rng, source, rows, rng.between(1, 9), inputs);
    for (int num_tiles = 1; num_tiles <= 13; num_tiles++)
      for (const int rows : {1, 2, 4, 8, 17}) check_float_product(rng, source, rows, num_tiles, 35);
  }
}

// Every number of 16 bits, looked up and times 1, as the first and as the second of a pair of inputs.
void test_narrow_floats_are_exact() {
  constexpr int kNumbers = 0x10000;
  for (const SourceFormat source : {SourceFormat::F16, SourceFormat::BF16}) {
    for (const size_t at : {0, 1}) {
      std::vector<uint16_t> words(2 * kNumbers);
      for (size_t n = 0; n < kNumbers; n++) words[2 * n + at] = static_cast<uint16_t>(n);
      std::vector<uint8_t> bytes(words.size() * sizeof(uint16_t));
      std::memcpy(bytes.data(), words.data(), bytes.size());
      const Matrix m = pack(source, kNumbers, 2, bytes);
      for (const KernelTable* table : all_tables()) {
        for (const int rows : {1, 3, 40}) {
          std::vector<float> x(2 * static_cast<size_t>(rows));
          for (size_t row = 0; row < static_cast<size_t>(rows); row++) x[2 * row + at] = 1.0f;
          const std::vector<float> got = float_product(*table, m.packed, 0, m.packed.tiles, x, 2, rows, kNumbers);
          for (int n = 0; n < kNumbers; n++) {
            const float want = weight_at(source, bytes.data() + static_cast<size_t>(n) * 4, static_cast<int>(at));
            const float product = got[static_cast<size_t>(rows - 1) * kNumbers + static_cast<size_t>(n)];
            float pair[2];
            table->dequantise_row(m.packed, n, pair);
            CHECK(bits_of(pair[at]) == bits_of(want), "%s %s %04x", table->name, name_of(source), n);
            CHECK(product == want || (std::isnan(product) && std::isnan(want)), "%s %s %04x: %d rows", table->name,
                  name_of(source), n, rows);
          }
        }
      }
    }
  }
}

// ---- rows
// ------------------------------------------------------------------------------------------------------------

// Some rows of a block and some groups at a time, as those do who quantise what they just made.
void quantise_in_pieces(Rng& rng, const KernelTable& table, const std::vector<float>& x, ActRows& to) {
  const Acts& acts = to.acts;
  for (int row = 0, num_rows; row < acts.rows; row += num_rows) {
    num_rows = rng.between(1, std::min(kBlockRows - row % kBlockRows, acts.rows - row));
    for (int group = 0, num_groups; group < acts.groups; group += num_groups) {
      num_groups = rng.between(1, acts.groups - group);
      const float* from = x.data() + static_cast<size_t>(row) * acts.inputs + group * kGroup;
      table.quantise_rows(from, static_cast<size_t>(acts.inputs), num_rows, acts, row, group, num_groups);
    }
  }
}

void check_quantised(Rng& rng, const std::vector<float>& x, int rows, int inputs, int block_rows) {
  ActRows want(rows, inputs, block_rows);
  CHECK(want.quantise(reference(), x.data(), static_cast<size_t>(inputs)), "finite rows");
  for (const KernelTable* table : all_tables()) {
    ActRows got(rows, inputs, block_rows);
    CHECK(got.quantise(*table, x.data(), static_cast<size_t>(inputs)), "%s", table->name);
    ActRows pieces(rows, inputs, block_rows);
    quantise_in_pieces(rng, *table, x, pieces);
    for (const ActRows* made : {&got, &pieces})
      CHECK(same_bits(want.codes, made->codes) && same_bits(want.scale, made->scale) &&
                same_bits(want.bias, made->bias) &&
                same_bits(want.half_bias, made->half_bias) && same_bits(want.scaled_sum, made->scaled_sum),
            "%s, %d rows of %d, blocks of %d", table->name, rows, inputs, block_rows);
  }
}

void test_quantise() {
  Rng rng(6);
  for (int rows = 1; rows <= 40; rows++) {
    const int inputs = kGroup * rng.between(1, 6);
    const std::vector<float> x = random_rows(rng, rows, inputs);
    check_quantised(rng, x, rows, inputs, kBlockRows);
    check_quantised(rng, x, rows, inputs, kAmxRows);
    ActRows acts(rows, inputs, kBlockRows);
    acts.quantise(reference(), x.data(), static_cast<size_t>(inputs));
    for (int row = 0; row < rows; row++) {
      for (int g = 0; g < inputs / kGroup; g++) {
        const float* group = x.data() + static_cast<size_t>(row) * inputs + g * kGroup;
        float amax = 0;
        for (int i = 0; i < kGroup; i++) amax = std::max(amax, std::fabs(group[i]));
        const float scale = amax > 1e-30f ? amax / 127.0f : 0.0f;
        CHECK(acts.scale_of(row, g) == scale, "row %d group %d", row, g);
        for (int i = 0; i < kGroup; i++) {
          const double want = scale == 0 ? 0 : std::nearbyint(static_cast<double>(group[i] * (127.0f / amax)));
          CHECK(acts.code(row, g * kGroup + i) == want, "row %d input %d", row, g * kGroup + i);
        }
      }
    }
  }
}

void test_quantise_refuses_what_is_not_finite() {
  for (const KernelTable* table : all_tables()) {
    for (int at = 0; at < 3 * kGroup; at++) {
      for (const float bad : {kNaN, -kNaN, kInf, -kInf}) {
        std::vector<float> x(3 * kGroup, 1.0f);
        x[static_cast<size_t>(at)] = bad;
        ActRows acts(1, 3 * kGroup, kBlockRows);
        CHECK(!acts.quantise(*table, x.data(), x.size()), "%s, %g at %d", table->name, static_cast<double>(bad), at);
      }
    }
    for (int rows = 1; rows <= kBlockRows; rows++) {
      for (int bad = 0; bad < rows; bad++) {
        std::vector<float> x(static_cast<size_t>(rows) * 2 * kGroup, 1.0f);
        x[static_cast<size_t>(bad) * 2 * kGroup + kGroup + 5] = kInf;
        ActRows acts(rows, 2 * kGroup, kBlockRows);
        CHECK(table->quantise_rows(x.data(), 2 * kGroup, rows, acts.acts, 0, 0, 2) == 1u << bad, "%s: row %d of %d",
              table->name, bad, rows);
      }
    }
    std::vector<float> largest(kGroup, std::numeric_limits<float>::max());
    ActRows acts(1, kGroup, kBlockRows);
    CHECK(acts.quantise(*table, largest.data(), kGroup) && acts.codes[0] == 127, "%s takes the largest float",
          table->name);
  }
}

std::vector<float> zero_from(std::vector<float> x, int n) {
  std::fill(x.begin() + n, x.end(), 0.0f);
  return x;
}

void test_rms_norm() {
  Rng rng(7);
  for (const int n : {1, 5, 15, 16, 17, 33, 40, 576, 577, 1536}) {
    const size_t padded = static_cast<size_t>(round_up(n, 16)), num_rows = 1 + static_cast<size_t>(n) % kBlockRows;
    const std::vector<float> w = zero_from(random_floats(rng, padded), n);
    std::vector<std::vector<float>> rows;
    std::vector<const float*> x;
    std::vector<float> want(num_rows * padded, kSentinel);
    for (size_t r = 0; r < num_rows; r++)
      rows.push_back(zero_from(random_floats(rng, padded, r % 2 ? 1.0f : 300.0f), n));
    for (size_t r = 0; r < num_rows; r++) {
      x.push_back(rows[r].data());
      reference().rms_norm(&x[r], 1, w.data(), 1e-5f, n, want.data() + r * padded, padded);
      double square = 0;
      for (const float v : rows[r]) square += static_cast<double>(v) * v;
      const double inv = 1 / std::sqrt(square / n + 1e-5);
      for (size_t i = 0; i < padded; i++)
        CHECK(std::fabs(want[r * padded + i] - x[r][i] * inv * w[i]) <= 1e-6 * std::fabs(want[r * padded + i]),
              "n %d at %zu", n, i);
    }
    for (const KernelTable* table : all_tables()) {
      std::vector<float> got(num_rows * padded, kSentinel);
      table->rms_norm(x.data(), static_cast<int>(num_rows), w.data(), 1e-5f, n, got.data(), padded);
      CHECK(same_bits(want, got), "%s, %zu rows of %d", table->name, num_rows, n);
    }
  }
}

std::vector<float> exp_of(const KernelTable& table, const std::vector<float>& x) {
  std::vector<float> out(x.size(), kSentinel);
  table.exp_f32(x.data(), static_cast<int>(x.size()), out.data());
  return out;
}

void test_exp() {
  Rng rng(8);
  std::vector<float> x{0.0f,   -0.0f,  88.0f,  -87.0f,  -86.999992f, -87.00001f,
                       -87.3f, -88.0f, 1e-30f, -1e-38f, 1.0f,        -1.0f};
  for (int i = 0; i < 6000; i++) x.push_back(rng.uniform(-87.0f, 88.0f));
  for (int i = 0; i < 2000; i++) x.push_back(rng.uniform(-1.0f, 1.0f));
  for (int n = -125; n < 127; n++)
    x.push_back((static_cast<float>(n) + 0.5f) * 0.6931472f);  // where the exponent steps
  const std::vector<float> got = exp_of(reference(), x);
  for (size_t i = 0; i < x.size(); i++) {
    const double want = x[i] < -87.0f ? 0 : std::exp(static_cast<double>(x[i]));
    // Two units in the last place: an error of 1 in the polynomial and one rounding, both below 2^-23.
    CHECK(std::fabs(got[i] - want) <= 2 * std::ldexp(want, -23), "exp(%a) is %a", static_cast<double>(x[i]),
          static_cast<double>(got[i]));
  }
  CHECK(got[0] == 1.0f && got[1] == 1.0f && got[6] == 0.0f && got[7] == 0.0f, "exact values");
  for (const float beyond : {89.0f, 1e30f, kInf, -89.0f, -1e30f, -kInf, kNaN}) x.push_back(beyond);
  const std::vector<float> want = exp_of(reference(), x);
  CHECK(want[x.size() - 2] == 0.0f && want[x.size() - 5] == want[2], "what lies beyond gives the ends' values");
  for (const KernelTable* table : all_tables()) CHECK(same_bits(want, exp_of(*table, x)), "%s", table->name);
}

void test_elementwise() {
  Rng rng(9);
  for (const size_t n : {size_t{16}, size_t{48}, size_t{1536}}) {
    std::vector<float> a = random_floats(rng, n, 30.0f), b = random_floats(rng, n);
    const float corners[] = {0.0f, -0.0f, 100.0f, -100.0f, -87.2f, 87.9f, 1e-42f, kInf};
    std::copy(std::begin(corners), std::end(corners), a.begin());
    std::vector<float> silu(n), sum(n);
    reference().silu_mul(a.data(), b.data(), static_cast<int>(n), silu.data());
    reference().add(a.data(), b.data(), static_cast<int>(n), sum.data());
    for (size_t i = 8; i < n; i++) {
      const double want = a[i] / (1 + std::exp(-static_cast<double>(a[i]))) * b[i];
      CHECK(std::fabs(silu[i] - want) <= 1e-6 * std::fabs(want) + 1e-35, "silu(%g)", static_cast<double>(a[i]));
      CHECK(sum[i] == a[i] + b[i], "a sum");
    }
    for (const KernelTable* table : all_tables()) {
      std::vector<float> got(n, kSentinel);
      table->add(a.data(), b.data(), static_cast<int>(n), got.data());
      CHECK(same_bits(sum, got), "%s add", table->name);
      table->silu_mul(a.data(), b.data(), static_cast<int>(n), got.data());
      CHECK(same_bits(silu, got), "%s silu_mul", table->name);
      got = a;  // in place, as the program does with a tail
      table->silu_mul(got.data(), b.data(), static_cast<int>(n), got.data());
      CHECK(same_bits(silu, got), "%s silu_mul in place", table->name);
    }
  }
  for (const size_t n : {size_t{1}, size_t{16}, size_t{24}, size_t{80}}) {
    const std::vector<float> x = random_floats(rng, n);
    for (const KernelTable* table : all_tables()) {
      std::vector<float> got(n, kSentinel);
      table->divide(x.data(), 3.1f, static_cast<int>(n), got.data());
      for (size_t i = 0; i < n; i++) CHECK(got[i] == x[i] / 3.1f, "%s divide", table->name);
    }
  }
}

void test_rope() {
  Rng rng(10);
  for (const int half : {1, 8, 12, 16, 20, 32, 40, 64}) {
    const size_t n = static_cast<size_t>(half);
    const std::vector<float> head = random_floats(rng, 2 * n);
    std::vector<float> cos(n), sin(n);
    for (size_t i = 0; i < n; i++) {
      const float angle = rng.uniform(0.0f, 6.3f);
      cos[i] = std::cos(angle);
      sin[i] = std::sin(angle);
    }
    std::vector<float> want = head;
    reference().rope(want.data(), cos.data(), sin.data(), half, 0.25f);
    for (size_t i = 0; i < n; i++) {
      const float first = std::fmaf(head[i], cos[i], -(head[n + i] * sin[i])) * 0.25f;
      const float second = std::fmaf(head[n + i], cos[i], head[i] * sin[i]) * 0.25f;
      CHECK(want[i] == first && want[n + i] == second, "half %d, pair %zu", half, i);
    }
    for (const KernelTable* table : all_tables()) {
      std::vector<float> got = head;
      table->rope(got.data(), cos.data(), sin.data(), half, 0.25f);
      CHECK(same_bits(want, got), "%s, half %d", table->name, half);
    }
  }
}

void test_sin_cos() {
  Rng rng(11);
  auto check = [](double angle) {
    double sin, cos;
    sin_cos(angle, &sin, &cos);
    const long double off = std::max(std::fabs(sin - std::sin(static_cast<long double>(angle))),
                                     std::fabs(cos - std::cos(static_cast<long double>(angle))));
    CHECK(off < 4e-16L, "angle %.17g is off by %Lg", angle, off);
  };
  for (int i = 0; i < 20'000; i++) check(static_cast<double>(rng.bits() >> 11) * 0x1p-53 * 1e5);
  for (int k = 0; k < 60'000; k += 7) check(k * 1.5707963267948966);  // where the quadrants meet
  for (int position = 0; position < 100'000; position += 13) check(position);
  for (const double angle : {0.0, 1e-300, 1e-9, 99'999.99}) check(angle);
}

void test_largest() {
  Rng rng(12);
  for (const int n : {1, 2, 15, 16, 17, 31, 32, 33, 100, 1024, 1031}) {
    for (int round = 0; round < 20; round++) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& v : x) v = round % 2 ? rng.bell() : static_cast<float>(rng.between(-9, -2));
      for (const KernelTable* table : all_tables()) {
        float value = kSentinel;
        CHECK(table->largest(x.data(), n, &value), "%s, n %d", table->name, n);
        CHECK(value == *std::max_element(x.begin(), x.end()), "%s, n %d", table->name, n);
      }
      const float bad[] = {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()};
      x[static_cast<size_t>(rng.between(0, n - 1))] = bad[round % 3];
      for (const KernelTable* table : all_tables()) {
        float value;
        CHECK(!table->largest(x.data(), n, &value), "%s, n %d", table->name, n);
        x.resize(static_cast<size_t>(round_up(n, 16)), 0.0f);  // what is_finite may read
        CHECK(!table->is_finite(x.data(), n), "%s, n %d", table->name, n);
        x.resize(static_cast<size_t>(n));
      }
    }
  }
}

// Kernels that meet denormals: equal bits in the mode of a pool's threads, which flushes them, and in a program's own.
void test_kernels() {
  test_float_products();
  test_narrow_floats_are_exact();
  test_quantise();
  test_rms_norm();
  test_exp();
  test_elementwise();
  test_rope();
}

void run() {
  test_halves();
  test_packing();
  test_packing_refuses();
  test_reference_product();
  test_quantise_refuses_what_is_not_finite();
  test_sin_cos();
  test_largest();
  test_kernels();
  Pool(1).run([](int) {
    test_kernels();
    test_quantised_products();
    test_extreme_products();
    test_attention();
  });
  test_pool();
  test_program();
}

}  // namespace
}  // namespace test
}  // namespace forerun

int main() {
  forerun::test::run();
  std::printf("core: all tests passed on");
  for (const std::string& isa : forerun::available_isas()) std::printf(" %s", isa.c_str());
  std::puts("");
  return 0;
}
