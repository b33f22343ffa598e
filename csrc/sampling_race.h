// Noise and the race, for any instruction set. Included by sampling.cpp alone, by way of sampling_kernels.h.
#pragma once

#include "sampling_simd.h"

namespace forerun::sampling::simd {

// ---- noise -----------------------------------------------------------------------------------------------------
// Philox4x32-10 (Salmon et al., SC 2011), several vectors of counters at a time, because each product waits for the
// round before. Lanes of 64 bits hold a 32-bit word; what lies above it is ignored by the next product and masked at
// the end.

constexpr uint32_t kPhiloxM0 = 0xD2511F53u;
constexpr uint32_t kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;
constexpr size_t kNumCounters = 4;  // vectors of counters that take each round side by side
constexpr uint64_t kLowWord = 0xFFFFFFFFu;

// Keys, and what the first rounds make of the counter words that all ids share: c0 is the id alone at first, so half of
// rounds 0 and 1 is the same for all of them.
struct NoisePlan {
  explicit NoisePlan(const NoiseAddress& address) {
    uint32_t key0 = static_cast<uint32_t>(address.seed);
    uint32_t key1 = static_cast<uint32_t>(address.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      k0[round] = key0;
      k1[round] = key1;
      key0 += kPhiloxW0;
      key1 += kPhiloxW1;
    }
    const uint64_t p1 = static_cast<uint64_t>(address.committed_len) * kPhiloxM1;
    const uint64_t c0 = (p1 >> 32) ^ address.position ^ k0[0];
    const uint64_t p0 = c0 * kPhiloxM0;
    k1[0] ^= static_cast<uint32_t>(address.stream);
    k0[1] ^= p1 & kLowWord;
    k1[1] ^= p0 >> 32;
    k1[2] ^= p0 & kLowWord;
  }

