#include "cpu.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace forerun {
namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

// AMX int8, and the kernel's permission to use its tile state (asked for once per process).
bool has_amx() {
  unsigned a, b, c, d;
  if (!has_avx512vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if ((d & kTile) == 0 || (d & kInt8) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names{"scalar"};
  if (has_avx2()) names.push_back("avx2");
  if (has_avx512vnni()) names.push_back("avx512vnni");
  if (has_amx()) names.push_back("amx");
  return names;
}

const KernelTable& kernels_for(const std::string& isa) {
  std::string known;
  for (const std::string& name : available_isas()) {
    known += (known.empty() ? "" : ", ") + name;
    if (name != isa) continue;
    if (isa == "avx2") return avx2_kernels();
    if (isa == "avx512vnni") return avx512vnni_kernels();
    if (isa == "amx") return amx_kernels();
    return scalar_kernels();
  }
  throw std::invalid_argument("instruction set " + isa + " is not available here; available: " + known);
}

}  // namespace forerun
