#include "pack.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "half.h"

namespace forerun {

SourceFormat source_format(const std::string& name) {
  if (name == "f32") return SourceFormat::F32;
  if (name == "f16") return SourceFormat::F16;
  if (name == "q4_0") return SourceFormat::Q4_0;
  if (name == "q4_1") return SourceFormat::Q4_1;
  if (name == "q8_0") return SourceFormat::Q8_0;
  throw std::invalid_argument("unknown weight format " + name + "; known: f32, f16, q4_0, q4_1, q8_0");
}

Format packed_format(SourceFormat source) {
  switch (source) {
    case SourceFormat::Q4_0:
    case SourceFormat::Q4_1: return Format::Q4;
    case SourceFormat::Q8_0: return Format::Q8;
    default: return Format::F32;
  }
}

static size_t block_bytes(SourceFormat source) {
  switch (source) {
    case SourceFormat::F32: return 4;
    case SourceFormat::F16: return 2;
    case SourceFormat::Q4_0: return 2 + 16;
    case SourceFormat::Q4_1: return 4 + 16;
    default: return 2 + 32;
  }
}

size_t source_row_bytes(SourceFormat source, int inputs) {
  if (packed_format(source) == Format::F32) return static_cast<size_t>(inputs) * block_bytes(source);
  if (inputs % kGroup) throw std::invalid_argument("a quantised row needs a multiple of 32 inputs");
  return static_cast<size_t>(inputs / kGroup) * block_bytes(source);
}

PackedMatrix packed_shape(Format format, int outputs, int inputs) {
  PackedMatrix m{};
  m.format = format;
  m.outputs = outputs;
  m.inputs = inputs;
  m.tiles = (outputs + kTileRows - 1) / kTileRows;
  if (format == Format::F32) {
    m.tile_bytes = static_cast<size_t>(inputs) * kTileRows * sizeof(float);
    return m;
  }
  m.groups = inputs / kGroup;
  const size_t scale_bytes = static_cast<size_t>(m.groups) * (format == Format::Q4 ? 64 : 32);
  m.codes_at = (scale_bytes + 63) / 64 * 64;
  m.tile_bytes = m.codes_at + static_cast<size_t>(m.groups) * (format == Format::Q4 ? 4 : 8) * 64;
  return m;
}

static uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

static void pack_float_row(uint8_t* tile, int lane, int inputs, SourceFormat source, const uint8_t* row) {
  float* values = reinterpret_cast<float*>(tile);
  for (int k = 0; k < inputs; k++) {
    float x;
    if (source == SourceFormat::F32)
      std::memcpy(&x, row + 4 * static_cast<size_t>(k), 4);
    else
      x = half_to_float(read_u16(row + 2 * static_cast<size_t>(k)));
    values[static_cast<size_t>(k) * kTileRows + lane] = x;
  }
}

static void pack_q8_row(uint8_t* tile, const PackedMatrix& m, int lane, const uint8_t* row) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(tile);
  uint8_t* codes = tile + m.codes_at;
  for (int g = 0; g < m.groups; g++, row += 34) {
    scales[g * 16 + lane] = read_u16(row);
    for (int k = 0; k < kGroup; k++)
      codes[(static_cast<size_t>(g) * kQuads + k / 4) * 64 + lane * 4 + k % 4] = static_cast<uint8_t>(row[2 + k] ^ 0x80);
  }
}

static bool pack_q4_row(uint8_t* tile, const PackedMatrix& m, int lane, SourceFormat source, const uint8_t* row) {
  const bool has_min = source == SourceFormat::Q4_1;
  uint16_t* scales = reinterpret_cast<uint16_t*>(tile);
  uint8_t* codes = tile + m.codes_at;
  bool is_exact = true;
  for (int g = 0; g < m.groups; g++, row += has_min ? 20 : 18) {
    const uint16_t d = read_u16(row);
    uint16_t min;
    if (has_min) {
      min = read_u16(row + 2);
    } else {
      const float exact = -8.0f * half_to_float(d);
      min = float_to_half(exact);
      is_exact = is_exact && std::isfinite(half_to_float(min));
    }
    scales[g * 32 + lane] = d;
    scales[g * 32 + 16 + lane] = min;
    const uint8_t* nibbles = row + (has_min ? 4 : 2);  // low nibbles are inputs 0..15, high ones 16..31
    auto code = [&](int k) { return static_cast<uint8_t>(k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4); };
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 4; i++)
        codes[(static_cast<size_t>(g) * 4 + j) * 64 + lane * 4 + i] =
            static_cast<uint8_t>(code(8 * j + i) | code(8 * j + 4 + i) << 4);
  }
  return is_exact;
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
      if (out.format == Format::F32)
        pack_float_row(tile, lane, out.inputs, source, row);
      else if (out.format == Format::Q8)
        pack_q8_row(tile, out, lane, row);
      else
        is_exact = pack_q4_row(tile, out, lane, source, row) && is_exact;
    }
  }
  return is_exact;
}

}  // namespace forerun
