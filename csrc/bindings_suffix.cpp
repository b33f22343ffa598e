// Python's view of suffix.h and suffix_draft.h. No call lets other Python threads run meanwhile, which keeps two of them
// from changing one index at once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_tuple.h"
#include "ngram_table.h"
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

// [(match_len, num_occurrences, num_continuations, [(token_id, count), ...]), ...], shortest match first.
nb::list matches_in(const Contexts& contexts, const std::string& partition, Ids context) {
  std::vector<Match> found;
  std::vector<Follower> followers;
  contexts.locate(partition, context.data() + context.shape(0), context.shape(0), &found);
  nb::list out;
  for (const Match& match : found) {
    contexts.followers(match.node, 0, &followers);
    nb::list counts;
    for (const Follower& entry : followers) counts.append(nb::make_tuple(entry.token_id, entry.count));
    out.append(nb::make_tuple(match.match_len, contexts.num_occurrences(match.node),
                              contexts.num_continuations(match.node), counts));
  }
  return out;
}

nb::list matches(const SuffixIndex& self, const std::string& partition, Ids context) {
  return matches_in(self, partition, context);
}

// Sorts nodes into cells: first_cell + (prob's place * lengths + match_len's place) * sources + source.
struct Cells {
  std::vector<double> prob_edges;
  std::vector<int> match_edges;
  int num_sources;
  int first_cell;

  template <class T>
  static int place(const std::vector<T>& edges, T value) {  // how many edges are not above it
    return static_cast<int>(std::upper_bound(edges.begin(), edges.end(), value) - edges.begin());
  }
  int of(const DraftNode& node) const {
    const int lengths = static_cast<int>(match_edges.size()) + 1;
    const int at = place(prob_edges, node.prob) * lengths + place(match_edges, node.match_len);
    return first_cell + at * num_sources + node.source;
  }
};

// Drafts, and what keeps their indexes alive.
struct BoundDrafts {
  Drafts drafts;
  Cells cells;
  std::vector<nb::object> indexes;
};

using BoundSource = std::tuple<nb::object, std::string, std::vector<double>>;

BoundDrafts bind_drafts(const nb::object& text, const std::vector<BoundSource>& bound, std::vector<int32_t> end_ids,
                        std::vector<double> prob_edges, std::vector<int> match_edges, int first_cell) {
  std::vector<Source> sources;
  std::vector<nb::object> indexes{text};
  for (const auto& [index, partition, discounts] : bound) {
    sources.push_back({nb::cast<const Contexts*>(index), partition, discounts});
    indexes.push_back(index);
  }
  const int num_sources = static_cast<int>(sources.size());
  return {Drafts(nb::cast<const SuffixIndex*>(text), std::move(sources), std::move(end_ids)),
          {std::move(prob_edges), std::move(match_edges), num_sources, first_cell},
          std::move(indexes)};
}

// What `value` makes of each node, as a tuple.
template <class F>
nb::tuple tuple_of_nodes(const std::vector<DraftNode>& nodes, F value) {
  return tuple_of(nodes.size(), [&](size_t i) { return value(nodes[i]); });
}

// Tuples of token ids, parents and cells.
nb::tuple propose(BoundDrafts& self, size_t max_nodes, double min_prob, bool is_chain) {
  const std::vector<DraftNode>& nodes = self.drafts.propose({max_nodes, min_prob, is_chain});
  return nb::make_tuple(tuple_of_nodes(nodes, [](const DraftNode& n) { return n.token_id; }),
                        tuple_of_nodes(nodes, [](const DraftNode& n) { return n.parent; }),
                        tuple_of_nodes(nodes, [&](const DraftNode& n) { return self.cells.of(n); }));
}

// The same nodes as tuples of token ids, parents, probabilities, match lengths and sources.
nb::tuple explain(BoundDrafts& self, size_t max_nodes, double min_prob, bool is_chain) {
  const std::vector<DraftNode>& nodes = self.drafts.propose({max_nodes, min_prob, is_chain});
  return nb::make_tuple(tuple_of_nodes(nodes, [](const DraftNode& n) { return n.token_id; }),
                        tuple_of_nodes(nodes, [](const DraftNode& n) { return n.parent; }),
                        tuple_of_nodes(nodes, [](const DraftNode& n) { return n.prob; }),
                        tuple_of_nodes(nodes, [](const DraftNode& n) { return n.match_len; }),
                        tuple_of_nodes(nodes, [](const DraftNode& n) { return n.source; }));
}

}  // namespace
}  // namespace forerun::suffix

void bind_suffix(nb::module_& m) {
  using namespace forerun::suffix;

  nb::class_<Contexts>(m, "Contexts");
  nb::class_<SuffixIndex, Contexts>(m, "SuffixIndex")
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

  nb::class_<NgramTable, Contexts>(m, "NgramTable")
      .def("__init__",
           [](NgramTable* self, Ids token_ids, const std::vector<size_t>& lengths) {
             new (self) NgramTable(token_ids.data(), token_ids.shape(0), lengths);
           },
           "token_ids"_a, "lengths"_a)
      .def("matches", [](const NgramTable& self, Ids context) { return matches_in(self, "", context); }, "context"_a)
      .def_prop_ro("num_contexts", &NgramTable::num_contexts)
      .def_prop_ro("bytes", &NgramTable::bytes);

  nb::class_<BoundDrafts>(m, "SuffixDrafts")
      .def("__init__",
           [](BoundDrafts* self, const nb::object& text, const std::vector<BoundSource>& sources,
              std::vector<int32_t> end_ids,
              std::vector<double> prob_edges, std::vector<int> match_edges, int first_cell) {
             new (self) BoundDrafts(bind_drafts(text, sources, std::move(end_ids), std::move(prob_edges),
                                                std::move(match_edges), first_cell));
           },
           "text"_a, "sources"_a, "end_ids"_a, "prob_edges"_a, "match_edges"_a, "first_cell"_a)
      .def("propose", &propose, "max_nodes"_a, "min_prob"_a, "is_chain"_a)
      .def("explain", &explain, "max_nodes"_a, "min_prob"_a, "is_chain"_a);
}
