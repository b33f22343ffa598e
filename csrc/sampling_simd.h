// The loops of sampling.cpp that run over a whole vocabulary, for any instruction set: vectors, exp, and rows.
//
// Included by sampling.cpp alone, by way of sampling_kernels.h. The bodies are written once, in vectors whose width the
// instruction set gives; it adds the few operations that have no portable spelling (`Baseline`, `Avx2`, `Avx512`). All
// operations are elementwise or run in 16 fixed lanes, so the level can't change a bit.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "sampling.h"

#define FORERUN_INLINE inline __attribute__((always_inline))
#define FORERUN_AVX2 __attribute__((target("avx2")))
#define FORERUN_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512")))

namespace forerun::sampling::simd {

constexpr size_t kLanes = 16;
constexpr double kInf = std::numeric_limits<double>::infinity();

template <typename Vector, typename T>
FORERUN_INLINE void load(Vector& to, const T* from) {
  std::memcpy(&to, from, sizeof(Vector));
}

template <typename Vector, typename T>
FORERUN_INLINE void store(T* to, const Vector& from) {
  std::memcpy(to, &from, sizeof(Vector));
}

// ---- what each instruction set brings --------------------------------------------------------------------------

// Vectors of W float64, of their bits, and of as many float32 and 32-bit integers.
template <size_t W>
struct Vectors {
  static constexpr size_t kWidth = W;
  static constexpr unsigned kAllLanes = (1u << W) - 1;
  typedef double Doubles __attribute__((vector_size(8 * W)));
  typedef uint64_t Words __attribute__((vector_size(8 * W)));
  typedef uint32_t HalfWords __attribute__((vector_size(4 * W)));
  typedef float WideFloats __attribute__((vector_size(8 * W)));
  typedef uint32_t WideHalfWords __attribute__((vector_size(8 * W)));
};

// product: out[j] = the low 32 bits of a[j], times m. at_least: bit j is set where x[j] >= y[j]. top_bits: bit j is the
// highest one of x[j]. widen: float32 to float64, which GCC 12 does in halves when it is left to it.
struct Baseline : Vectors<2> {
  static inline void product(const Words& a, uint32_t m, Words& out) {
    out = (Words)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
  }
  static inline unsigned at_least(const Doubles& x, const Doubles& y) {
    return static_cast<unsigned>(_mm_movemask_pd(_mm_cmpge_pd((__m128d)x, (__m128d)y)));
  }
  static inline unsigned top_bits(const Words& x) { return static_cast<unsigned>(_mm_movemask_pd((__m128d)x)); }
  static inline void widen(const float* from, Doubles& to) { to = Doubles{from[0], from[1]}; }
};

struct Avx2 : Vectors<4> {
  FORERUN_AVX2 static inline void product(const Words& a, uint32_t m, Words& out) {
    out = (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
  }
  FORERUN_AVX2 static inline unsigned at_least(const Doubles& x, const Doubles& y) {
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd((__m256d)x, (__m256d)y, _CMP_GE_OQ)));
  }
  FORERUN_AVX2 static inline unsigned top_bits(const Words& x) {
    return static_cast<unsigned>(_mm256_movemask_pd((__m256d)x));
  }
  FORERUN_AVX2 static inline void widen(const float* from, Doubles& to) {
    to = (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(from));
  }
};

struct Avx512 : Vectors<8> {
  FORERUN_AVX512 static inline void product(const Words& a, uint32_t m, Words& out) {
    // The masked form, because GCC 12 warns of an undefined operand in the plain one.
    out = (Words)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, _mm512_set1_epi64(m));
  }
  FORERUN_AVX512 static inline unsigned at_least(const Doubles& x, const Doubles& y) {
    return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_GE_OQ);
  }
  FORERUN_AVX512 static inline unsigned top_bits(const Words& x) { return _mm512_movepi64_mask((__m512i)x); }
  FORERUN_AVX512 static inline void widen(const float* from, Doubles& to) {
    to = (Doubles)_mm512_maskz_cvtps_pd(0xFF, _mm256_loadu_ps(from));
  }
};

