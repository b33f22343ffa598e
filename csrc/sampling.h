// The law of a row, the coupled race and log-probabilities: the fast twin of forerun.sampling.
//
// Knows neither Python nor models. Every number equals the numpy reference with ==, on every instruction set: float64
// arithmetic is + - * / and bit operations in one written order, sums are 16 lanes by index and then a fixed tree, and
// ties go to the lowest id. The caller's thread must not flush subnormals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forerun::sampling {

// 0 is the baseline, 1 AVX2, 2 AVX-512. The level changes speed, never a bit.
int max_isa_level();
int isa_level();
void set_isa_level(int level);  // throws std::invalid_argument beyond max_isa_level()

double exp_nonpositive(double x);  // x <= 0; 0 below -708
double log_positive(double x);     // x > 0 and normal

enum class Stream : uint32_t { kShared = 0, kDraft = 1, kCoin = 2, kResidual = 3 };

// The address of a draw; with a token id or node index it names one uniform.
struct NoiseAddress {
  uint64_t seed;
  uint32_t position;
  uint32_t committed_len;
  Stream stream;
};

void philox4x32(const uint32_t counter[4], uint64_t key, uint32_t out[4]);
double uniform(const NoiseAddress& address, uint32_t index);  // in (0, 1)

// A borrowed array.
template <typename T>
struct Span {
  const T* data = nullptr;
  size_t size = 0;
};

// One request's parameters, prepared once.
struct LawParams {
  double temperature = 0.0;
  bool is_greedy = true;
  int64_t top_k = 0;
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::vector<int32_t> bias_ids;
  std::vector<double> biases;
};

// What the penalties look at: distinct ids with their number of occurrences in the output (0: prompt only), and the
// ids of the tree path below the last committed token.
struct PathHistory {
  Span<int32_t> ids;
  Span<int32_t> output_counts;
  Span<int32_t> path_ids;
};

struct LawShape {
  size_t num_kept;
  bool has_ids;  // false: weights are indexed by token id
  double total;
};

struct RaceResult {
  int32_t token_id;
  double ratio;  // E / weight
};

// The race over weights: argmin of E(id) / weight(id), ties to the lowest id. `ids` null means 0, 1, 2, ...
// Throws std::domain_error when no weight is positive.
RaceResult race(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& address);

// The ids of the `count` least E(id) / weight(id) in ascending order, ties by lowest id: a draw without replacement.
// Fewer where fewer weights are positive; throws std::domain_error where none is.
std::vector<int32_t> draw(const int32_t* ids, const double* weights, size_t size, const NoiseAddress& address,
                          size_t count);

namespace simd {
struct Row;
}

// The law of a row at a temperature, with nothing changed and nothing cut: the weights exp((x - max) (1 / T)), computed
// from the row whenever they are asked for. It borrows the row, which must stay and keep its contents.
class RowLaw {
 public:
  // temperature > 0. Throws std::domain_error with a sentence for a row that has no law.
  RowLaw(Span<float> logits, double temperature);

  size_t size() const { return logits_.size; }
  double total() const { return total_; }
  double weight(int32_t token_id) const;  // throws std::out_of_range beyond the row
  void weights(double* out) const;        // room for size()

  // As the functions above, over ids 0, 1, 2, ...
  RaceResult race(const NoiseAddress& address) const;
  std::vector<int32_t> draw(const NoiseAddress& address, size_t count) const;

 private:
  simd::Row row() const;

  Span<float> logits_;
  double max_;
  double inverse_temperature_;
  double total_;
  std::vector<double> block_weights_;  // the largest weight of each block of ids
};

// Owns the scratch of one thread's calls. Every function throws std::domain_error with a sentence for a row that has no
// law, and for an id beyond the vocabulary.
class Sampler {
 public:
  explicit Sampler(int vocab_size);

  int vocab_size() const { return static_cast<int>(x_.size()); }

  // Writes the kept ids (ascending, none when has_ids is false) and their weights; each output has room for vocab_size.
  // `allowed` is a bit per id, 32 to a word, or empty where all are allowed.
  LawShape law(const float* logits, const LawParams& params, const PathHistory& history, Span<int32_t> banned_ids,
               Span<uint32_t> allowed, int32_t* out_ids, double* out_weights);

  // Log-softmax of the raw row at token_id; writes the num_top most likely ids and their values.
  double logprobs(const float* logits, int32_t token_id, size_t num_top, int32_t* out_ids, double* out_logprobs);

  // Writes the ids of the num_top <= vocab_size largest logits, largest first, ties by lowest id; NaN counts as -inf.
  // Reads the row about once; num_top is meant to be small.
  void top_ids(const float* logits, size_t num_top, int32_t* out_ids);

 private:
  struct Entry {
    double value;
    int32_t id;
  };

  double load(const float* logits);
  int32_t allowed_argmax(const float* logits, Span<uint32_t> allowed);
  void check_mask(Span<uint32_t> allowed) const;
  void penalise(const LawParams& params, const PathHistory& history);
  void select_largest(size_t k);
  void keep_largest(const float* values, size_t size, size_t first_id, size_t k);
  size_t keep_top_p(double top_p, double total, size_t size, bool has_ids, int32_t* ids, double* weights);
  size_t keep_min_p(double min_p, size_t size, bool has_ids, int32_t* ids, double* weights);
  void check_ids(Span<int32_t> ids) const;

  std::vector<double> x_;             // processed logits
  std::vector<double> weights_;       // of log-softmax
  std::vector<float> maxima_;         // of a row's blocks
  std::vector<int32_t> found_;        // indices
  std::vector<int32_t> path_counts_;  // kUnseen between calls
  std::vector<Entry> entries_;
};

}  // namespace forerun::sampling
