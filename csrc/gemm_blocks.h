// From a matrix and activations in quads to the microkernel of their format and number of rows.
#pragma once
#include "layout.h"

namespace forerun {
namespace {

// Rows::multiply<F, MR>(w, tile, num_tiles, acts, block, out, ldo) does one block of MR rows.
template <class Rows, Format F>
void gemm_format(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo) {
  using Multiply = void (*)(const PackedMatrix&, int, int, const Acts&, int, float*, size_t);
  static constexpr Multiply kMultiply[kBlockRows] = {
      Rows::template multiply<F, 1>, Rows::template multiply<F, 2>, Rows::template multiply<F, 3>,
      Rows::template multiply<F, 4>, Rows::template multiply<F, 5>, Rows::template multiply<F, 6>,
      Rows::template multiply<F, 7>, Rows::template multiply<F, 8>};
  for (int block = 0; block < acts.num_blocks(); block++)
    kMultiply[acts.block_size(block) - 1](w, tile, num_tiles, acts, block,
                                          out + static_cast<size_t>(block) * kBlockRows * ldo, ldo);
}

template <class Rows>
inline void gemm_blocks(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo) {
  with_format(w.format, [&](auto format) {
    gemm_format<Rows, decltype(format)::value>(w, tile, num_tiles, acts, out, ldo);
  });
}

}  // namespace
}  // namespace forerun
