// The loops of sampling.cpp that run over a whole vocabulary, once per instruction set.
//
// Included by sampling.cpp alone. The bodies are written once, in vectors whose width the instruction set gives; it
// adds the two operations that have no portable spelling (`Baseline`, `Avx2`, `Avx512`). All operations are elementwise
// or run in 16 fixed lanes, so the level can't change a bit.
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
constexpr size_t kChunk = 64;
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
  typedef int64_t Integers __attribute__((vector_size(8 * W)));
  typedef uint64_t Words __attribute__((vector_size(8 * W)));
  typedef float Floats __attribute__((vector_size(4 * W)));
  typedef uint32_t HalfWords __attribute__((vector_size(4 * W)));
  typedef float WideFloats __attribute__((vector_size(8 * W)));
};

// product: out[j] = the low 32 bits of a[j], times m. at_least: bit j is set where x[j] >= y[j].
struct Baseline : Vectors<2> {
  static inline void product(const Words& a, uint32_t m, Words& out) {
    out = (Words)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
  }
  static inline unsigned at_least(const Doubles& x, const Doubles& y) {
    return static_cast<unsigned>(_mm_movemask_pd(_mm_cmpge_pd((__m128d)x, (__m128d)y)));
  }
};

struct Avx2 : Vectors<4> {
  FORERUN_AVX2 static inline void product(const Words& a, uint32_t m, Words& out) {
    out = (Words)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
  }
  FORERUN_AVX2 static inline unsigned at_least(const Doubles& x, const Doubles& y) {
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd((__m256d)x, (__m256d)y, _CMP_GE_OQ)));
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

