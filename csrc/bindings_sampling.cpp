// Python's view of sampling.h. The wrappers in forerun.sampling.native prepare the arguments; shapes are checked here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace forerun::sampling {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
Span<T> span(const Vector<const T>& array) {
  return {array.data(), array.shape(0)};
}

void check_size(size_t size, int vocab_size, const char* name) {
  if (size != static_cast<size_t>(vocab_size)) {
    throw std::domain_error(std::string(name) + " has " + std::to_string(size) + " entries, but the vocabulary has " +
                            std::to_string(vocab_size));
  }
}

LawParams make_params(double temperature, bool is_greedy, int64_t top_k, double top_p, double min_p,
                      double repetition_penalty, double presence_penalty, double frequency_penalty,
                      std::vector<int32_t> bias_ids, std::vector<double> biases) {
  if (bias_ids.size() != biases.size()) throw std::domain_error("bias_ids and biases differ in length");
  return {temperature, is_greedy, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
          std::move(bias_ids), std::move(biases)};
}

nb::tuple law(Sampler& self, Vector<const float> logits, const LawParams& params, Vector<const int32_t> history_ids,
              Vector<const int32_t> output_counts, Vector<const int32_t> path_ids, Vector<const int32_t> banned_ids,
              Vector<const uint32_t> allowed, Vector<int32_t> out_ids, Vector<double> out_weights) {
  check_size(logits.shape(0), self.vocab_size(), "logits");
  check_size(out_ids.shape(0), self.vocab_size(), "out_ids");
  check_size(out_weights.shape(0), self.vocab_size(), "out_weights");
  if (history_ids.shape(0) != output_counts.shape(0)) {
    throw std::domain_error("history_ids and output_counts differ in length");
  }
  const PathHistory history{span(history_ids), span(output_counts), span(path_ids)};
  LawShape shape;
  {
    nb::gil_scoped_release unlocked;
    shape = self.law(logits.data(), params, history, span(banned_ids), span(allowed), out_ids.data(),
                     out_weights.data());
  }
  return nb::make_tuple(shape.num_kept, shape.has_ids, shape.total);
}

double logprobs(Sampler& self, Vector<const float> logits, int32_t token_id, Vector<int32_t> out_ids,
                Vector<double> out_logprobs) {
  check_size(logits.shape(0), self.vocab_size(), "logits");
  if (out_ids.shape(0) != out_logprobs.shape(0)) throw std::domain_error("out_ids and out_logprobs differ in length");
  nb::gil_scoped_release unlocked;
  return self.logprobs(logits.data(), token_id, out_ids.shape(0), out_ids.data(), out_logprobs.data());
}

void top_ids(Sampler& self, Vector<const float> logits, Vector<int32_t> out_ids) {
  check_size(logits.shape(0), self.vocab_size(), "logits");
  if (out_ids.shape(0) > logits.shape(0)) throw std::domain_error("out_ids is longer than the vocabulary");
  nb::gil_scoped_release unlocked;
  self.top_ids(logits.data(), out_ids.shape(0), out_ids.data());
}

NoiseAddress address(uint64_t seed, uint32_t position, uint32_t committed_len, uint32_t stream) {
  if (stream > static_cast<uint32_t>(Stream::kResidual)) throw std::domain_error("there is no such noise stream");
  return {seed, position, committed_len, static_cast<Stream>(stream)};
}

nb::tuple race_over(const int32_t* ids, Vector<const double> weights, const NoiseAddress& at) {
  RaceResult winner;
  {
    nb::gil_scoped_release unlocked;
    winner = race(ids, weights.data(), weights.shape(0), at);
  }
  return nb::make_tuple(winner.token_id, winner.ratio);
}

std::vector<int32_t> draw_from(const int32_t* ids, Vector<const double> weights, const NoiseAddress& at,
                               size_t count) {
  nb::gil_scoped_release unlocked;
  return draw(ids, weights.data(), weights.shape(0), at, count);
}

// The ids of a law that keeps some, beside their weights.
const int32_t* ids_of(Vector<const int32_t> ids, Vector<const double> weights) {
  if (ids.shape(0) != weights.shape(0)) throw std::domain_error("ids and weights differ in length");
  return ids.data();
}

// A RowLaw that keeps its row's memory, though not its contents.
struct HeldRowLaw {
  Vector<const float> row;
  RowLaw law;
};

HeldRowLaw row_law(const Sampler& self, Vector<const float> logits, double temperature) {
  check_size(logits.shape(0), self.vocab_size(), "logits");
  const auto make = [&] {
    nb::gil_scoped_release unlocked;
    return RowLaw(span(logits), temperature);
  };
  return {logits, make()};
}

nb::tuple race_in(const HeldRowLaw& self, uint64_t seed, uint32_t position, uint32_t committed_len, uint32_t stream) {
  const NoiseAddress at = address(seed, position, committed_len, stream);
  RaceResult winner;
  {
    nb::gil_scoped_release unlocked;
    winner = self.law.race(at);
  }
  return nb::make_tuple(winner.token_id, winner.ratio);
}

