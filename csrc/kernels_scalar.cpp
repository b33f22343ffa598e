// The reference: plain loops, the contract's order of roundings spelled out. Compiled for baseline x86-64.
#include "kernels.h"
#include "simd_scalar.h"
#include "float_kernels.h"

namespace forerun {
namespace {

// Integer dot product of the quads [begin, end) of one group, exact; `a` points at quad 0 of the row, quads `stride`
// bytes apart.
int32_t quads_dot(Format format, const uint8_t* codes, int lane, const int8_t* a, size_t stride, int begin, int end) {
  const int offset = format == Format::Q8 ? 128 : format == Format::Q5 ? 16 : is_halved(format) ? 32 : 0;
  int32_t dot = 0;
  for (int quad = begin; quad < end; quad++)
    for (int i = 0; i < 4; i++) dot += (code_at(format, codes, quad, lane * 4 + i) - offset) * a[quad * stride + i];
  return dot;
}

// Adds a group to a chain: minimum first, then the scaled integer.
float add_group(const PackedMatrix& w, const uint8_t* tile, int g, int lane, const int8_t* a, size_t stride,
                float scale, float scaled_sum, float f) {
  const LaneScale s = lane_scale(w.format, tile, g, lane);
  const uint8_t* codes = tile + w.codes_at + static_cast<size_t>(g) * code_bytes(w.format);
  if (is_halved(w.format)) {
    const int32_t sum = s.halves[0] * quads_dot(w.format, codes, lane, a, stride, 0, kQuads / 2) +
                        s.halves[1] * quads_dot(w.format, codes, lane, a, stride, kQuads / 2, kQuads);
    return std::fmaf(static_cast<float>(sum), s.d * scale, f);
  }
  if (has_min(w.format)) f = std::fmaf(s.min, scaled_sum, f);
  return std::fmaf(static_cast<float>(quads_dot(w.format, codes, lane, a, stride, 0, kQuads)), s.scale * scale, f);
}

void gemm_block(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out, size_t ldo) {
  const int mr = acts.block_size(block);
  const int8_t* a = acts.block_codes(block);
  const size_t at = acts.group_at(block);
  for (int t = 0; t < num_tiles; t++) {
    for (int m = 0; m < mr; m++) {
      for (int lane = 0; lane < kTileRows; lane++) {
        float f = 0.0f;
        for (int g = 0; g < w.groups; g++) {
          const size_t i = at + static_cast<size_t>(g) * mr + m;
          f = add_group(w, w.tile(tile + t), g, lane, a + (static_cast<size_t>(g) * kQuads * mr + m) * 4, 4u * mr,
                        acts.scale[i], acts.scaled_sum[i], f);
        }
        out[m * ldo + 16 * t + lane] = f;
      }
    }
  }
}

void gemm_quant(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo, uint8_t*) {
  for (int block = 0; block < acts.num_blocks(); block++)
    gemm_block(w, tile, num_tiles, acts, block, out + static_cast<size_t>(block) * kBlockRows * ldo, ldo);
}

KernelTable make_table() {
  KernelTable table = float_kernel_table<scalar::V16>("scalar");
  table.gemm_quant = gemm_quant;
  return table;
}

}  // namespace

const KernelTable& scalar_kernels() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace forerun
