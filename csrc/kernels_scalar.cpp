// The reference: plain loops, the contract's order of roundings spelled out. Compiled for baseline x86-64.
#include "kernels.h"
#include "simd_scalar.h"
#include "float_kernels.h"

namespace forerun {
namespace {

// Integer dot product of one group, exact; `a` points at quad 0 of the row, quads `stride` bytes apart.
int32_t group_dot(const PackedMatrix& w, const uint8_t* codes, int g, int lane, const int8_t* a, size_t stride) {
  int32_t dot = 0;
  for (int quad = 0; quad < kQuads; quad++) {
    for (int i = 0; i < 4; i++) {
      int32_t code;
      if (w.format == Format::Q4) {
        const uint8_t byte = codes[(static_cast<size_t>(g) * 4 + quad / 2) * 64 + lane * 4 + i];
        code = quad % 2 ? byte >> 4 : byte & 15;
      } else {
        code = static_cast<int32_t>(codes[(static_cast<size_t>(g) * kQuads + quad) * 64 + lane * 4 + i]) - 128;
      }
      dot += code * a[quad * stride + i];
    }
  }
  return dot;
}

void gemm_block(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, int block, float* out, size_t ldo) {
  const int mr = acts.block_size(block);
  const int8_t* a = acts.block_codes(block);
  const size_t at = acts.group_at(block);
  for (int t = 0; t < num_tiles; t++) {
    const uint8_t* data = w.tile(tile + t);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(data);
    for (int m = 0; m < mr; m++) {
      for (int lane = 0; lane < kTileRows; lane++) {
        float f = 0.0f;
        for (int g = 0; g < w.groups; g++) {
          const int8_t* quads = a + (static_cast<size_t>(g) * kQuads * mr + m) * 4;
          const float dot = static_cast<float>(group_dot(w, data + w.codes_at, g, lane, quads, 4u * mr));
          const size_t i = at + static_cast<size_t>(g) * mr + m;
          if (w.format == Format::Q4) {
            f = std::fmaf(half_to_float(scales[g * 32 + 16 + lane]), acts.scaled_sum[i], f);
            f = std::fmaf(dot, half_to_float(scales[g * 32 + lane]) * acts.scale[i], f);
          } else {
            f = std::fmaf(dot, half_to_float(scales[g * 16 + lane]) * acts.scale[i], f);
          }
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
