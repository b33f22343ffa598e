#include "pack.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace forerun {
namespace {

struct Source {
  const char* name;
  Format packed;
  int block_len;
  size_t block_bytes;
};

constexpr Source kSources[] = {
    {"f32", Format::F32, 1, 4},        {"f16", Format::F16, 1, 2},        {"bf16", Format::BF16, 1, 2},
    {"q4_0", Format::Q4, 32, 18},      {"q4_1", Format::Q4, 32, 20},      {"q5_0", Format::Q5, 32, 22},
    {"q5_1", Format::Q5M, 32, 24},     {"q8_0", Format::Q8, 32, 34},      {"q3_k", Format::Q6K, 256, 110},
    {"q4_k", Format::Q4K, 256, 144},   {"q5_k", Format::Q5K, 256, 176},   {"q6_k", Format::Q6K, 256, 210},
    {"iq4_nl", Format::Q8, 32, 18},
};

const Source& source_of(SourceFormat format) { return kSources[static_cast<size_t>(format)]; }

uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

uint32_t read_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// A group of one output row: its codes, and its scales as the packed format has them.
struct Group {
  uint8_t codes[kGroup];
  uint16_t d = 0, min = 0;          // fp16; of the super-group where there is one
  uint8_t scales[2] = {};           // K formats
};

// Codes of 32 inputs whose low four bits lie in 16 bytes: low nibbles first.
void read_nibbles(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = p[i] & 15;
    codes[16 + i] = p[i] >> 4;
  }
}

void add_fifth_bits(uint32_t bits, uint8_t* codes) {
  for (int i = 0; i < kGroup; i++) codes[i] = static_cast<uint8_t>(codes[i] | (bits >> i & 1) << 4);
}

// The 6-bit scale and minimum of group g of Q4_K and Q5_K, twelve bytes for eight of each.
void read_k_scales(const uint8_t* p, int g, uint8_t* scales) {
  if (g < 4) {
    scales[0] = p[g] & 63;
    scales[1] = p[g + 4] & 63;
  } else {
    scales[0] = static_cast<uint8_t>((p[g + 4] & 15) | (p[g - 4] >> 6) << 4);
    scales[1] = static_cast<uint8_t>((p[g + 4] >> 4) | (p[g] >> 6) << 4);
  }
}

// d, dmin, scales[12], of Q5_K fifth bits[32], nibbles[128]: 64 inputs share 32 bytes, low nibbles first.
Group read_q4k_q5k(SourceFormat source, const uint8_t* block, int g) {
  Group out;
  out.d = read_u16(block);
  out.min = read_u16(block + 2);
  read_k_scales(block + 4, g, out.scales);
  const bool has_fifth = source == SourceFormat::Q5_K;
  const uint8_t* fifth = block + 16;
  const uint8_t* nibbles = block + (has_fifth ? 48 : 16) + g / 2 * 32;
  for (int i = 0; i < kGroup; i++) {
    const int low = g % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
    out.codes[i] = static_cast<uint8_t>(low | (has_fifth ? fifth[i] >> g & 1 : 0) << 4);
  }
  return out;
}

// low[128], high[64], scales[16], d: 128 inputs share 64 bytes of low nibbles and 32 of high pairs of bits.
Group read_q6k(const uint8_t* block, int g) {
  Group out;
  const uint8_t* low = block + g / 4 * 64 + g % 2 * 32;
  const uint8_t* high = block + 128 + g / 4 * 32;
  for (int i = 0; i < kGroup; i++) {
    const int nibble = g % 4 < 2 ? low[i] & 15 : low[i] >> 4;
    out.codes[i] = static_cast<uint8_t>(nibble | (high[i] >> (g % 4 * 2) & 3) << 4);
  }
  std::memcpy(out.scales, block + 192 + 2 * g, 2);
  out.d = read_u16(block + 208);
  return out;
}

