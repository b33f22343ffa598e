#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "sampling_kernels.h"

namespace forerun::sampling {
namespace {

constexpr int32_t kUnseen = -1;
constexpr size_t kSelectBlock = 512;
constexpr char kNoWeight[] = "the law has no positive weight";
constexpr char kNothingAllowed[] = "no token is allowed";
constexpr char kEmptyMask[] = "the mask of allowed ids allows no token";

// By value descending, ties by id ascending: the one order of top-k, top-p and log-probabilities.
constexpr auto kLikelier = [](const auto& a, const auto& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
};

int detect_isa_level() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return 2;
  }
  return __builtin_cpu_supports("avx2") ? 1 : 0;
}

std::atomic<int>& level_in_use() {
  static std::atomic<int> level{detect_isa_level()};
  return level;
}

const simd::Kernels& kernels() {
  static constexpr simd::Kernels kTables[] = {simd::BaselineKernels::table, simd::Avx2Kernels::table,
                                              simd::Avx512Kernels::table};
  return kTables[level_in_use().load(std::memory_order_relaxed)];
}

// Throws for a row that holds NaN or +inf.
void check_lawful(const float* logits, size_t size) {
  const float* bad = std::find_if(logits, logits + size, [](float x) { return !(x < simd::kInf); });
  if (bad == logits + size) return;
  const std::string what = std::isnan(*bad) ? "NaN" : "+inf";
  throw std::domain_error("the logits hold " + what + " at token id " + std::to_string(bad - logits));
}

RaceResult result_of(const simd::Winner& winner) {
  if (winner.best().token_id < 0) throw std::domain_error(kNoWeight);
  return winner.best();
}

simd::Podium podium_for(size_t count, size_t size) {
  if (count == 0) throw std::domain_error("nothing is to be drawn");
  return simd::Podium(std::min(count, size));
}

std::vector<int32_t> ids_of(const simd::Podium& podium) {
  if (podium.places().empty()) throw std::domain_error(kNoWeight);
  std::vector<int32_t> drawn;
  drawn.reserve(podium.places().size());
  for (const RaceResult& place : podium.places()) drawn.push_back(place.token_id);
  return drawn;
}

}  // namespace

int max_isa_level() {
  static const int level = detect_isa_level();
  return level;
}

int isa_level() { return level_in_use().load(); }

void set_isa_level(int level) {
  if (level < 0 || level > max_isa_level()) {
    throw std::invalid_argument("instruction set level is " + std::to_string(level) + ", but this CPU has 0 to " +
                                std::to_string(max_isa_level()));
  }
  level_in_use().store(level);
}

double exp_nonpositive(double x) { return simd::exp_one(x); }

// x = 2^k m with m in [sqrt(1/2), sqrt(2)), f = m - 1, s = f / (2 + f): log(1 + f) = 2 artanh(s) = f - s (f - 2 z P(z))
// with z = s^2 and P(z) = 1/3 + z/5 + z^2/7 + ... up to z^9 / 21, for |s| < 0.172 the rest is below 2^-58.
double log_positive(double x) {
  constexpr uint64_t kMantissa = (1ull << 52) - 1;
  constexpr double kSqrt2 = 0x1.6a09e667f3bcdp+0;
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & kMantissa) | simd::kOneBits;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  if (m >= kSqrt2) {
    m *= 0.5;
    ++exponent;
  }
  const double k = exponent;
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double series = 1.0 / 21.0;
  for (int odd = 19; odd >= 3; odd -= 2) series = series * z + 1.0 / odd;
  const double correction = s * (f - 2.0 * (z * series));
  return k * simd::kLn2High + (f - (correction - k * simd::kLn2Low));
}

