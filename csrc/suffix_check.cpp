// The index against its own texts: everything it has counted is counted again.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "suffix.h"

namespace forerun::suffix {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("suffix index: " + what);
}

// What a node must hold.
struct Expected {
  uint32_t count = 0;
  Place newest;
  std::unordered_map<int32_t, Continuation> continuations;

  void add(int32_t token_id, Place place) {
    ++count;
    newest = place;
    Continuation& entry = continuations[token_id];
    entry = {token_id, entry.count + 1, place};
  }
};

}  // namespace

void SuffixIndex::check_integrity() const {
  std::unordered_map<uint32_t, Expected> expected;
  size_t text_bytes = 0, partition_bytes = 0;
  std::map<std::string, size_t> num_sequences;
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const Sequence& sequence = sequences_[s];
    ++num_sequences[sequence.partition->first];
    text_bytes += sequence.token_ids.capacity() * sizeof(int32_t);
    for (size_t i = 0; i < sequence.token_ids.size(); ++i) {
      const Place place(first_sequence_ + s, i);
      const int32_t* end = text(place);
      const uint32_t limit = static_cast<uint32_t>(std::min<size_t>(i, max_depth_));
      uint32_t node = sequence.partition->second.root;
      expected[node].add(*end, place);
      while (at(node).depth < limit) {
        const uint32_t child = child_of(node, end[-1 - static_cast<ptrdiff_t>(at(node).depth)]);
        require(child != kNone, "a context has no node");
        require(at(child).depth > at(node).depth, "an edge has no token");
        require(at(child).depth <= limit, "a context ends within an edge");
        require(common_depth(child, end, at(child).depth) == at(child).depth, "an edge has the wrong tokens");
        node = child;
        expected[node].add(*end, place);
      }
    }
  }
  for (const auto& [name, partition] : partitions_) {
    require(num_sequences[name] == partition.num_sequences, "a partition counts the wrong sequences");
    partition_bytes += bytes_of(name);
    expected[partition.root];
  }
  require(num_sequences.size() == partitions_.size(), "a partition is empty");
  require(expected.size() == num_nodes_, "a node without an occurrence is left");
  require(children_.size() == num_nodes_ - partitions_.size(), "the table of children has the wrong size");
  require(text_bytes == text_bytes_ && partition_bytes == partition_bytes_, "bytes of texts are miscounted");
  size_t continuation_bytes = 0;
  for (const auto& [id, wanted] : expected) {
    const Node& node = at(id);
    require(node.count == wanted.count, "a node counts wrongly");
    require(node.count == 0 || node.newest == wanted.newest, "a node's newest occurrence is wrong");
    const bool is_root = node.parent == kNone;
    require(is_root || at(node.parent).count != node.count || at(node.parent).parent == kNone, "a node is redundant");
    require(is_root || !node.continuations == (wanted.continuations.size() == 1), "continuations are kept wrongly");
    if (!node.continuations) continue;
    continuation_bytes += node.continuations->bytes();
    node.continuations->check_integrity();
    require(node.continuations->all().size() == wanted.continuations.size(), "a node has the wrong continuations");
    for (const Continuation& entry : node.continuations->all()) {
      const auto found = wanted.continuations.find(entry.token_id);
      require(found != wanted.continuations.end(), "a node has a continuation that never came");
      require(found->second.count == entry.count, "a continuation counts wrongly");
      require(found->second.last == entry.last, "a continuation's newest occurrence is wrong");
    }
  }
  require(continuation_bytes == continuation_bytes_, "bytes of continuations are miscounted");
}

void Continuations::check_integrity() const {
  require(entries_.size() >= 2, "a node keeps a single continuation");
  require(!has_table() || table_.size() == entries_.size(), "the table of continuations has the wrong size");
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    require(i == 0 || entries_[i - 1].count >= entries_[i].count, "continuations are out of order");
    require(entries_[i].count > 0, "a continuation has no occurrence");
    require(find(entries_[i].token_id) == i, "a continuation can't be found");
  }
}

}  // namespace forerun::suffix
