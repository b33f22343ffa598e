// The loops of sampling_simd.h and sampling_race.h, compiled once per instruction set. Included by sampling.cpp alone.
#pragma once

#include "sampling_race.h"

namespace forerun::sampling::simd {

struct Kernels {
  double (*lane_sum)(const double*, size_t);
  double (*weigh)(const double*, size_t, double, double, double*);
  double (*weigh_row)(const float*, size_t, double, double, double*);
  double (*row_total)(const float*, size_t, double, double);
  RowScan (*widen)(const float*, size_t, double*);
  double (*max)(const double*, size_t);
  void (*block_maxima)(const float*, size_t, float*);
  double (*keep_allowed)(double*, size_t, const uint32_t*);
  bool (*allowed_maxima)(const float*, size_t, const uint32_t*, float*);
  size_t (*between)(const double*, size_t, double, double, int32_t*);
  void (*race)(const int32_t*, const double*, size_t, const NoiseAddress&, Winner&);
  void (*race_for)(const int32_t*, const double*, size_t, const NoiseAddress&, Podium&);
  void (*race_row)(const Row&, const NoiseAddress&, Winner&);
  void (*race_row_for)(const Row&, const NoiseAddress&, Podium&);
};

#define FORERUN_KERNELS(Isa, TARGET)                                                                                 \
  struct Isa##Kernels {                                                                                              \
    TARGET static double lane_sum(const double* x, size_t size) { return lane_sum_body<Isa>(x, size); }              \
    TARGET static double weigh(const double* x, size_t size, double max, double inverse_t, double* weights) {        \
      return weigh_body<Isa, true>(x, size, max, inverse_t, weights);                                                \
    }                                                                                                                \
    TARGET static double weigh_row(const float* x, size_t size, double max, double inverse_t, double* weights) {     \
      return weigh_body<Isa, true>(x, size, max, inverse_t, weights);                                                \
    }                                                                                                                \
    TARGET static double row_total(const float* x, size_t size, double max, double inverse_t) {                      \
      return weigh_body<Isa, false>(x, size, max, inverse_t, nullptr);                                               \
    }                                                                                                                \
    TARGET static RowScan widen(const float* from, size_t size, double* x) {                                         \
      return widen_body<Isa>(from, size, x);                                                                         \
    }                                                                                                                \
    TARGET static double max(const double* x, size_t size) { return max_body<Isa>(x, size); }                        \
    TARGET static void block_maxima(const float* x, size_t size, float* maxima) {                                    \
      block_maxima_body<Isa>(x, size, maxima);                                                                       \
    }                                                                                                                \
    TARGET static double keep_allowed(double* x, size_t size, const uint32_t* allowed) {                             \
      return keep_allowed_body<Isa>(x, size, allowed);                                                               \
    }                                                                                                                \
    TARGET static bool allowed_maxima(const float* x, size_t size, const uint32_t* allowed, float* maxima) {         \
      return allowed_maxima_body<Isa>(x, size, allowed, maxima);                                                     \
    }                                                                                                                \
    TARGET static size_t between(const double* x, size_t size, double low, double high, int32_t* found) {            \
      return between_body<Isa>(x, size, low, high, found);                                                           \
    }                                                                                                                \
    TARGET static void race(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& at,          \
                            Winner& winner) {                                                                        \
      race_body<Isa>(ids, weights, size, at, winner);                                                                \
    }                                                                                                                \
    TARGET static void race_for(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& at,      \
                                Podium& podium) {                                                                    \
      race_body<Isa>(ids, weights, size, at, podium);                                                                \
    }                                                                                                                \
    TARGET static void race_row(const Row& row, const NoiseAddress& at, Winner& winner) {                            \
      race_row_body<Isa>(row, at, winner);                                                                           \
    }                                                                                                                \
    TARGET static void race_row_for(const Row& row, const NoiseAddress& at, Podium& podium) {                        \
      race_row_body<Isa>(row, at, podium);                                                                           \
    }                                                                                                                \
    static constexpr Kernels table{lane_sum,       weigh,   weigh_row, row_total, widen,    max, block_maxima,       \
                                   keep_allowed,   allowed_maxima,     between,   race,     race_for,                \
                                   race_row,       race_row_for};                                                    \
  }

FORERUN_KERNELS(Baseline, );
FORERUN_KERNELS(Avx2, FORERUN_AVX2);
FORERUN_KERNELS(Avx512, FORERUN_AVX512);

}  // namespace forerun::sampling::simd