// Four vectors that take each step side by side: a step waits for the one before, and four chains share the wait.
template <typename Isa>
struct Bundle {
  using Doubles = typename Isa::Doubles;
  static constexpr size_t kParts = 4;
  static constexpr size_t kSize = kParts * Isa::kWidth;
  Doubles part[kParts];

#define FORERUN_ELEMENTWISE(op)                                                                                      \
  friend FORERUN_INLINE Bundle operator op(const Bundle& a, const Bundle& b) {                                       \
    return {{a.part[0] op b.part[0], a.part[1] op b.part[1], a.part[2] op b.part[2], a.part[3] op b.part[3]}};       \
  }                                                                                                                  \
  friend FORERUN_INLINE Bundle operator op(const Bundle& a, double b) {                                              \
    return {{a.part[0] op b, a.part[1] op b, a.part[2] op b, a.part[3] op b}};                                       \
  }
  FORERUN_ELEMENTWISE(+)
  FORERUN_ELEMENTWISE(-)
  FORERUN_ELEMENTWISE(*)
#undef FORERUN_ELEMENTWISE
};

// ---- exp -------------------------------------------------------------------------------------------------------
// x = n ln 2 + r with |r| <= ln(2) / 2; exp(r) by its Taylor series up to r^13 / 13! (the rest is below 2^-57), Horner
// from the highest power; then n is added to the exponent field. Adding 1.5 * 2^52 rounds to the nearest integer and
// leaves it in the low bits. Written on a type, so that one value and a vector take the same steps.

constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kLn2High = 0x1.62e42fee00000p-1;  // 21 trailing zero bits: n * kLn2High is exact
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kRounder = 0x1.8p52;
constexpr double kExpZero = -708.0;  // below it the result is 0, so no result is subnormal

template <typename T>
FORERUN_INLINE void exp_split(const T& x, T& rounded, T& reduced) {
  rounded = x * kLog2E + kRounder;
  const T n = rounded - kRounder;
  reduced = (x - n * kLn2High) - n * kLn2Low;
}

template <typename T>
FORERUN_INLINE void exp_series(const T& r, T& out) {
  T tail = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  tail = tail * r + 1.0 / 39916800.0;
  tail = tail * r + 1.0 / 3628800.0;
  tail = tail * r + 1.0 / 362880.0;
  tail = tail * r + 1.0 / 40320.0;
  tail = tail * r + 1.0 / 5040.0;
  tail = tail * r + 1.0 / 720.0;
  tail = tail * r + 1.0 / 120.0;
  tail = tail * r + 1.0 / 24.0;
  tail = tail * r + 1.0 / 6.0;
  tail = tail * r + 0.5;
  out = (r * r) * tail + r + 1.0;
}

FORERUN_INLINE double exp_one(double x) {
  if (x < kExpZero) return 0.0;
  double rounded, r, series;
  exp_split(x, rounded, r);
  exp_series(r, series);
  int64_t bits, n;
  std::memcpy(&bits, &series, sizeof bits);
  std::memcpy(&n, &rounded, sizeof n);
  bits = static_cast<int64_t>(static_cast<uint64_t>(bits) + (static_cast<uint64_t>(n) << 52));
  std::memcpy(&series, &bits, sizeof bits);
  return series;
}

// What the steps make of values below kExpZero doesn't matter; NaN stays NaN.
template <typename Isa>
FORERUN_INLINE void exp_bundle(const Bundle<Isa>& x, Bundle<Isa>& out) {
  using Doubles = typename Isa::Doubles;
  using Words = typename Isa::Words;
  Bundle<Isa> rounded, r, series;
  exp_split(x, rounded, r);
  exp_series(r, series);
  for (size_t p = 0; p < x.kParts; ++p) {
    const Doubles scaled = (Doubles)((Words)series.part[p] + ((Words)rounded.part[p] << 52));
    out.part[p] = x.part[p] < kExpZero ? Doubles{} : scaled;
  }
}

// ---- rows in 16 lanes ------------------------------------------------------------------------------------------