std::vector<int32_t> draw_in(const HeldRowLaw& self, uint64_t seed, uint32_t position, uint32_t committed_len,
                             uint32_t stream, size_t count) {
  const NoiseAddress at = address(seed, position, committed_len, stream);
  nb::gil_scoped_release unlocked;
  return self.law.draw(at, count);
}

void write_weights(const HeldRowLaw& self, Vector<double> out) {
  check_size(out.shape(0), static_cast<int>(self.law.size()), "out");
  nb::gil_scoped_release unlocked;
  self.law.weights(out.data());
}

}  // namespace
}  // namespace forerun::sampling

void bind_sampling(nb::module_& m) {
  using namespace forerun::sampling;

  m.def("sampling_set_isa_level", &set_isa_level, "level"_a);
  m.def("sampling_isa_level", &isa_level);
  m.def("sampling_max_isa_level", &max_isa_level);
  m.def("sampling_exp", &exp_nonpositive, "x"_a);
  m.def("sampling_log", &log_positive, "x"_a);
  m.def(
      "sampling_philox",
      [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
        const uint32_t counter[4] = {c0, c1, c2, c3};
        uint32_t words[4];
        philox4x32(counter, key, words);
        return nb::make_tuple(words[0], words[1], words[2], words[3]);
      },
      "c0"_a, "c1"_a, "c2"_a, "c3"_a, "key"_a);
  m.def(
      "sampling_uniform",
      [](uint64_t seed, uint32_t index, uint32_t position, uint32_t committed_len, uint32_t stream) {
        return uniform(address(seed, position, committed_len, stream), index);
      },
      "seed"_a, "index"_a, "position"_a, "committed_len"_a, "stream"_a);
  m.def(
      "sampling_race",
      [](Vector<const double> weights, uint64_t seed, uint32_t position, uint32_t committed_len, uint32_t stream) {
        return race_over(nullptr, weights, address(seed, position, committed_len, stream));
      },
      "weights"_a, "seed"_a, "position"_a, "committed_len"_a, "stream"_a);
  m.def(
      "sampling_race_of",
      [](Vector<const int32_t> ids, Vector<const double> weights, uint64_t seed, uint32_t position,
         uint32_t committed_len, uint32_t stream) {
        return race_over(ids_of(ids, weights), weights, address(seed, position, committed_len, stream));
      },
      "ids"_a, "weights"_a, "seed"_a, "position"_a, "committed_len"_a, "stream"_a);
  m.def(
      "sampling_draw",
      [](Vector<const double> weights, uint64_t seed, uint32_t position, uint32_t committed_len, uint32_t stream,
         size_t count) {
        return draw_from(nullptr, weights, address(seed, position, committed_len, stream), count);
      },
      "weights"_a, "seed"_a, "position"_a, "committed_len"_a, "stream"_a, "count"_a);
  m.def(
      "sampling_draw_of",
      [](Vector<const int32_t> ids, Vector<const double> weights, uint64_t seed, uint32_t position,
         uint32_t committed_len, uint32_t stream, size_t count) {
        const NoiseAddress at = address(seed, position, committed_len, stream);
        return draw_from(ids_of(ids, weights), weights, at, count);
      },
      "ids"_a, "weights"_a, "seed"_a, "position"_a, "committed_len"_a, "stream"_a, "count"_a);

  nb::class_<LawParams>(m, "LawParams")
      .def("__init__",
           [](LawParams* self, double temperature, bool is_greedy, int64_t top_k, double top_p, double min_p,
              double repetition_penalty, double presence_penalty, double frequency_penalty,
              std::vector<int32_t> bias_ids, std::vector<double> biases) {
             new (self) LawParams(make_params(temperature, is_greedy, top_k, top_p, min_p, repetition_penalty,
                                              presence_penalty, frequency_penalty, std::move(bias_ids),
                                              std::move(biases)));
           },
           "temperature"_a, "is_greedy"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
           "presence_penalty"_a, "frequency_penalty"_a, "bias_ids"_a, "biases"_a);

  nb::class_<HeldRowLaw>(m, "RowLaw")
      .def_prop_ro("total", [](const HeldRowLaw& self) { return self.law.total(); })
      .def("weight", [](const HeldRowLaw& self, int32_t token_id) { return self.law.weight(token_id); }, "token_id"_a)
      .def("weights", &write_weights, "out"_a)
      .def("race", &race_in, "seed"_a, "position"_a, "committed_len"_a, "stream"_a)
      .def("draw", &draw_in, "seed"_a, "position"_a, "committed_len"_a, "stream"_a, "count"_a);

  nb::class_<Sampler>(m, "Sampler")
      .def(nb::init<int>(), "vocab_size"_a)
      .def_prop_ro("vocab_size", &Sampler::vocab_size)
      .def("law", &law, "logits"_a, "params"_a, "history_ids"_a, "output_counts"_a, "path_ids"_a, "banned_ids"_a,
           "allowed"_a, "out_ids"_a, "out_weights"_a)
      .def("row_law", &row_law, "logits"_a, "temperature"_a)
      .def("logprobs", &logprobs, "logits"_a, "token_id"_a, "out_ids"_a, "out_logprobs"_a)
      .def("top_ids", &top_ids, "logits"_a, "out_ids"_a);
}