// third bits[32], low pairs[64], scales[12] of 6 bits, d. A code of three bits, less 4, is one of six, less 32.
Group read_q3k(const uint8_t* block, int g) {
  Group out;
  const uint8_t* low = block + 32 + g / 4 * 32;
  for (int i = 0; i < kGroup; i++) {
    const int code = (low[i] >> (g % 4 * 2) & 3) | (block[i] >> g & 1) << 2;
    out.codes[i] = static_cast<uint8_t>(code - 4 + 32);
  }
  const uint8_t* scales = block + 96;
  for (int half = 0; half < 2; half++) {
    const int i = 2 * g + half;
    const int nibble = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
    out.scales[half] = static_cast<uint8_t>((nibble | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
  }
  out.d = read_u16(block + 108);
  return out;
}

// The values of IQ4_NL's sixteen codes.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

Group read_block(SourceFormat source, const uint8_t* block) {
  Group out;
  out.d = read_u16(block);
  switch (source) {
    case SourceFormat::Q4_0:
      out.min = float_to_half(-8.0f * half_to_float(out.d));
      read_nibbles(block + 2, out.codes);
      break;
    case SourceFormat::Q4_1:
      out.min = read_u16(block + 2);
      read_nibbles(block + 4, out.codes);
      break;
    case SourceFormat::Q5_0:
      read_nibbles(block + 6, out.codes);
      add_fifth_bits(read_u32(block + 2), out.codes);
      break;
    case SourceFormat::Q5_1:
      out.min = read_u16(block + 2);
      read_nibbles(block + 8, out.codes);
      add_fifth_bits(read_u32(block + 4), out.codes);
      break;
    case SourceFormat::IQ4_NL:
      read_nibbles(block + 2, out.codes);
      for (uint8_t& code : out.codes) code = static_cast<uint8_t>(kIq4Values[code] + 128);
      break;
    default:  // Q8_0
      for (int i = 0; i < kGroup; i++) out.codes[i] = block[2 + i] ^ 0x80;
  }
  return out;
}

Group read_group(SourceFormat source, const uint8_t* row, int g) {
  const Source& s = source_of(source);
  const int groups = s.block_len / kGroup;
  const uint8_t* block = row + static_cast<size_t>(g / groups) * s.block_bytes;
  switch (source) {
    case SourceFormat::Q4_K:
    case SourceFormat::Q5_K: return read_q4k_q5k(source, block, g % groups);
    case SourceFormat::Q6_K: return read_q6k(block, g % groups);
    case SourceFormat::Q3_K: return read_q3k(block, g % groups);
    default: return read_block(source, block);
  }
}

void store_codes(Format format, const uint8_t* codes, int lane, uint8_t* out) {
  uint32_t quads[kQuads];
  std::memcpy(quads, codes, kGroup);
  auto put = [&](uint8_t* vector, uint32_t quad) { std::memcpy(vector + lane * 4, &quad, 4); };
  if (code_bits(format) == 8) {
    for (int q = 0; q < kQuads; q++) put(out + q * 64, quads[q]);
    return;
  }
  for (int j = 0; j < 4; j++)
    put(out + j * 64, (quads[2 * j] & 0x0f0f0f0f) | (quads[2 * j + 1] & 0x0f0f0f0f) << 4);
  uint8_t* high = out + code_bytes(Format::Q4);
  if (code_bits(format) == 5)
    for (int q = 0; q < kQuads; q++) {
      const uint32_t bits = (quads[q] >> 4 & 0x01010101) * 0x01020408 >> 24;  // one of each byte
      uint8_t* at = high + q * 8 + lane / 2;
      *at = static_cast<uint8_t>(*at | bits << lane % 2 * 4);
    }
  if (code_bits(format) == 6)
    for (int half = 0; half < 2; half++) {
      uint32_t pairs = 0;
      for (int i = 0; i < 4; i++) pairs |= (quads[4 * half + i] >> 4 & 0x03030303) << 2 * i;
      put(high + half * 64, pairs);
    }
}

// A float format is that of its file, in another order.
void store_floats(const PackedMatrix& m, const uint8_t* row, int lane, uint8_t* tile) {
  const size_t bytes = float_bytes(m.format);
  for (int k = 0; k < m.inputs; k++, row += bytes)
    std::memcpy(tile + float_index(m.format, k, lane) * bytes, row, bytes);
}

void store_scales(Format format, const Group& group, int g, int lane, uint8_t* tile) {
  if (is_super(format)) {
    uint8_t* own = tile + scales_at(format, static_cast<size_t>(g));
    own[lane] = group.scales[0];
    own[16 + lane] = group.scales[1];
  }
  uint16_t* halves = reinterpret_cast<uint16_t*>(tile + supers_at(format, static_cast<size_t>(g)));
  halves[lane] = group.d;
  if (has_min(format)) halves[16 + lane] = group.min;
}

}  // namespace

SourceFormat source_format(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < sizeof kSources / sizeof *kSources; i++) {
    if (name == kSources[i].name) return static_cast<SourceFormat>(i);
    known += (i ? ", " : "") + std::string(kSources[i].name);
  }
  throw std::invalid_argument("unknown weight format " + name + "; known: " + known);
}