// The values at indices 16 i to 16 i + 15.
template <typename Isa>
struct Lanes {
  static constexpr size_t kParts = kLanes / Isa::kWidth;
  typename Isa::Doubles part[kParts];

  FORERUN_INLINE void fill(double value) {
    for (auto& p : part) p = typename Isa::Doubles{} + value;
  }
  FORERUN_INLINE void read_all(const double* from) {
    for (size_t p = 0; p < kParts; ++p) load(part[p], from + p * Isa::kWidth);
  }
  FORERUN_INLINE void write_all(double* to) const {
    for (size_t p = 0; p < kParts; ++p) store(to + p * Isa::kWidth, part[p]);
  }
  // `count` values lie at `from`; padding takes the place of missing ones.
  FORERUN_INLINE void read(const double* from, size_t count, double padding) {
    if (count >= kLanes) return read_all(from);
    double values[kLanes];
    for (size_t j = 0; j < kLanes; ++j) values[j] = j < count ? from[j] : padding;
    read_all(values);
  }
  FORERUN_INLINE void add(const Lanes& other) {
    for (size_t p = 0; p < kParts; ++p) part[p] += other.part[p];
  }
  FORERUN_INLINE void take_max(const Lanes& other) {
    for (size_t p = 0; p < kParts; ++p) part[p] = other.part[p] > part[p] ? other.part[p] : part[p];
  }
  // Lanes j and j + 8 are added, then 4, 2, 1.
  FORERUN_INLINE double sum() const {
    double lane[kLanes];
    write_all(lane);
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    return lane[0];
  }
  FORERUN_INLINE double max() const {
    double lane[kLanes];
    write_all(lane);
    double out = lane[0];
    for (size_t j = 1; j < kLanes; ++j) out = lane[j] > out ? lane[j] : out;
    return out;
  }
};

// Lane j adds the values at indices j mod 16 in ascending order; then the lanes are added as a fixed tree.
template <typename Isa>
FORERUN_INLINE double lane_sum_body(const double* x, size_t size) {
  Lanes<Isa> sum, next;
  sum.fill(0.0);
  for (size_t i = 0; i < size; i += kLanes) {
    next.read(x + i, size - i, 0.0);
    sum.add(next);
  }
  return sum.sum();
}

template <typename Isa>
FORERUN_INLINE double max_body(const double* x, size_t size) {
  Lanes<Isa> max, next;
  max.fill(-kInf);
  for (size_t i = 0; i < size; i += kLanes) {
    next.read(x + i, size - i, -kInf);
    max.take_max(next);
  }
  return max.max();
}

template <typename Isa>
FORERUN_INLINE void load_wide(const float* from, typename Isa::Doubles& to) {
  Isa::widen(from, to);
}

template <typename Isa>
FORERUN_INLINE void load_wide(const double* from, typename Isa::Doubles& to) {
  load(to, from);
}

// How many values weigh() takes at a time: whole bundles and whole rows of lanes.
template <typename Isa>
constexpr size_t kStride = kLanes < Bundle<Isa>::kSize ? Bundle<Isa>::kSize : kLanes;

// The weights of kStride<Isa> values, added to `sum` and written if there is somewhere to.
template <typename Isa, bool kWrites, typename T>
FORERUN_INLINE void weigh_stride(const T* x, double max, double inverse_temperature, Lanes<Isa>& sum,
                                 double* weights) {
  using Part = Bundle<Isa>;
  for (size_t b = 0; b < kStride<Isa> / Part::kSize; ++b) {
    Part w;
    for (size_t p = 0; p < w.kParts; ++p) load_wide<Isa>(x + b * Part::kSize + p * Isa::kWidth, w.part[p]);
    exp_bundle<Isa>((w - max) * inverse_temperature, w);
    for (size_t p = 0; p < w.kParts; ++p) {
      sum.part[(b * w.kParts + p) % sum.kParts] += w.part[p];
      if (kWrites) store(weights + b * Part::kSize + p * Isa::kWidth, w.part[p]);
    }
  }
}