void philox4x32(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < simd::kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * simd::kPhiloxM0;
    const uint64_t p1 = static_cast<uint64_t>(c2) * simd::kPhiloxM1;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += simd::kPhiloxW0;
    k1 += simd::kPhiloxW1;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

double uniform(const NoiseAddress& address, uint32_t index) {
  const uint32_t counter[4] = {index, address.position, address.committed_len, static_cast<uint32_t>(address.stream)};
  uint32_t words[4];
  philox4x32(counter, address.seed, words);
  const uint64_t n = ((static_cast<uint64_t>(words[1]) << 32) | words[0]) >> 12;
  return (static_cast<double>(n) + 0.5) * 0x1p-52;
}

RaceResult race(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& address) {
  simd::Winner winner;
  kernels().race(ids, weights, size, address, winner);
  return result_of(winner);
}

std::vector<int32_t> draw(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& address,
                          size_t count) {
  simd::Podium podium = podium_for(count, size);
  kernels().race_for(ids, weights, size, address, podium);
  return ids_of(podium);
}

// The sum is NaN where the row holds NaN, and where x - max is: for +inf, and for nothing but -inf. So a row that has a
// law needs no look of its own for them.
RowLaw::RowLaw(Span<float> logits, double temperature)
    : logits_(logits), max_(-simd::kInf), inverse_temperature_(1.0 / temperature) {
  std::vector<float> maxima((logits.size + simd::kMaximaBlock - 1) / simd::kMaximaBlock);
  kernels().block_maxima(logits.data, logits.size, maxima.data());
  for (const float x : maxima) max_ = std::max<double>(max_, x);
  total_ = kernels().row_total(logits.data, logits.size, max_, inverse_temperature_);
  if (std::isnan(total_)) {
    check_lawful(logits.data, logits.size);
    throw std::domain_error(kNothingAllowed);
  }
  block_weights_.resize(maxima.size());
  kernels().weigh_row(maxima.data(), maxima.size(), max_, inverse_temperature_, block_weights_.data());
}

double RowLaw::weight(int32_t token_id) const {
  if (token_id < 0 || static_cast<size_t>(token_id) >= logits_.size) {
    throw std::out_of_range("token id " + std::to_string(token_id) + " lies outside the vocabulary of " +
                            std::to_string(logits_.size));
  }
  return simd::exp_one((logits_.data[token_id] - max_) * inverse_temperature_);
}

void RowLaw::weights(double* out) const {
  kernels().weigh_row(logits_.data, logits_.size, max_, inverse_temperature_, out);
}

simd::Row RowLaw::row() const {
  return {logits_.data, logits_.size, max_, inverse_temperature_, block_weights_.data()};
}

RaceResult RowLaw::race(const NoiseAddress& address) const {
  simd::Winner winner;
  kernels().race_row(row(), address, winner);
  return result_of(winner);
}

std::vector<int32_t> RowLaw::draw(const NoiseAddress& address, size_t count) const {
  simd::Podium podium = podium_for(count, logits_.size);
  kernels().race_row_for(row(), address, podium);
  return ids_of(podium);
}

Sampler::Sampler(int vocab_size)
    : x_(static_cast<size_t>(vocab_size)),
      weights_(x_.size()),
      maxima_((x_.size() + simd::kMaximaBlock - 1) / simd::kMaximaBlock),
      found_(x_.size()),
      path_counts_(x_.size(), kUnseen) {
  entries_.reserve(x_.size());
}

// Fills x_ from the raw row and returns its largest value.
double Sampler::load(const float* logits) {
  const simd::RowScan scan = kernels().widen(logits, x_.size(), x_.data());
  if (!scan.is_lawful) check_lawful(logits, x_.size());
  return scan.max;
}

void Sampler::check_ids(Span<int32_t> ids) const {
  for (size_t i = 0; i < ids.size; ++i) {
    if (ids.data[i] < 0 || ids.data[i] >= vocab_size()) {
      throw std::domain_error("token id " + std::to_string(ids.data[i]) + " lies outside the vocabulary of " +
                              std::to_string(vocab_size()));
    }
  }
}

void Sampler::penalise(const LawParams& params, const PathHistory& history) {
  for (size_t i = 0; i < history.ids.size; ++i) path_counts_[history.ids.data[i]] = history.output_counts.data[i];
  for (size_t i = 0; i < history.path_ids.size; ++i) {
    int32_t& count = path_counts_[history.path_ids.data[i]];
    count = std::max(count, 0) + 1;
  }
  const auto apply = [&](int32_t id) {
    const int32_t count = path_counts_[id];
    if (count == kUnseen) return;  // already applied
    path_counts_[id] = kUnseen;
    double& x = x_[id];
    if (params.repetition_penalty != 1.0) x = x > 0.0 ? x / params.repetition_penalty : x * params.repetition_penalty;
    if (count > 0) x = (x - params.presence_penalty) - params.frequency_penalty * count;
  };
  for (size_t i = 0; i < history.ids.size; ++i) apply(history.ids.data[i]);
  for (size_t i = 0; i < history.path_ids.size; ++i) apply(history.path_ids.data[i]);
}

void Sampler::check_mask(Span<uint32_t> allowed) const {
  const size_t num_words = (x_.size() + simd::kMaskBits - 1) / simd::kMaskBits;
  if (allowed.size != num_words) {
    throw std::domain_error("the mask of allowed ids has " + std::to_string(allowed.size) +
                            " words, but the vocabulary takes " + std::to_string(num_words));
  }
  for (size_t i = 0; i < x_.size(); i += simd::kMaskBits) {
    const uint32_t word = allowed.data[i / simd::kMaskBits];
    const size_t count = std::min(simd::kMaskBits, x_.size() - i);
    if (word << (simd::kMaskBits - count) != 0) return;
  }
  throw std::domain_error(kEmptyMask);
}

// Greedy decoding needs no more of a row that nothing else changes.
int32_t Sampler::allowed_argmax(const float* logits, Span<uint32_t> allowed) {
  if (!kernels().allowed_maxima(logits, x_.size(), allowed.data, maxima_.data())) check_lawful(logits, x_.size());
  const auto best = std::max_element(maxima_.begin(), maxima_.end());  // the first of equals
  if (*best == -std::numeric_limits<float>::infinity()) throw std::domain_error(kNothingAllowed);
  size_t id = static_cast<size_t>(best - maxima_.begin()) * simd::kMaximaBlock;
  while (logits[id] != *best || !simd::is_allowed(allowed.data, id)) ++id;
  return static_cast<int32_t>(id);
}

LawShape Sampler::law(const float* logits, const LawParams& params, const PathHistory& history,
                      Span<int32_t> banned_ids, Span<uint32_t> allowed, int32_t* out_ids, double* out_weights) {
  const Span<int32_t> bias_ids{params.bias_ids.data(), params.bias_ids.size()};
  for (const Span<int32_t>& ids : {bias_ids, history.ids, history.path_ids, banned_ids}) check_ids(ids);
  const bool is_masked = allowed.size > 0;
  const bool is_changed = bias_ids.size + history.ids.size + history.path_ids.size + banned_ids.size > 0;
  if (is_masked) check_mask(allowed);
  if (is_masked && params.is_greedy && !is_changed) {
    out_ids[0] = allowed_argmax(logits, allowed);
    out_weights[0] = 1.0;
    return {1, true, 1.0};
  }
  double max = load(logits);
  for (size_t i = 0; i < bias_ids.size; ++i) x_[bias_ids.data[i]] += params.biases[i];
  penalise(params, history);
  for (size_t i = 0; i < banned_ids.size; ++i) x_[banned_ids.data[i]] = -simd::kInf;
  if (is_masked) {
    max = kernels().keep_allowed(x_.data(), x_.size(), allowed.data);
  } else if (is_changed) {
    max = kernels().max(x_.data(), x_.size());
  }
  if (max == -simd::kInf) throw std::domain_error(kNothingAllowed);
  if (params.is_greedy) {
    out_ids[0] = static_cast<int32_t>(std::find(x_.begin(), x_.end(), max) - x_.begin());
    out_weights[0] = 1.0;
    return {1, true, 1.0};
  }

  size_t size = x_.size();
  const double inverse_temperature = 1.0 / params.temperature;
  double total;
  bool has_ids = params.top_k > 0 && static_cast<uint64_t>(params.top_k) < size;
  if (has_ids) {
    size = static_cast<size_t>(params.top_k);
    select_largest(size);
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
    for (size_t i = 0; i < size; ++i) {
      out_ids[i] = entries_[i].id;
      out_weights[i] = simd::exp_one((entries_[i].value - max) * inverse_temperature);
    }
    total = kernels().lane_sum(out_weights, size);
  } else {
    total = kernels().weigh(x_.data(), size, max, inverse_temperature, out_weights);
  }
  if (params.top_p < 1.0) {
    size = keep_top_p(params.top_p, total, size, has_ids, out_ids, out_weights);
    has_ids = true;
  }
  if (params.min_p > 0.0) {
    size = keep_min_p(params.min_p, size, has_ids, out_ids, out_weights);
    has_ids = true;
  }
  return {size, has_ids, has_ids ? kernels().lane_sum(out_weights, size) : total};
}

// Leaves the k likeliest of x_ in entries_, in no order. Once k entries are known, a later id must be strictly larger
// than the least of them: at equal value the lower id stays.
void Sampler::select_largest(size_t k) {
  entries_.clear();
  double low = -simd::kInf;
  for (size_t first = 0; first < x_.size(); first += kSelectBlock) {
    const size_t count = std::min(kSelectBlock, x_.size() - first);
    const size_t num_found = kernels().between(x_.data() + first, count, low, simd::kInf, found_.data());
    for (size_t i = 0; i < num_found; ++i) {
      const int32_t id = static_cast<int32_t>(first) + found_[i];
      entries_.push_back({x_[id], id});
    }
    const bool is_last = first + count == x_.size();
    if (entries_.size() > k && (is_last || entries_.size() >= 2 * k)) {
      std::nth_element(entries_.begin(), entries_.begin() + (k - 1), entries_.end(), kLikelier);
      entries_.resize(k);
      low = std::nextafter(entries_[k - 1].value, simd::kInf);
    }
  }
}

// Sorts only as far as needed: bands of falling weight are collected and sorted until the sum reaches its goal.
size_t Sampler::keep_top_p(double top_p, double total, size_t size, bool has_ids, int32_t* ids, double* weights) {
  constexpr double kBand = 0x1p-6;
  constexpr double kLeastBand = 0x1p-60;
  constexpr size_t kSmall = 256;
  const double goal = top_p * total;
  double high = simd::kInf;
  double low = size <= kSmall ? 0.0 : kBand;
  double sum = 0.0;
  size_t num_kept = 0;
  entries_.clear();
  for (bool is_done = false; !is_done;) {
    const size_t num_found = kernels().between(weights, size, low, high, found_.data());
    for (size_t i = 0; i < num_found; ++i) {
      const int32_t at = found_[i];
      entries_.push_back({weights[at], has_ids ? ids[at] : at});
    }
    std::sort(entries_.begin() + num_kept, entries_.end(), kLikelier);
    while (num_kept < entries_.size() && !is_done) {
      sum += entries_[num_kept++].value;
      is_done = sum >= goal;
    }
    is_done = is_done || low == 0.0;
    high = low;
    low = low > kLeastBand ? low * kBand : 0.0;
  }
  entries_.resize(num_kept);
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  for (size_t i = 0; i < num_kept; ++i) {
    ids[i] = entries_[i].id;
    weights[i] = entries_[i].value;
  }
  return num_kept;
}

// The largest weight is exp(0) = 1 and survives every filter, so min_p is compared as it is.
size_t Sampler::keep_min_p(double min_p, size_t size, bool has_ids, int32_t* ids, double* weights) {
  const size_t num_kept = kernels().between(weights, size, min_p, simd::kInf, found_.data());
  for (size_t i = 0; i < num_kept; ++i) {
    const int32_t at = found_[i];  // at >= i
    ids[i] = has_ids ? ids[at] : at;
    weights[i] = weights[at];
  }
  return num_kept;
}

double Sampler::logprobs(const float* logits, int32_t token_id, size_t num_top, int32_t* out_ids,
                         double* out_logprobs) {
  check_ids({&token_id, 1});
  const double max = load(logits);
  if (max == -simd::kInf) throw std::domain_error(kNothingAllowed);
  const double log_total = log_positive(kernels().weigh(x_.data(), x_.size(), max, 1.0, weights_.data()));
  if (num_top > 0) {
    select_largest(std::min(num_top, x_.size()));
    std::sort(entries_.begin(), entries_.end(), kLikelier);
    for (size_t i = 0; i < entries_.size(); ++i) {
      out_ids[i] = entries_[i].id;
      out_logprobs[i] = (entries_[i].value - max) - log_total;
    }
  }
  return (x_[token_id] - max) - log_total;
}

// A block whose maximum is below the k-th largest maximum has nothing to give: k values elsewhere are larger. So the
// first pass over the row is all vectors, and the second one sees about k blocks.
void Sampler::top_ids(const float* logits, size_t num_top, int32_t* out_ids) {
  if (num_top == 0) return;
  kernels().block_maxima(logits, x_.size(), maxima_.data());
  entries_.clear();
  keep_largest(maxima_.data(), maxima_.size(), 0, num_top);
  const double bound = entries_.back().value;
  entries_.clear();
  for (size_t block = 0; block < maxima_.size(); ++block) {
    const bool is_full = entries_.size() == num_top;
    if (maxima_[block] < bound || (is_full && !(maxima_[block] > entries_.back().value))) continue;
    const size_t first = block * simd::kMaximaBlock;
    keep_largest(logits + first, std::min(simd::kMaximaBlock, x_.size() - first), first, num_top);
  }
  for (size_t i = 0; i < num_top; ++i) out_ids[i] = entries_[i].id;
}

// Merges values whose ids are higher than all before into entries_, which keeps the k > 0 largest in order.
void Sampler::keep_largest(const float* values, size_t size, size_t first_id, size_t k) {
  for (size_t i = 0; i < size; ++i) {
    const bool is_full = entries_.size() == k;
    if (is_full && !(values[i] > entries_.back().value)) continue;
    const Entry entry{std::isnan(values[i]) ? -simd::kInf : values[i], static_cast<int32_t>(first_id + i)};
    if (is_full) entries_.pop_back();
    entries_.insert(std::upper_bound(entries_.begin(), entries_.end(), entry, kLikelier), entry);
  }
}

}  // namespace forerun::sampling
