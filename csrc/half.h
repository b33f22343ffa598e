// Floats of 16 bits in plain integers. IEEE half precision equals the F16C instructions bit for bit (round to nearest
// even, subnormals kept).
#pragma once
#include <cstdint>
#include <cstring>

namespace forerun {

static inline float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 0x1fu;
  uint32_t mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);  // a NaN comes out quiet
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else if (mantissa == 0) {
    bits = sign;
  } else {
    int shift = __builtin_clz(mantissa) - 21;  // brings the leading one to bit 10
    bits = sign | ((113u - static_cast<uint32_t>(shift)) << 23) | (((mantissa << shift) & 0x3ffu) << 13);
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// The upper half of a float32.
struct Bf16 {
  uint16_t bits;
};

static inline float bf16_to_float(Bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

static inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (magnitude >= 0x38800000u) {                                             // normal half
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  if (magnitude < 0x33000000u) return sign;  // below half of the smallest subnormal
  uint32_t exponent = magnitude >> 23;
  uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  uint32_t shift = 126 - exponent;  // 14 to 24
  uint32_t half = mantissa >> shift;
  uint32_t rest = mantissa & ((1u << shift) - 1);
  uint32_t middle = 1u << (shift - 1);
  if (rest > middle || (rest == middle && (half & 1u))) half++;
  return static_cast<uint16_t>(sign | half);
}

}  // namespace forerun
