// Sampling without Python, for the sanitizers: every size around a vector's width, every filter, every level, all with
// equal bits. What the numbers must be is tested against the numpy reference.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

using namespace forerun::sampling;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

struct Outcome {
  std::vector<int32_t> ids;
  std::vector<double> weights;
  double total;
  RaceResult winner;
  std::vector<int32_t> drawn;
  std::vector<double> logprobs;

  bool operator==(const Outcome& other) const {
    return ids == other.ids && weights == other.weights && total == other.total &&
           winner.token_id == other.winner.token_id && winner.ratio == other.winner.ratio && drawn == other.drawn &&
           logprobs == other.logprobs;
  }
};

std::vector<float> row_of(int size) {
  std::vector<float> row(size);
  uint32_t state = 12345;
  for (float& x : row) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(state >> 16) / 8192.0f - 4.0f;
  }
  return row;
}

Outcome outcome_of(const std::vector<float>& row, const LawParams& params) {
  const int size = static_cast<int>(row.size());
  const int32_t last = size - 1;
  const int32_t history[] = {0, last};
  const int32_t counts[] = {2, 0};
  const size_t num_seen = size > 1 ? 2 : 1;
  Sampler sampler(size);
  // Exactly as long as they must be, so that the address sanitizer sees one step too far.
  Outcome out{std::vector<int32_t>(size), std::vector<double>(size), 0.0, {}, {}, {}};
  const PathHistory seen{{history, num_seen}, {counts, num_seen}, {&last, 1}};
  const LawShape shape = sampler.law(row.data(), params, seen, {}, {}, out.ids.data(), out.weights.data());
  out.ids.resize(shape.has_ids ? shape.num_kept : 0);
  out.weights.resize(shape.num_kept);
  out.ids.shrink_to_fit();
  out.weights.shrink_to_fit();
  out.total = shape.total;
  const NoiseAddress address{987654321987654321u, 7, 0, Stream::kShared};
  out.winner = race(shape.has_ids ? out.ids.data() : nullptr, out.weights.data(), out.weights.size(), address);
  out.drawn = draw(shape.has_ids ? out.ids.data() : nullptr, out.weights.data(), out.weights.size(), address, 7);
  const size_t num_top = size < 5 ? size : 5;
  std::vector<int32_t> top(num_top);
  out.logprobs.resize(num_top);
  out.logprobs.push_back(sampler.logprobs(row.data(), last, num_top, top.data(), out.logprobs.data()));
  return out;
}

void test_levels_agree() {
  for (const int size : {1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 511, 513, 1500}) {
    const std::vector<float> row = row_of(size);
    for (const int64_t top_k : {int64_t{0}, int64_t{1}, int64_t{6}, int64_t{600}, int64_t{1} << 40}) {
      for (const double top_p : {1.0, 0.9, 0.0}) {
        LawParams params;
        params.is_greedy = false;
        params.temperature = 0.8;
        params.top_k = top_k;
        params.top_p = top_p;
        params.min_p = top_p == 0.9 ? 0.01 : 0.0;
        params.frequency_penalty = 0.5;
        params.bias_ids = {size / 2};
        params.biases = {1.5};
        set_isa_level(0);
        const Outcome baseline = outcome_of(row, params);
        check(std::isfinite(baseline.winner.ratio), "a winner has a finite ratio");
        check(baseline.drawn.size() == std::min<size_t>(7, baseline.weights.size()), "as many as there are are drawn");
        check(baseline.drawn[0] == baseline.winner.token_id, "the first one drawn is the winner");
        for (int level = 1; level <= max_isa_level(); ++level) {
          set_isa_level(level);
          check(outcome_of(row, params) == baseline, "levels give equal bits");
        }
      }
    }
  }
}

// A law that stays in its row is the one that is written down, in every bit.
void test_row_laws() {
  const NoiseAddress address{5, 7, 3, Stream::kDraft};
  for (const int size : {1, 7, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129, 160, 255, 257, 1500}) {
    std::vector<float> row = row_of(size);
    for (int i = 0; i + 1 < size; i += 5) row[i] = -INFINITY;
    for (const double temperature : {0.001, 0.8, 100.0}) {
      LawParams params;
      params.is_greedy = false;
      params.temperature = temperature;
      for (int level = 0; level <= max_isa_level(); ++level) {
        set_isa_level(level);
        std::vector<int32_t> ids(size);
        std::vector<double> weights(size), from_row(size);
        const LawShape shape = Sampler(size).law(row.data(), params, {}, {}, {}, ids.data(), weights.data());
        const RowLaw law({row.data(), row.size()}, temperature);
        law.weights(from_row.data());
        check(law.total() == shape.total && from_row == weights, "a row's weights are those that are written");
        check(law.weight(size - 1) == weights.back(), "one weight is as if all were written");
        const RaceResult want = race(nullptr, weights.data(), weights.size(), address), got = law.race(address);
        check(got.token_id == want.token_id && got.ratio == want.ratio, "a row's race has the same winner");
        check(law.draw(address, 9) == draw(nullptr, weights.data(), weights.size(), address, 9),
              "a row's draw is the same");
      }
    }
  }
}