  // In round 0 c3, in round 1 c1 and the product of c0, in round 2 c3 are part of the keys already.
  uint64_t k0[kPhiloxRounds], k1[kPhiloxRounds];
};

// The first two words of the counters whose first word is `index`. Whatever isn't used of them isn't computed.
template <typename Isa>
FORERUN_INLINE void philox_words(const NoisePlan& plan, const typename Isa::Words* index, typename Isa::Words* word0,
                                 typename Isa::Words* word1) {
  using Words = typename Isa::Words;
  constexpr size_t N = kNumCounters;
  Words c0[N], c1[N], c2[N], c3[N], p0[N], p1[N];
#pragma GCC unroll 4
  for (size_t v = 0; v < N; ++v) Isa::product(index[v], kPhiloxM0, c3[v]);
#pragma GCC unroll 4
  for (size_t v = 0; v < N; ++v) c2[v] = (c3[v] >> 32) ^ plan.k1[0];
#pragma GCC unroll 4
  for (size_t v = 0; v < N; ++v) Isa::product(c2[v], kPhiloxM1, c1[v]);
#pragma GCC unroll 4
  for (size_t v = 0; v < N; ++v) {
    c0[v] = (c1[v] >> 32) ^ plan.k0[1];
    c2[v] = c3[v] ^ plan.k1[1];
    c3[v] = Words{};
  }
#pragma GCC unroll 8
  for (int round = 2; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 4
    for (size_t v = 0; v < N; ++v) {
      Isa::product(c0[v], kPhiloxM0, p0[v]);
      Isa::product(c2[v], kPhiloxM1, p1[v]);
    }
#pragma GCC unroll 4
    for (size_t v = 0; v < N; ++v) {
      c0[v] = (p1[v] >> 32) ^ c1[v] ^ plan.k0[round];
      c2[v] = (p0[v] >> 32) ^ c3[v] ^ plan.k1[round];
      c1[v] = p1[v];
      c3[v] = p0[v];
    }
  }
#pragma GCC unroll 4
  for (size_t v = 0; v < N; ++v) {
    word0[v] = c0[v] & kLowWord;
    word1[v] = c1[v] & kLowWord;
  }
}

// u = (n + 1/2) 2^-52 with n the top 52 bits of word 1 : word 0. With n as the mantissa of a double in [1, 2), one
// exact subtraction is left.
constexpr uint64_t kOneBits = 0x3FF0000000000000u;
constexpr double kToUniform = 1.0 - 0x1p-53;

constexpr size_t kChunk = 32;

constexpr uint64_t kCount[kChunk] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// u[i] = the uniform at index[i], for kChunk indices.
template <typename Isa>
FORERUN_INLINE void uniforms_body(const NoisePlan& plan, const uint32_t* index, double* u) {
  using Words = typename Isa::Words;
  constexpr size_t N = kNumCounters;
  for (size_t i = 0; i < kChunk; i += N * Isa::kWidth) {
    Words at[N], word0[N], word1[N];
    for (size_t v = 0; v < N; ++v) {
      typename Isa::HalfWords narrow;
      load(narrow, index + i + v * Isa::kWidth);
      at[v] = __builtin_convertvector(narrow, Words);
    }
    philox_words<Isa>(plan, at, word0, word1);
    for (size_t v = 0; v < N; ++v) {
      const Words n = ((word1[v] << 32) | word0[v]) >> 12;
      const typename Isa::Doubles out = (typename Isa::Doubles)(n | kOneBits) - kToUniform;
      store(u + i + v * Isa::kWidth, out);
    }
  }
}

// Whether word 1 of some id of [first, first + kChunk) is at least `floor`.
template <typename Isa>
FORERUN_INLINE bool any_word1_body(const NoisePlan& plan, size_t first, uint64_t floor) {
  using Words = typename Isa::Words;
  constexpr size_t N = kNumCounters;
  Words below = ~Words{};  // the top bit stays while every word is below
  for (size_t i = 0; i < kChunk; i += N * Isa::kWidth) {
    Words at[N], word0[N], word1[N];
#pragma GCC unroll 4
    for (size_t v = 0; v < N; ++v) {
      load(at[v], kCount + v * Isa::kWidth);
      at[v] += first + i;
    }
    philox_words<Isa>(plan, at, word0, word1);
#pragma GCC unroll 4
    for (size_t v = 0; v < N; ++v) below &= word1[v] - floor;
  }
  return Isa::top_bits(below) != Isa::kAllLanes;
}

// ---- the race --------------------------------------------------------------------------------------------------

// An id can't get a place when 1 - u >= bound * W * (1 + 2^-40), with `bound` the ratio of the last place and W a
// weight that is no smaller than the id's own but for rounding. For -log u > 1 - u, and log, exp and each operation are
// accurate to 2^-50, so the ratio it would be given is above (1 - u) / W * (1 - 2^-46) > bound: strictly, so that no
// tie is lost either. So skipping changes no result, and the order of visits doesn't matter.
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

// kChunk ids and their weights; 0 takes the place of missing ones.
struct Chunk {
  uint32_t index[kChunk];
  double w[kChunk];

