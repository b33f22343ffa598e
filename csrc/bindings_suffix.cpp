// Python's view of suffix.h and suffix_draft.h. No call lets other Python threads run meanwhile, which keeps two of them
// from changing one index at once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "suffix.h"
#include "suffix_draft.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace forerun::suffix {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void append(SuffixIndex& self, Ids token_ids) { self.append(token_ids.data(), token_ids.shape(0)); }
void append_list(SuffixIndex& self, const std::vector<int32_t>& token_ids) {
  self.append(token_ids.data(), token_ids.size());
}

// [(match_len, num_occurrences, [(token_id, count), ...]), ...], shortest match first.
nb::list matches(const SuffixIndex& self, const std::string& partition, Ids context) {
  std::vector<Match> found;
  std::vector<Continuation> continuations;
  self.locate(partition, context.data() + context.shape(0), context.shape(0), &found);
  nb::list out;
  for (const Match& match : found) {
    self.continuations(match.node, 0, &continuations);
    nb::list counts;
    for (const Continuation& entry : continuations) counts.append(nb::make_tuple(entry.token_id, entry.count));
    out.append(nb::make_tuple(match.match_len, self.num_occurrences(match.node), counts));
  }
  return out;
}

// Lists of token ids, parents, probabilities, match lengths and whether the match was shared.
nb::tuple propose(Drafts& self, const SuffixIndex& own, const SuffixIndex* shared, const std::string& partition,
                  size_t max_nodes, double min_prob, bool is_chain) {
  nb::list token_ids, parents, probs, match_lens, are_shared;
  for (const DraftNode& node : self.propose(own, shared, partition, {max_nodes, min_prob, is_chain})) {
    token_ids.append(node.token_id);
    parents.append(node.parent);
    probs.append(node.prob);
    match_lens.append(node.match_len);
    are_shared.append(node.is_shared);
  }
  return nb::make_tuple(token_ids, parents, probs, match_lens, are_shared);
}

}  // namespace
}  // namespace forerun::suffix

void bind_suffix(nb::module_& m) {
  using namespace forerun::suffix;

  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<int, size_t>(), "max_depth"_a, "max_bytes"_a)
      .def("begin", &SuffixIndex::begin, "partition"_a)
      .def("append", &append, "token_ids"_a)
      .def("append", &append_list, "token_ids"_a)
      .def("remove_oldest", &SuffixIndex::remove_oldest)
      .def("clear", &SuffixIndex::clear)
      .def("matches", &matches, "partition"_a, "context"_a)
      .def("check_integrity", &SuffixIndex::check_integrity)
      .def_prop_ro("num_sequences", &SuffixIndex::num_sequences)
      .def_prop_ro("num_partitions", &SuffixIndex::num_partitions)
      .def_prop_ro("num_nodes", &SuffixIndex::num_nodes)
      .def_prop_ro("bytes", &SuffixIndex::bytes);

  nb::class_<Drafts>(m, "SuffixDrafts")
      .def("__init__",
           [](Drafts* self, std::vector<double> own_discounts, std::vector<double> shared_discounts,
              std::vector<int32_t> end_ids) {
             new (self) Drafts({std::move(own_discounts), std::move(shared_discounts)}, std::move(end_ids));
           },
           "own_discounts"_a, "shared_discounts"_a, "end_ids"_a)
      .def("propose", &propose, "own"_a, "shared"_a.none(), "partition"_a, "max_nodes"_a, "min_prob"_a, "is_chain"_a);
}