// weights = exp((x - max) * inverse_temperature), x in float32 or float64; returns their lane sum.
template <typename Isa, bool kWrites, typename T>
FORERUN_INLINE double weigh_body(const T* x, size_t size, double max, double inverse_temperature, double* weights) {
  constexpr size_t kStep = kStride<Isa>;
  Lanes<Isa> sum;
  sum.fill(0.0);
  size_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    weigh_stride<Isa, kWrites>(x + i, max, inverse_temperature, sum, kWrites ? weights + i : nullptr);
  }
  if (i < size) {
    T rest[kStep];
    double rest_weights[kStep];
    std::fill(rest, rest + kStep, -std::numeric_limits<T>::infinity());
    std::memcpy(rest, x + i, (size - i) * sizeof(T));
    weigh_stride<Isa, kWrites>(rest, max, inverse_temperature, sum, rest_weights);
    if (kWrites) std::memcpy(weights + i, rest_weights, (size - i) * sizeof(double));
  }
  return sum.sum();
}

struct RowScan {
  double max;
  bool is_lawful;  // no NaN and no +inf
};

// x = logits in float64. The maximum is meaningful only if the row is lawful.
template <typename Isa>
FORERUN_INLINE RowScan widen_body(const float* logits, size_t size, double* x) {
  using Doubles = typename Isa::Doubles;
  Doubles max = Doubles{} - kInf;
  Doubles num_bad{};
  size_t i = 0;
  for (; i + Isa::kWidth <= size; i += Isa::kWidth) {
    Doubles wide;
    Isa::widen(logits + i, wide);
    store(x + i, wide);
    num_bad = wide < kInf ? num_bad : num_bad + 1.0;
    max = wide > max ? wide : max;
  }
  RowScan scan{max[0], Isa::at_least(Doubles{}, num_bad) == Isa::kAllLanes};
  for (size_t j = 1; j < Isa::kWidth; ++j) scan.max = max[j] > scan.max ? max[j] : scan.max;
  for (; i < size; ++i) {
    x[i] = logits[i];
    scan.is_lawful &= x[i] < kInf;
    scan.max = x[i] > scan.max ? x[i] : scan.max;
  }
  return scan;
}

constexpr size_t kMaximaBlock = 128;

// maxima[b] = the largest of x at kMaximaBlock b to kMaximaBlock (b + 1) - 1; NaN counts as -inf.
template <typename Isa>
FORERUN_INLINE void block_maxima_body(const float* x, size_t size, float* maxima) {
  using Floats = typename Isa::WideFloats;
  constexpr size_t kWidth = 2 * Isa::kWidth;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  for (size_t first = 0; first < size; first += kMaximaBlock) {
    const size_t count = size - first < kMaximaBlock ? size - first : kMaximaBlock;
    Floats a = Floats{} + kLeast, b = a;  // two chains, because each maximum waits for the one before
    size_t i = first;
    for (; i + 2 * kWidth <= first + count; i += 2 * kWidth) {
      Floats next;
      load(next, x + i);
      a = next > a ? next : a;
      load(next, x + i + kWidth);
      b = next > b ? next : b;
    }
    a = b > a ? b : a;
    float max = kLeast;
    for (size_t j = 0; j < kWidth; ++j) max = a[j] > max ? a[j] : max;
    for (; i < first + count; ++i) max = x[i] > max ? x[i] : max;
    maxima[first / kMaximaBlock] = max;
  }
}

// ---- masks: a bit per id, 32 to a word, set where the id is allowed ----------------------------------------------

constexpr size_t kMaskBits = 32;

inline bool is_allowed(const uint32_t* allowed, size_t id) { return allowed[id / kMaskBits] >> id % kMaskBits & 1; }

