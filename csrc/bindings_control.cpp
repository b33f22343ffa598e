// Python's view of control.h. No call lets other Python threads run meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings_tuple.h"
#include "control.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace forerun::control {
namespace {

using Ids = std::vector<int32_t>;

// Of each request: token ids, parents, proposals and indices there of the chosen nodes; candidates, fixed ones, expected
// tokens.
nb::list choose_nodes(const std::vector<Candidates*>& requests, const std::vector<int>& max_nodes, bool takes_paying,
                      const StepCosts* costs, int num_rows, int num_seqs, double context_len, int max_rows,
                      double price) {
  const Terms terms{takes_paying, costs, num_rows, num_seqs, context_len, max_rows, price};
  const std::vector<Choice> choices = choose(requests, max_nodes, terms);
  nb::list out;
  for (size_t request = 0; request < choices.size(); request++) {
    const Choice& choice = choices[request];
    const size_t n = choice.candidates.size();
    auto node = [&](size_t i) -> const Candidates::Node& {
      return requests[request]->nodes()[static_cast<size_t>(choice.candidates[i])];
    };
    out.append(nb::make_tuple(tuple_of(n, [&](size_t i) { return node(i).token_id; }),
                              tuple_of(n, [&](size_t i) { return choice.parents[i]; }),
                              tuple_of(n, [&](size_t i) { return node(i).proposal; }),
                              tuple_of(n, [&](size_t i) { return node(i).index; }), requests[request]->nodes().size(),
                              choice.num_fixed, choice.expected_tokens));
  }
  return out;
}

}  // namespace
}  // namespace forerun::control

void bind_control(nb::module_& m) {
  using namespace forerun::control;

  nb::class_<AcceptanceTable>(m, "AcceptanceTable")
      .def(nb::init<std::vector<double>>(), "priors"_a)
      .def("clear", &AcceptanceTable::clear)
      .def("rate", &AcceptanceTable::rate, "cell"_a)
      .def("record", &AcceptanceTable::record, "cell"_a, "is_right"_a);

  nb::class_<RequestRates>(m, "RequestRates")
      .def(nb::init<AcceptanceTable&>(), "table"_a, nb::keep_alive<1, 2>())
      .def("rate", &RequestRates::rate, "cell"_a)
      .def("record", &RequestRates::record, "cell"_a, "is_right"_a)
      .def(
          "score",
          [](RequestRates& self, const Ids& token_ids, const Ids& parents, const Ids& cells, const Ids& emitted) {
            self.score({token_ids, parents, cells}, emitted);
          },
          "token_ids"_a, "parents"_a, "cells"_a, "emitted"_a);

  nb::class_<StepCosts>(m, "StepCosts")
      .def(nb::init<std::vector<double>, int64_t, double, double, double>(), "base_s"_a, "context_len"_a,
           "per_token_s"_a, "per_token_row_s"_a, "overhead_s"_a)
      .def("step_s", &StepCosts::step_s, "num_rows"_a, "num_seqs"_a, "context_len"_a)
      .def(
          "steps_s",
          [](const StepCosts& self, int first_rows, int count, int num_seqs, double context_len) {
            std::vector<double> out;
            for (int i = 0; i < count; i++) out.push_back(self.step_s(first_rows + i, num_seqs, context_len));
            return out;
          },
          "first_rows"_a, "count"_a, "num_seqs"_a, "context_len"_a)
      .def("learn", &StepCosts::learn, "num_rows"_a, "num_seqs"_a, "context_len"_a, "is_plain"_a, "forward_s"_a,
           "overhead_s"_a)
      .def("is_due", &StepCosts::is_due, "num_rows"_a);

  nb::class_<Candidates>(m, "Candidates")
      .def(nb::init<>())
      .def("clear", &Candidates::clear)
      .def(
          "merge",
          [](Candidates& self, const Ids& token_ids, const Ids& parents, const Ids& cells, bool is_fixed,
             const RequestRates& rates) { self.merge({token_ids, parents, cells}, is_fixed, rates); },
          "token_ids"_a, "parents"_a, "cells"_a, "is_fixed"_a, "rates"_a);
  m.def("choose_nodes", &choose_nodes, "candidates"_a, "max_nodes"_a, "takes_paying"_a, "costs"_a.none(), "num_rows"_a,
        "num_seqs"_a, "context_len"_a, "max_rows"_a, "price"_a);
}