std::vector<std::string> source_format_names() {
  std::vector<std::string> names;
  for (const Source& source : kSources) names.emplace_back(source.name);
  return names;
}

Format packed_format(SourceFormat source) { return source_of(source).packed; }

size_t source_row_bytes(SourceFormat source, int inputs) {
  const Source& s = source_of(source);
  if (inputs % s.block_len)
    throw std::invalid_argument("a row of " + std::string(s.name) + " needs a multiple of " +
                                std::to_string(s.block_len) + " inputs");
  return static_cast<size_t>(inputs / s.block_len) * s.block_bytes;
}

PackedMatrix packed_shape(Format format, int outputs, int inputs) {
  PackedMatrix m{};
  m.format = format;
  m.outputs = outputs;
  m.inputs = inputs;
  m.tiles = (outputs + kTileRows - 1) / kTileRows;
  if (is_float(format)) {
    m.tile_bytes = static_cast<size_t>(round_up(inputs, 2)) * kTileRows * float_bytes(format);
    return m;
  }
  m.groups = inputs / kGroup;
  const size_t groups = static_cast<size_t>(m.groups);
  const size_t supers = is_super(format) ? groups / kSuperGroups * super_bytes(format) : 0;
  m.codes_at = (supers + groups * scale_bytes(format) + 63) / 64 * 64;
  m.tile_bytes = m.codes_at + groups * code_bytes(format);
  return m;
}

bool pack_tiles(PackedMatrix& out, int tile_begin, int tile_end, SourceFormat source, const uint8_t* data,
                const int32_t* rows) {
  const size_t row_bytes = source_row_bytes(source, out.inputs);
  bool is_exact = true;
  for (int t = tile_begin; t < tile_end; t++) {
    uint8_t* tile = out.data + static_cast<size_t>(t) * out.tile_bytes;
    std::memset(tile, 0, out.tile_bytes);
    for (int lane = 0; lane < kTileRows && t * kTileRows + lane < out.outputs; lane++) {
      const int n = t * kTileRows + lane;
      const uint8_t* row = data + static_cast<size_t>(rows ? rows[n] : n) * row_bytes;
      if (is_float(out.format)) {
        store_floats(out, row, lane, tile);
        continue;
      }
      for (int g = 0; g < out.groups; g++) {
        const Group group = read_group(source, row, g);
        uint8_t* codes = tile + out.codes_at + static_cast<size_t>(g) * code_bytes(out.format);
        store_codes(out.format, group.codes, lane, codes);
        store_scales(out.format, group, g, lane, tile);
        if (source == SourceFormat::Q4_0) is_exact = is_exact && std::isfinite(half_to_float(group.min));
      }
    }
  }
  return is_exact;
}

}  // namespace forerun
