// What test_core.cpp is made of: a check that names its place, repeatable random inputs, and owners of the kernels'
// structs.
#pragma once
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu.h"
#include "half.h"
#include "kernels.h"
#include "pack.h"
#include "program.h"

#define CHECK(condition, ...)                                                             \
  do {                                                                                    \
    if (!(condition)) ::forerun::test::fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (0)

namespace forerun {
namespace test {

[[noreturn]] inline void fail(const char* file, int line, const char* condition, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: FAILED: %s: ", file, line, condition);
  va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  std::fputc('\n', stderr);
  std::exit(1);
}

// SplitMix64 (Steele, Lea and Flood 2014): the same numbers everywhere.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int between(int low, int high) { return low + static_cast<int>(bits() % static_cast<uint64_t>(high - low + 1)); }
  float uniform(float low, float high) { return low + (high - low) * static_cast<float>(bits() >> 40) * 0x1p-24f; }
  float bell() { return uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1); }

 private:
  uint64_t state_;
};

inline std::vector<float> random_floats(Rng& rng, size_t n, float scale = 1.0f) {
  std::vector<float> out(n);
  for (float& x : out) x = scale * rng.bell();
  return out;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// As the heap gives them, 64-byte aligned and zero: the address sanitizer sees one step past the end.
template <class T>
class Aligned {
 public:
  explicit Aligned(size_t count) : data_(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64), std::free) {
    std::memset(data_.get(), 0, (count * sizeof(T) + 63) / 64 * 64);
  }
  T* get() const { return static_cast<T*>(data_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> data_;
};

// Every table of this machine; the scalar one, the reference, is first.
inline std::vector<const KernelTable*> all_tables() {
  std::vector<const KernelTable*> tables;
  for (const std::string& isa : available_isas()) tables.push_back(&kernels_for(isa));
  return tables;
}
inline const KernelTable& reference() { return scalar_kernels(); }

// ---- weights
// ---------------------------------------------------------------------------------------------------------

inline uint32_t bits_of(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// What a small model's rows, no multiple of 256, can be.
constexpr SourceFormat kSources[] = {SourceFormat::F32,  SourceFormat::F16,  SourceFormat::BF16,
                                     SourceFormat::Q4_0, SourceFormat::Q4_1, SourceFormat::Q5_0,
                                     SourceFormat::Q5_1, SourceFormat::Q8_0, SourceFormat::IQ4_NL};
constexpr SourceFormat kSuperSources[] = {SourceFormat::Q3_K, SourceFormat::Q4_K, SourceFormat::Q5_K,
                                          SourceFormat::Q6_K};

inline std::vector<SourceFormat> all_sources() {
  std::vector<SourceFormat> all(std::begin(kSources), std::end(kSources));
  all.insert(all.end(), std::begin(kSuperSources), std::end(kSuperSources));
  return all;
}
inline bool is_float(SourceFormat source) { return is_float(packed_format(source)); }
inline std::vector<SourceFormat> sources_of(bool floats) {
  std::vector<SourceFormat> some;
  for (const SourceFormat source : all_sources())
    if (is_float(source) == floats) some.push_back(source);
  return some;
}
inline std::vector<SourceFormat> quantised_sources() { return sources_of(false); }
inline std::vector<SourceFormat> float_sources() { return sources_of(true); }

inline const char* name_of(SourceFormat source) {
  constexpr const char* kNames[] = {"f32",  "f16",  "bf16", "q4_0", "q4_1", "q5_0",  "q5_1",
                                    "q8_0", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl"};
  return kNames[static_cast<int>(source)];
}

// Inputs that share what a block of the file begins with.
inline int block_len(SourceFormat source) {
  if (is_float(source)) return 1;
  return is_super(packed_format(source)) ? 256 : kGroup;
}

// Where a block's fp16 scales lie; -1 is none.
struct HalfsAt {
  int d, min;
};
inline HalfsAt halfs_at(SourceFormat source) {
  switch (source) {
    case SourceFormat::Q4_1:
    case SourceFormat::Q5_1:
    case SourceFormat::Q4_K:
    case SourceFormat::Q5_K: return {0, 2};
    case SourceFormat::Q3_K: return {108, -1};
    case SourceFormat::Q6_K: return {208, -1};
    default: return {0, -1};
  }
}

// An fp16 that a scale may be: mostly ordinary, some negative, subnormal, zero or as large as `largest`.
inline uint16_t random_half(Rng& rng, float largest) {
  switch (rng.between(0, 9)) {
    case 0:
      return 0;
    case 1:
      return static_cast<uint16_t>(rng.between(1, 0x3ff));  // subnormal
    case 2:
      return static_cast<uint16_t>(0x8000 | rng.between(1, 0x3ff));  // and negative
    case 3:
      return float_to_half(rng.between(0, 1) ? largest : -largest);
    default:
      return float_to_half(rng.uniform(-0.1f, 0.1f));
  }
}

// Bytes of a matrix in a file. Some groups hold nothing but their lowest or highest code.
inline std::vector<uint8_t> random_source(Rng& rng, SourceFormat source, int outputs, int inputs) {
  std::vector<uint8_t> data(source_row_bytes(source, inputs) * static_cast<size_t>(outputs));
  uint8_t* p = data.data();
  auto put_half = [&](uint16_t h) { std::memcpy(p, &h, 2), p += 2; };
  if (is_float(source)) {
    for (int i = 0; i < outputs * inputs; i++) {
      const float x = 0.2f * rng.bell();
      if (source == SourceFormat::F16)
        put_half(rng.between(0, 9) ? float_to_half(x) : random_half(rng, 4.0f));
      else if (source == SourceFormat::BF16)  // one in ten zero or subnormal
        put_half(static_cast<uint16_t>(rng.between(0, 9) ? bits_of(x) >> 16 : rng.bits() & 0x807f));
      else
        std::memcpy(p, &x, 4), p += 4;
    }
    return data;
  }
  const size_t block_bytes = source_row_bytes(source, block_len(source));
  const HalfsAt at = halfs_at(source);
  for (; p < data.data() + data.size(); p += block_bytes) {
    const int kind = rng.between(0, 5);
    const bool is_q8 = source == SourceFormat::Q8_0;
    const uint8_t low = is_q8 ? 0x80 : 0x00, high = is_q8 ? 0x7f : 0xff;
    for (size_t i = 0; i < block_bytes; i++)
      p[i] = kind == 0 ? low : kind == 1 ? high : static_cast<uint8_t>(rng.bits());
    const uint16_t d = random_half(rng, source == SourceFormat::Q4_0 ? 8188.0f : 65504.0f);
    const uint16_t min = random_half(rng, 65504.0f);
    std::memcpy(p + at.d, &d, 2);
    if (at.min >= 0) std::memcpy(p + at.min, &min, 2);
  }
  return data;
}

struct Matrix {
  PackedMatrix packed;
  Aligned<uint8_t> data;

  Matrix(Format format, int outputs, int inputs)
      : packed(packed_shape(format, outputs, inputs)), data(packed.tile_bytes * static_cast<size_t>(packed.tiles)) {
    packed.data = data.get();
  }
};

inline Matrix pack(SourceFormat source, int outputs, int inputs, const std::vector<uint8_t>& bytes,
                   const int32_t* rows = nullptr) {
  Matrix m(packed_format(source), outputs, inputs);
  const int cut = m.packed.tiles / 2;  // two pieces, as two threads would
  CHECK(pack_tiles(m.packed, 0, cut, source, bytes.data(), rows), "%s", name_of(source));
  CHECK(pack_tiles(m.packed, cut, m.packed.tiles, source, bytes.data(), rows), "%s", name_of(source));
  return m;
}

inline Matrix random_matrix(Rng& rng, SourceFormat source, int outputs, int inputs) {
  return pack(source, outputs, inputs, random_source(rng, source, outputs, inputs));
}

// The 6-bit numbers of Q4_K and Q5_K: eight scales, then eight minima, of which the last four of each lost their high
// bits to the bytes of the first four.
inline int k_number(const uint8_t* p, int g, bool is_min) {
  if (g < 4) return p[g + (is_min ? 4 : 0)] % 64;
  const int low = is_min ? p[g + 4] / 16 : p[g + 4] % 16;
  return low + p[g - 4 + (is_min ? 4 : 0)] / 64 * 16;
}

// Those of Q3_K, less 32: sixteen low nibbles in eight bytes, sixteen high pairs of bits in four.
inline int q3_scale(const uint8_t* p, int i) {
  const int low = i < 8 ? p[i] % 16 : p[i - 8] / 16;
  return low + (p[8 + i % 4] >> (i / 4 * 2)) % 4 * 16 - 32;
}

// The formats' definitions, written as plainly as they are: weight k of a row.
inline float weight_at(SourceFormat source, const uint8_t* row, int k) {
  auto half_at = [](const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
  };
  auto number = [](int x) { return static_cast<float>(x); };
  const int len = block_len(source), i = k % len;
  const uint8_t* block = row + static_cast<size_t>(k / len) * source_row_bytes(source, len);
  auto nibble = [&](int at) { return i < 16 ? block[at + i] % 16 : block[at + i - 16] / 16; };
  auto fifth = [&](int at) { return block[at + i / 8] >> i % 8 & 1; };
  const float d = len > 1 ? half_at(block + halfs_at(source).d) : 0;
  const float min = len > 1 && halfs_at(source).min >= 0 ? half_at(block + halfs_at(source).min) : 0;
  switch (source) {
    case SourceFormat::F32: {
      float x;
      std::memcpy(&x, block, 4);
      return x;
    }
    case SourceFormat::F16: return half_at(block);
    case SourceFormat::BF16: return float_of(static_cast<uint32_t>(block[0] | block[1] << 8) << 16);
    case SourceFormat::Q4_0: return d * number(nibble(2) - 8);
    case SourceFormat::Q4_1: return d * number(nibble(4)) + min;
    case SourceFormat::Q5_0: return d * number(nibble(6) + 16 * fifth(2) - 16);
    case SourceFormat::Q5_1: return d * number(nibble(8) + 16 * fifth(4)) + min;
    case SourceFormat::Q8_0: return d * number(static_cast<int8_t>(block[2 + i]));
    case SourceFormat::IQ4_NL: {
      constexpr int kValues[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
      return d * number(kValues[nibble(2)]);
    }
    case SourceFormat::Q3_K: {
      const int low = block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3, high = block[i % 32] >> (i / 32) & 1;
      return d * number(q3_scale(block + 96, i / 16)) * number(low + 4 * high - 4);
    }
    case SourceFormat::Q6_K: {
      const int byte = block[i / 128 * 64 + i % 64], low = i % 128 < 64 ? byte % 16 : byte / 16;
      const int high = block[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
      return d * number(static_cast<int8_t>(block[192 + i / 16])) * number(low + 16 * high - 32);
    }
    default: {  // Q4_K, Q5_K
      const bool is_q5 = source == SourceFormat::Q5_K;
      const int g = i / 32, byte = block[(is_q5 ? 48 : 16) + i / 64 * 32 + i % 32];
      const int code = (g % 2 ? byte / 16 : byte % 16) + (is_q5 ? 16 * (block[16 + i % 32] >> g & 1) : 0);
      return d * number(k_number(block + 4, g, false)) * number(code) - min * number(k_number(block + 4, g, true));
    }
  }
}

// ---- activations
// -----------------------------------------------------------------------------------------------------

// Arrays of exactly the size the layout states. What pads an AMX block must not be read.
struct ActRows {
  std::vector<int8_t> codes;
  std::vector<float> scale, scaled_sum;
  std::vector<int32_t> bias, half_bias;
  Acts acts;

  ActRows(int rows, int inputs, int block_rows) {
    const size_t padded = static_cast<size_t>(block_rows == kAmxRows ? round_up(rows, kAmxRows) : rows);
    const size_t groups = static_cast<size_t>(inputs / kGroup);
    codes.assign(padded * static_cast<size_t>(inputs), 77);
    scale.assign(padded * groups, std::numeric_limits<float>::quiet_NaN());
    scaled_sum = scale;
    bias.assign(padded * groups, -77777);
    half_bias.assign(2 * padded * groups, -77777);
    acts = {codes.data(), scale.data(), scaled_sum.data(), bias.data(), half_bias.data(),
            rows,         inputs,       inputs / kGroup,   block_rows};
  }

  bool quantise(const KernelTable& table, const float* x, size_t ldx) {
    uint32_t non_finite = 0;
    for (int row = 0; row < acts.rows; row += kBlockRows)
      non_finite |= table.quantise_rows(x + static_cast<size_t>(row) * ldx, ldx, std::min(kBlockRows, acts.rows - row),
                                        acts, row, 0, acts.groups);
    return non_finite == 0;
  }

  // Code and scale of one input, in the quad layout.
  int code(int row, int k) const {
    const int block = row / kBlockRows, mr = acts.block_size(block);
    return acts.block_codes(block)[(static_cast<size_t>(k / 4) * mr + row % kBlockRows) * 4 + k % 4];
  }
  float scale_of(int row, int g) const {
    const int block = row / kBlockRows, mr = acts.block_size(block);
    return scale[acts.group_at(block) + static_cast<size_t>(g) * mr + row % kBlockRows];
  }
};

// One row of inputs, group by group: ordinary, all extremes, zero, too small for a scale, large, exact halves of a
// step, as near to halves as floats come, or at the edge of too small.
inline void fill_row(Rng& rng, float* x, int inputs) {
  for (int g = 0; g < inputs / kGroup; g++, x += kGroup) {
    const int kind = rng.between(0, 9);
    const float amax = rng.uniform(1.0f, 3.0f);
    for (int i = 0; i < kGroup; i++) {
      const float sign = rng.between(0, 1) ? 1.0f : -1.0f;
      const float half = 0.5f + static_cast<float>(rng.between(-127, 126));
      x[i] = kind == 0   ? 0.0f
             : kind == 1 ? 1e-38f * rng.bell()
             : kind == 2 ? 3.7f * sign
             : kind == 3 ? 1e15f * rng.bell()
             : kind == 7 ? 1e-30f * sign
             : kind == 4 ? half
             : kind == 5 ? half * (amax / 127.0f)
                         : rng.bell();
    }
    if (kind == 4) x[rng.between(0, kGroup - 1)] = 127.0f;  // the step is one, so the halves above are ties
    if (kind == 5) x[rng.between(0, kGroup - 1)] = amax;
    if (kind == 6) x[rng.between(0, kGroup - 1)] *= 100.0f;
    // The least magnitude that has a scale is the next above 1e-30.
    if (kind == 7 && rng.between(0, 1)) x[rng.between(0, kGroup - 1)] = std::nextafter(1e-30f, 1.0f);
  }
}

inline std::vector<float> random_rows(Rng& rng, int rows, int inputs) {
  std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(inputs));
  for (int row = 0; row < rows; row++) fill_row(rng, x.data() + static_cast<size_t>(row) * inputs, inputs);
  return x;
}

}  // namespace test
}  // namespace forerun