// Blocks are 128 values, vectors up to 16 and two of them go at a time: sizes around all of these, on every level.
void test_top_ids() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int size : {1, 2, 7, 31, 33, 127, 128, 129, 160, 255, 256, 257, 1500, 5000}) {
    std::vector<float> row = row_of(size);
    for (int i = 0; i < size; i += 5) row[i] = row[size / 2];
    for (int i = 1; i < size; i += 7) row[i] = nan;
    for (const size_t num_top : {0, 1, 3, 8, 200}) {
      if (num_top > row.size()) continue;
      std::vector<int32_t> want(row.size());
      std::iota(want.begin(), want.end(), 0);
      const auto value = [&](int32_t id) { return std::isnan(row[id]) ? -INFINITY : row[id]; };
      std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) { return value(a) > value(b); });
      want.resize(num_top);
      for (int level = 0; level <= max_isa_level(); ++level) {
        set_isa_level(level);
        std::vector<int32_t> got(num_top);
        Sampler(size).top_ids(row.data(), num_top, got.data());
        check(got == want, "the largest logits are those that sorting gives");
      }
    }
  }
}

// A mask bans the ids whose bit is 0, on every level; what lies beyond the vocabulary in its last word means nothing.
void test_masks() {
  for (const int size : {1, 2, 7, 31, 32, 33, 63, 65, 127, 128, 129, 160, 257, 1500}) {
    std::vector<float> row = row_of(size);
    // So that the largest allowed value is also that of an id which is not.
    for (int i = 1; i < size; i += 3) row[i] = 5.0f;
    for (const uint32_t pattern : {0xFFFFFFFFu, 0x00000001u, 0x80010000u, 0xA5A5A5A5u}) {
      std::vector<uint32_t> words((size + 31) / 32, pattern);
      if (words.size() > 3) words[1] = 0;
      words[0] |= 1;
      words.shrink_to_fit();
      std::vector<int32_t> banned;
      for (int id = 0; id < size; ++id) {
        if ((words[id / 32] >> id % 32 & 1) == 0) banned.push_back(id);
      }
      for (const bool is_greedy : {true, false}) {
        LawParams params;
        params.is_greedy = is_greedy;
        params.temperature = 0.7;
        params.top_p = size % 2 == 0 ? 0.9 : 1.0;
        for (int level = 0; level <= max_isa_level(); ++level) {
          set_isa_level(level);
          std::vector<int32_t> ids(size), want_ids(size);
          std::vector<double> weights(size), want_weights(size);
          Sampler sampler(size);
          const LawShape want = sampler.law(row.data(), params, {}, {banned.data(), banned.size()}, {},
                                            want_ids.data(), want_weights.data());
          const LawShape got = sampler.law(row.data(), params, {}, {}, {words.data(), words.size()}, ids.data(),
                                           weights.data());
          check(got.num_kept == want.num_kept && got.total == want.total, "a mask keeps what a ban keeps");
          for (size_t i = 0; i < want.num_kept; ++i) {
            check(!want.has_ids || ids[i] == want_ids[i], "a mask keeps the ids that a ban keeps");
            check(weights[i] == want_weights[i], "a mask leaves the weights that a ban leaves");
          }
        }
      }
    }
  }
}

template <typename Call>
void check_refused(const Call& call, const char* what) {
  bool is_refused = false;
  try {
    call();
  } catch (const std::domain_error&) {
    is_refused = true;
  }
  check(is_refused, what);
}

void test_refusals() {
  std::vector<float> row = row_of(20);
  std::vector<int32_t> ids(20);
  std::vector<double> weights(20);
  Sampler sampler(20);
  const int32_t beyond = 20;
  const auto law = [&](Span<int32_t> banned) {
    sampler.law(row.data(), LawParams{}, PathHistory{}, banned, {}, ids.data(), weights.data());
  };
  check_refused([&] { law({&beyond, 1}); }, "an id beyond the vocabulary");
  for (const bool is_greedy : {true, false}) {
    LawParams params;
    params.is_greedy = is_greedy;
    params.temperature = 1.0;
    const auto masked = [&](Span<uint32_t> allowed) {
      sampler.law(row.data(), params, PathHistory{}, {}, allowed, ids.data(), weights.data());
    };
    const uint32_t only_beyond[2] = {0xFFF00000u, 0xFFFFFFFFu};
    check_refused([&] { masked({only_beyond, 1}); }, "a mask that allows nothing");
    check_refused([&] { masked({only_beyond, 2}); }, "a mask that is too long");
  }
  row[19] = std::numeric_limits<float>::quiet_NaN();
  check_refused([&] { law({}); }, "NaN in the last place");
  check_refused([&] { RowLaw({row.data(), row.size()}, 1.0); }, "NaN in the last place of a row");
  row.assign(20, -INFINITY);
  check_refused([&] { RowLaw({row.data(), row.size()}, 1.0); }, "a row that allows nothing");
  row[3] = INFINITY;
  check_refused([&] { RowLaw({row.data(), row.size()}, 1.0); }, "+inf in a row");
  const double nothing[3] = {0.0, 0.0, 0.0};
  check_refused([&] { race(nullptr, nothing, 3, NoiseAddress{}); }, "a law without mass");
  check_refused([&] { draw(nullptr, nothing, 3, NoiseAddress{}, 2); }, "a draw from a law without mass");
  check_refused([&] { draw(nullptr, nothing, 0, NoiseAddress{}, 2); }, "a draw from nothing");
  const double one[1] = {1.0};
  check_refused([&] { draw(nullptr, one, 1, NoiseAddress{}, 0); }, "a draw of nothing");
}

}  // namespace

int main() {
  test_levels_agree();
  test_row_laws();
  test_top_ids();
  test_masks();
  test_refusals();
  std::puts("sampling: all tests passed");
  return 0;
}