template <typename Isa>
FORERUN_INLINE void exp_vector(const typename Isa::Doubles& x, typename Isa::Doubles& out) {
  using Doubles = typename Isa::Doubles;
  using Integers = typename Isa::Integers;
  const Doubles clamped = x < kExpZero ? Doubles{} + kExpZero : x;
  Doubles rounded, r, series;
  exp_split(clamped, rounded, r);
  exp_series(r, series);
  const Doubles scaled = (Doubles)((Integers)series + ((Integers)rounded << 52));
  out = x < kExpZero ? Doubles{} : scaled;
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
  FORERUN_INLINE void write(double* to, size_t count) const {
    if (count >= kLanes) return write_all(to);
    double values[kLanes];
    write_all(values);
    std::memcpy(to, values, count * sizeof(double));
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

// weights = exp((x - max) * inverse_temperature); returns their lane sum.
template <typename Isa>
FORERUN_INLINE double weigh_body(const double* x, size_t size, double max, double inverse_temperature,
                                 double* weights) {
  Lanes<Isa> sum, next;
  sum.fill(0.0);
  for (size_t i = 0; i < size; i += kLanes) {
    next.read(x + i, size - i, -kInf);
    for (auto& part : next.part) exp_vector<Isa>((part - max) * inverse_temperature, part);
    sum.add(next);
    next.write(weights + i, size - i);
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
    typename Isa::Floats narrow;
    load(narrow, logits + i);
    const Doubles wide = __builtin_convertvector(narrow, Doubles);
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

// ---- noise -----------------------------------------------------------------------------------------------------
// Philox4x32-10 (Salmon et al., SC 2011), a vector of counters at a time. Lanes of 64 bits hold a 32-bit word; what
// lies above it is ignored by the next product and masked at the end.

constexpr uint32_t kPhiloxM0 = 0xD2511F53u;
constexpr uint32_t kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

// u = (n + 1/2) 2^-52 with n the top 52 bits of word 1 : word 0. With n as the mantissa of a double in [1, 2), one
// exact subtraction is left.
constexpr uint64_t kOneBits = 0x3FF0000000000000u;
constexpr double kToUniform = 1.0 - 0x1p-53;

// u[i] = the uniform at index[i], for kChunk indices.
template <typename Isa>
FORERUN_INLINE void uniforms_body(const uint32_t* index, const NoiseAddress& address, double* u) {
  using Words = typename Isa::Words;
  for (size_t i = 0; i < kChunk; i += Isa::kWidth) {
    typename Isa::HalfWords narrow;
    load(narrow, index + i);
    Words c0 = __builtin_convertvector(narrow, Words);
    Words c1 = Words{} + address.position;
    Words c2 = Words{} + address.committed_len;
    Words c3 = Words{} + static_cast<uint32_t>(address.stream);
    uint32_t k0 = static_cast<uint32_t>(address.seed);
    uint32_t k1 = static_cast<uint32_t>(address.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      Words p0, p1;
      Isa::product(c0, kPhiloxM0, p0);
      Isa::product(c2, kPhiloxM1, p1);
      c0 = (p1 >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
      c2 = (p0 >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    const Words n = ((c1 << 32) | (c0 & 0xFFFFFFFFu)) >> 12;
    const typename Isa::Doubles out = (typename Isa::Doubles)(n | kOneBits) - kToUniform;
    store(u + i, out);
  }
}

// ---- the race --------------------------------------------------------------------------------------------------

// An id can't get a place when 1 - u >= bound * weight * (1 + 2^-40): -log u > 1 - u makes its ratio larger than that
// of the last place. The slack covers every rounding, so skipping changes no result and the order of visits doesn't
// matter.
constexpr double kRaceSlack = 1.0 + 0x1p-40;

// By ratio ascending, ties by id ascending.
inline bool is_before(const RaceResult& a, const RaceResult& b) {
  return a.ratio != b.ratio ? a.ratio < b.ratio : a.token_id < b.token_id;
}

// Who is first.
class Winner {
 public:
  double bound() const { return best_.ratio; }
  void meet(const RaceResult& result) {
    // The first one's ratio may be +inf, which is not below the initial one.
    if (best_.token_id < 0 || is_before(result, best_)) best_ = result;
  }
  const RaceResult& best() const { return best_; }

 private:
  RaceResult best_{-1, kInf};
};

// Who are the first few, in their order.
class Podium {
 public:
  explicit Podium(size_t count) : count_(count) { places_.reserve(count + 1); }

  double bound() const { return places_.size() < count_ ? kInf : places_.back().ratio; }
  void meet(const RaceResult& result) {
    places_.insert(std::upper_bound(places_.begin(), places_.end(), result, is_before), result);
    if (places_.size() > count_) places_.pop_back();
  }
  const std::vector<RaceResult>& places() const { return places_; }

 private:
  size_t count_;
  std::vector<RaceResult> places_;
};

// Shows each id that may still get a place to `first`, a Winner or a Podium.
template <typename Isa, typename First>
FORERUN_INLINE void race_body(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& address,
                              First& first) {
  uint32_t index[kChunk];
  double w[kChunk];
  double u[kChunk];
  for (size_t i = 0; i < size; i += kChunk) {
    const size_t count = size - i < kChunk ? size - i : kChunk;
    for (size_t j = 0; j < kChunk; ++j) index[j] = static_cast<uint32_t>(i + j);
    if (ids != nullptr) std::memcpy(index, ids + i, count * sizeof *ids);
    std::memset(w, 0, sizeof w);
    std::memcpy(w, weights + i, count * sizeof *w);
    uniforms_body<Isa>(index, address, u);
    for (size_t j = 0; j < count; j += Isa::kWidth) {
      typename Isa::Doubles weight, uniform;
      load(weight, w + j);
      load(uniform, u + j);
      // Comparisons with NaN (0 times an infinite bound) are false.
      const unsigned hopeless = Isa::at_least(1.0 - uniform, weight * (first.bound() * kRaceSlack));
      const unsigned absent = Isa::at_least(typename Isa::Doubles{}, weight);
      for (unsigned hits = Isa::kAllLanes & ~(hopeless | absent); hits != 0; hits &= hits - 1) {
        const size_t at = j + static_cast<size_t>(__builtin_ctz(hits));
        first.meet({static_cast<int32_t>(index[at]), -log_positive(u[at]) / w[at]});
      }
    }
  }
}

// ---- dispatch --------------------------------------------------------------------------------------------------

struct Kernels {
  double (*lane_sum)(const double*, size_t);
  double (*weigh)(const double*, size_t, double, double, double*);
  RowScan (*widen)(const float*, size_t, double*);
  double (*max)(const double*, size_t);
  void (*block_maxima)(const float*, size_t, float*);
  size_t (*between)(const double*, size_t, double, double, int32_t*);
  RaceResult (*race)(const int32_t*, const double*, size_t, const NoiseAddress&);
  void (*race_for)(const int32_t*, const double*, size_t, const NoiseAddress&, Podium&);
};

#define FORERUN_KERNELS(Isa, TARGET)                                                                                 \
  struct Isa##Kernels {                                                                                              \
    TARGET static double lane_sum(const double* x, size_t size) { return lane_sum_body<Isa>(x, size); }              \
    TARGET static double weigh(const double* x, size_t size, double max, double inverse_t, double* weights) {        \
      return weigh_body<Isa>(x, size, max, inverse_t, weights);                                                      \
    }                                                                                                                \
    TARGET static RowScan widen(const float* from, size_t size, double* x) {                                         \
      return widen_body<Isa>(from, size, x);                                                                         \
    }                                                                                                                \
    TARGET static double max(const double* x, size_t size) { return max_body<Isa>(x, size); }                        \
    TARGET static void block_maxima(const float* x, size_t size, float* maxima) {                                    \
      block_maxima_body<Isa>(x, size, maxima);                                                                       \
    }                                                                                                                \
    TARGET static size_t between(const double* x, size_t size, double low, double high, int32_t* found) {            \
      return between_body<Isa>(x, size, low, high, found);                                                           \
    }                                                                                                                \
    TARGET static RaceResult race(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& at) {  \
      Winner first;                                                                                                  \
      race_body<Isa>(ids, weights, size, at, first);                                                                 \
      return first.best();                                                                                           \
    }                                                                                                                \
    TARGET static void race_for(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& at,      \
                                Podium& podium) {                                                                    \
      race_body<Isa>(ids, weights, size, at, podium);                                                                \
    }                                                                                                                \
    static constexpr Kernels table{lane_sum, weigh, widen, max, block_maxima, between, race, race_for};              \
  }

FORERUN_KERNELS(Baseline, );
FORERUN_KERNELS(Avx2, FORERUN_AVX2);
FORERUN_KERNELS(Avx512, FORERUN_AVX512);

}  // namespace forerun::sampling::simd
