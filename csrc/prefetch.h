// Software prefetch of weights.
#pragma once
#include <cstdint>

namespace forerun {

inline void fetch_to_l1(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }

// Stays where it is written; compilers gather what nothing depends on at the top of the loop.
inline void fetch_to_l2(const uint8_t* p) { asm volatile("prefetcht1 %a0" ::"p"(p)); }

}  // namespace forerun
