// Sixteen float lanes in plain C++: the reference that the other instruction sets must equal bit for bit.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace forerun {
namespace scalar {

struct I16 {
  int32_t v[16];
};

struct V16 {
  float v[16];
  static constexpr int kChains = 4;  // accumulators a loop keeps at once
  static constexpr int kFloatRows = 8;     // rows that a product with float weights takes at once
  static constexpr int kPairs = 4;         // pairs that an attention block holds at most
  static constexpr int kAttendChains = 4;  // accumulators that they share

  static V16 set1(float x) {
    V16 o;
    for (int i = 0; i < 16; i++) o.v[i] = x;
    return o;
  }
  static V16 load(const float* p) {
    V16 o;
    std::memcpy(o.v, p, sizeof o.v);
    return o;
  }
  static V16 load(const uint16_t* p) {
    V16 o;
    for (int i = 0; i < 16; i++) o.v[i] = half_to_float(p[i]);
    return o;
  }
  // Every other number from p[0] or p[1] on.
  static V16 load_even(const Bf16* p) {
    V16 o;
    for (int i = 0; i < 16; i++) o.v[i] = bf16_to_float(p[2 * i]);
    return o;
  }
  static V16 load_odd(const Bf16* p) { return load_even(p + 1); }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  void store(uint16_t* p) const {
    for (int i = 0; i < 16; i++) p[i] = float_to_half(v[i]);
  }
};

#define FORERUN_LANES(expr)                  \
  V16 o;                                     \
  for (int i = 0; i < 16; i++) o.v[i] = expr; \
  return o

static inline V16 add(V16 a, V16 b) { FORERUN_LANES(a.v[i] + b.v[i]); }
static inline V16 sub(V16 a, V16 b) { FORERUN_LANES(a.v[i] - b.v[i]); }
static inline V16 mul(V16 a, V16 b) { FORERUN_LANES(a.v[i] * b.v[i]); }
static inline V16 div(V16 a, V16 b) { FORERUN_LANES(a.v[i] / b.v[i]); }
static inline V16 fma(V16 a, V16 b, V16 c) { FORERUN_LANES(std::fmaf(a.v[i], b.v[i], c.v[i])); }
static inline V16 max(V16 a, V16 b) { FORERUN_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline V16 min(V16 a, V16 b) { FORERUN_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline V16 neg(V16 a) { FORERUN_LANES(-a.v[i]); }
// a < b ? 0 : x, lane by lane
static inline V16 zero_where_less(V16 a, V16 b, V16 x) { FORERUN_LANES(a.v[i] < b.v[i] ? 0.0f : x.v[i]); }
static inline V16 to_float(I16 a) { FORERUN_LANES(static_cast<float>(a.v[i])); }
// a * 2^n by the exponent field; a and the result are normal.
static inline V16 scale_pow2(V16 a, I16 n) {
  for (int i = 0; i < 16; i++) {
    uint32_t bits;
    std::memcpy(&bits, &a.v[i], 4);
    bits += static_cast<uint32_t>(n.v[i]) << 23;
    std::memcpy(&a.v[i], &bits, 4);
  }
  return a;
}
#undef FORERUN_LANES

static inline I16 round_to_int(V16 a) {
  I16 o;
  for (int i = 0; i < 16; i++) o.v[i] = static_cast<int32_t>(std::lrintf(a.v[i]));
  return o;
}
// Largest bit pattern of |lane|: orders as the floats do, and a NaN or an infinity wins.
static inline uint32_t max_abs_bits(V16 a, V16 b) {
  uint32_t best = 0;
  for (int i = 0; i < 16; i++) {
    uint32_t x, y;
    std::memcpy(&x, &a.v[i], 4);
    std::memcpy(&y, &b.v[i], 4);
    x &= 0x7fffffffu;
    y &= 0x7fffffffu;
    best = x > best ? x : best;
    best = y > best ? y : best;
  }
  return best;
}
// Stores both vectors as int8 and returns the sum of all.
static inline void store_codes(I16 a, I16 b, int8_t* out, int32_t* sums) {
  for (int i = 0; i < 16; i++) {
    out[i] = static_cast<int8_t>(a.v[i]);
    out[16 + i] = static_cast<int8_t>(b.v[i]);
    sums[0] += a.v[i];
    sums[1] += b.v[i];
  }
}
// The fixed tree of every float reduction: halves of 8, 4, 2, 1.
static inline float reduce_add(V16 a) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) a.v[i] = a.v[i] + a.v[i + width];
  return a.v[0];
}
static inline float reduce_max(V16 a) {
  float best = a.v[0];
  for (int i = 1; i < 16; i++) best = a.v[i] > best ? a.v[i] : best;
  return best;
}

}  // namespace scalar
}  // namespace forerun
