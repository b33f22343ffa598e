// AVX-512 with VNNI. Compile with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni.
#include "kernels.h"
#include "simd_avx512.h"
#include "float_kernels.h"
#include "append_avx512.h"
#include "gemm_avx512vnni.h"
#include "quantise_avx512.h"

namespace forerun {
namespace {

KernelTable make_table() {
  KernelTable table = float_kernel_table<avx512::V16>("avx512vnni");
  table.quantise_rows = quantise_rows_avx512;
  table.append_keys = append_keys_avx512;
  table.gemm_quant = gemm_quads;
  return table;
}

}  // namespace

const KernelTable& avx512vnni_kernels() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace forerun