// Sets what isn't allowed to -inf and returns the largest value that is left.
template <typename Isa>
FORERUN_INLINE double keep_allowed_body(double* x, size_t size, const uint32_t* allowed) {
  using Doubles = typename Isa::Doubles;
  using Words = typename Isa::Words;
  Words lane_bits;
  for (size_t j = 0; j < Isa::kWidth; ++j) lane_bits[j] = uint64_t{1} << j;
  Doubles max = Doubles{} - kInf;
  size_t i = 0;
  for (; i + kMaskBits <= size; i += kMaskBits) {
    const uint32_t bits = allowed[i / kMaskBits];
    if (bits == 0) {
      std::fill(x + i, x + i + kMaskBits, -kInf);
      continue;
    }
    for (size_t j = 0; j < kMaskBits; j += Isa::kWidth) {
      Doubles values;
      load(values, x + i + j);
      const Words lanes = (Words{} + (bits >> j)) & lane_bits;
      values = lanes != Words{} ? values : Doubles{} - kInf;
      store(x + i + j, values);
      max = values > max ? values : max;
    }
  }
  double out = max[0];
  for (size_t j = 1; j < Isa::kWidth; ++j) out = max[j] > out ? max[j] : out;
  for (; i < size; ++i) {
    if (!is_allowed(allowed, i)) x[i] = -kInf;
    out = x[i] > out ? x[i] : out;
  }
  return out;
}

// maxima[b] = the largest allowed value of x at kMaximaBlock b to kMaximaBlock (b + 1) - 1, -inf where none is. Returns
// whether the row, allowed or not, holds no NaN and no +inf; else the maxima have no meaning.
template <typename Isa>
FORERUN_INLINE bool allowed_maxima_body(const float* x, size_t size, const uint32_t* allowed, float* maxima) {
  using Floats = typename Isa::WideFloats;
  using Words = typename Isa::WideHalfWords;
  constexpr size_t kWidth = 2 * Isa::kWidth;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Words lane_bits;
  for (size_t j = 0; j < kWidth; ++j) lane_bits[j] = uint32_t{1} << j;
  Words num_bad{};
  for (size_t first = 0; first < size; first += kMaximaBlock) {
    const size_t end = size - first < kMaximaBlock ? size : first + kMaximaBlock;
    Floats max = Floats{} - kInfinity;
    size_t i = first;
    for (; i + kMaskBits <= end; i += kMaskBits) {
      const uint32_t bits = allowed[i / kMaskBits];
      for (size_t j = 0; j < kMaskBits; j += kWidth) {
        Floats values;
        load(values, x + i + j);
        num_bad = values < kInfinity ? num_bad : num_bad + 1u;
        const Words lanes = (Words{} + (bits >> j)) & lane_bits;
        values = lanes != Words{} ? values : Floats{} - kInfinity;
        max = values > max ? values : max;
      }
    }
    float out = -kInfinity;
    for (size_t j = 0; j < kWidth; ++j) out = max[j] > out ? max[j] : out;
    for (; i < end; ++i) {
      num_bad[0] += !(x[i] < kInfinity);
      if (is_allowed(allowed, i) && x[i] > out) out = x[i];
    }
    maxima[first / kMaximaBlock] = out;
  }
  uint32_t total_bad = 0;
  for (size_t j = 0; j < kWidth; ++j) total_bad |= num_bad[j];
  return total_bad == 0;
}

// Writes the indices of the values in [low, high), ascending, and returns their number. No value is NaN.
template <typename Isa>
FORERUN_INLINE size_t between_body(const double* values, size_t size, double low, double high, int32_t* found) {
  const typename Isa::Doubles lows = typename Isa::Doubles{} + low;
  const typename Isa::Doubles highs = typename Isa::Doubles{} + high;
  size_t num_found = 0;
  size_t i = 0;
  for (; i + Isa::kWidth <= size; i += Isa::kWidth) {
    typename Isa::Doubles x;
    load(x, values + i);
    for (unsigned hits = Isa::at_least(x, lows) & ~Isa::at_least(x, highs); hits != 0; hits &= hits - 1) {
      found[num_found++] = static_cast<int32_t>(i) + __builtin_ctz(hits);
    }
  }
  for (; i < size; ++i) {
    if (values[i] >= low && values[i] < high) found[num_found++] = static_cast<int32_t>(i);
  }
  return num_found;
}

}  // namespace forerun::sampling::simd