  FORERUN_INLINE void count_from(size_t first) {
    for (size_t j = 0; j < kChunk; ++j) index[j] = static_cast<uint32_t>(first + j);
  }
};

// Shows each id of a chunk that may still get a place to `first`, a Winner or a Podium.
template <typename Isa, typename First>
FORERUN_INLINE void race_chunk(const NoisePlan& plan, const Chunk& chunk, First& first) {
  double u[kChunk];
  uniforms_body<Isa>(plan, chunk.index, u);
  for (size_t j = 0; j < kChunk; j += Isa::kWidth) {
    typename Isa::Doubles weight, uniform;
    load(weight, chunk.w + j);
    load(uniform, u + j);
    // Comparisons with NaN (0 times an infinite bound) are false.
    const unsigned hopeless = Isa::at_least(1.0 - uniform, weight * (first.bound() * kRaceSlack));
    const unsigned absent = Isa::at_least(typename Isa::Doubles{}, weight);
    for (unsigned hits = Isa::kAllLanes & ~(hopeless | absent); hits != 0; hits &= hits - 1) {
      const size_t at = j + static_cast<size_t>(__builtin_ctz(hits));
      first.meet({static_cast<int32_t>(chunk.index[at]), -log_positive(u[at]) / chunk.w[at]});
    }
  }
}

// The race over weights; `ids` null means 0, 1, 2, ...
template <typename Isa, typename First>
FORERUN_INLINE void race_body(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& address,
                              First& first) {
  const NoisePlan plan(address);
  Chunk chunk;
  for (size_t i = 0; i < size; i += kChunk) {
    const size_t count = size - i < kChunk ? size - i : kChunk;
    chunk.count_from(i);
    if (ids != nullptr) std::memcpy(chunk.index, ids + i, count * sizeof *ids);
    std::memset(chunk.w, 0, sizeof chunk.w);
    std::memcpy(chunk.w, weights + i, count * sizeof *weights);
    race_chunk<Isa>(plan, chunk, first);
  }
}

// ---- the race over a row ---------------------------------------------------------------------------------------

// Weights exp((x - max) * inverse_temperature) that nobody has written down.
struct Row {
  const float* logits;
  size_t size;
  double max;
  double inverse_temperature;
  const double* block_weights;  // that of the largest logit of each kMaximaBlock ids
};

static_assert(kMaximaBlock % kChunk == 0);

// Shows those ids of a chunk that may still get a place to `first`.
template <typename Isa, typename First>
FORERUN_INLINE void race_row_chunk(const Row& row, size_t begin, const NoisePlan& plan, First& first) {
  Chunk chunk;
  const size_t count = std::min(row.size - begin, kChunk);
  chunk.count_from(begin);
  if (count < kChunk) std::memset(chunk.w, 0, sizeof chunk.w);
  weigh_body<Isa, true>(row.logits + begin, count, row.max, row.inverse_temperature, chunk.w);
  race_chunk<Isa>(plan, chunk, first);
}

// Word 1 of an id that may still get a place, its weight being `weight` at most, is at least this; 2^32 if none can.
//
// With `most` the right side of the race's inequality, no id can if the least 1 - u there is, 2^-53, is no smaller. One
// whose word 1 is h has 1 - u > (2^32 - 1 - h) 2^-32, so it can't if 2^32 - 1 - h >= 2^32 most, where the left side is
// an integer. The product by 2^32 and the ceiling are exact. A product that has become subnormal, and so inexact, is
// below 2^-53 either way.
inline uint64_t word1_floor(double weight, double bound) {
  constexpr uint64_t kEnd = 1ull << 32;
  if (weight == 0.0) return kEnd;  // exp is 0 for every id, because it is for the largest
  const double most = bound * kRaceSlack * weight;
  if (most <= 0x1p-53) return kEnd;
  if (most >= 1.0) return 0;
  return kEnd - static_cast<uint64_t>(std::ceil(most * 0x1p32));
}

// Looks closely at those chunks alone in which a uniform is so high that the largest weight around it would do. Begins
// with the largest of all, because the bound it sets leaves few others.
template <typename Isa, typename First>
FORERUN_INLINE void race_row_body(const Row& row, const NoiseAddress& address, First& first) {
  const NoisePlan plan(address);
  const float* largest = std::find(row.logits, row.logits + row.size, static_cast<float>(row.max));
  const size_t first_chunk = static_cast<size_t>(largest - row.logits) / kChunk * kChunk;
  race_row_chunk<Isa>(row, first_chunk, plan, first);
  for (size_t block = 0; block < row.size; block += kMaximaBlock) {
    const double weight = row.block_weights[block / kMaximaBlock];
    uint64_t floor = word1_floor(weight, first.bound());
    if (floor >> 32 != 0) continue;
    for (size_t i = block; i < std::min(block + kMaximaBlock, row.size); i += kChunk) {
      if (i == first_chunk || !any_word1_body<Isa>(plan, i, floor)) continue;
      race_row_chunk<Isa>(row, i, plan, first);
      floor = word1_floor(weight, first.bound());
    }
  }
}

}  // namespace forerun::sampling::simd
