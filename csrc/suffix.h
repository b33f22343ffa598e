// What followed a text's last tokens wherever they occurred before: an index of token sequences with exact counts.
//
// Every position i of a sequence is entered into a tree by its context, the tokens before it read backwards, at most
// max_depth of them:
//
//    ids       a b c a b d          position 5 (d): context b a c b a
//    node      "b a" (depth 2)      holds the positions after every "a b": its continuations are c once and d once
//
// So a node stands for a context, the nodes on the way to it for its shorter suffixes, and one descent finds all match
// lengths of a text's end. The tree is compressed: a node exists where contexts part or end, and an edge's tokens are
// those of some text that holds them. That is a suffix tree of the reversed texts, cut at max_depth, grown by one leaf
// and at most one inner node per token.
//
// Sequences leave in the order they came. Each node remembers its newest position, which therefore leaves last: edges
// and continuations always refer to a text that is still there. Partitions share nothing but the memory bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "contexts.h"
#include "id_table.h"

namespace forerun::suffix {

constexpr int kMaxDepth = 1024;

// A token's place in the texts, ordered by the time it came.
class Place {
 public:
  static constexpr uint64_t kMaxTokens = 1ull << 28;  // of a sequence
  Place() = default;
  Place(uint64_t sequence, uint64_t offset) : bits_(sequence * kMaxTokens + offset) {}
  uint64_t sequence() const { return bits_ / kMaxTokens; }
  uint64_t offset() const { return bits_ % kMaxTokens; }
  bool operator<(const Place& other) const { return bits_ < other.bits_; }
  bool operator==(const Place& other) const { return bits_ == other.bits_; }

 private:
  uint64_t bits_ = 0;
};

// A token that followed a context.
struct Continuation {
  int32_t token_id;
  uint32_t count;
  Place last;  // its newest occurrence
};

// The different tokens that followed one context, two or more, most frequent first.
class Continuations {
 public:
  Continuations(Continuation first, Continuation second);

  const std::vector<Continuation>& all() const { return entries_; }
  void add(int32_t token_id, Place place);
  void remove(int32_t token_id);
  size_t bytes() const;
  void check_integrity() const;  // throws std::logic_error

 private:
  // Up to this many are looked through; beyond, a table knows where they are.
  static constexpr size_t kMaxScanned = 16;

  uint32_t find(int32_t token_id) const;
  void append(const Continuation& entry);
  void swap(uint32_t left, uint32_t right);
  bool has_table() const { return table_.size() != 0; }

  std::vector<Continuation> entries_;
  IdTable table_;
};

class SuffixIndex : public Contexts {
 public:
  // max_bytes 0 is no bound. Throws std::domain_error for a depth that is not in 1..kMaxDepth.
  SuffixIndex(int max_depth, size_t max_bytes);
  SuffixIndex(SuffixIndex&&) = default;
  SuffixIndex& operator=(SuffixIndex&&) = default;

  // Starts a sequence, the only one that can be appended to from then on.
  void begin(const std::string& partition);
  // Appends to it; leaves the oldest sequences out until the bound holds, which may reach the newest one's own.
  // Throws std::domain_error when no sequence was begun, and for an id below 0 before anything is appended.
  void append(const int32_t* token_ids, size_t num_tokens);
  void remove_oldest();
  void clear();

  int max_depth() const override { return max_depth_; }
  size_t num_sequences() const { return sequences_.size(); }
  size_t num_nodes() const { return num_nodes_; }
  size_t num_partitions() const { return partitions_.size(); }
  size_t bytes() const;
  size_t max_bytes() const { return max_bytes_; }

  void locate(const std::string& partition, const int32_t* end, size_t num_tokens,
              std::vector<Match>* out) const override;
  uint32_t num_occurrences(uint32_t node) const override { return at(node).count; }
  size_t num_continuations(uint32_t node) const override;
  void followers(uint32_t node, uint32_t min_count, std::vector<Follower>* out) const override;
  // The continuations that were seen at least min_count times, most frequent first, of equals the newest first.
  void continuations(uint32_t node, uint32_t min_count, std::vector<Continuation>* out) const;
  // The tokens of the newest sequence; none where there is no sequence.
  std::pair<const int32_t*, size_t> newest_text() const;

  // Throws std::logic_error naming what is wrong; slow.
  void check_integrity() const;

 private:
  static constexpr uint32_t kNone = IdTable::kNone;

  struct Node {
    uint32_t parent = kNone;
    int32_t token_id = 0;  // the edge's first
    uint32_t count = 0;
    uint32_t depth = 0;  // tokens of context; its edge holds those beyond its parent's
    Place newest;
    std::unique_ptr<Continuations> continuations;  // null: every occurrence was followed by the same token
  };
  struct Partition {
    uint32_t root;
    size_t num_sequences;
  };
  using Partitions = std::map<std::string, Partition>;
  struct Sequence {
    Partitions::iterator partition;
    std::vector<int32_t> token_ids;
  };

  static constexpr size_t kChunkNodes = 1024;

  static size_t bytes_of(const std::string& partition);
  Node& at(uint32_t id) { return chunks_[id / kChunkNodes][id % kChunkNodes]; }
  const Node& at(uint32_t id) const { return chunks_[id / kChunkNodes][id % kChunkNodes]; }
  const int32_t* text(Place place) const;

  uint32_t child_of(uint32_t node, int32_t token_id) const;
  uint32_t create(uint32_t parent, int32_t token_id, uint32_t depth, uint32_t count, Place newest);
  void destroy(uint32_t node);
  void hang(uint32_t node, uint32_t parent, int32_t token_id);
  void unhang(uint32_t node);
  // Depth down to which the edge of `child` has the tokens before `end`, at most `limit`.
  uint32_t common_depth(uint32_t child, const int32_t* end, uint32_t limit) const;
  uint32_t split(uint32_t child, uint32_t depth);
  void insert(uint32_t root, Place place);
  void visit(uint32_t node, Place place, int32_t token_id);
  void remove(uint32_t root, Place place);
  void leave(uint32_t node, int32_t token_id);
  void merge_if_redundant(uint32_t node);
  void hold_bound();

  int max_depth_;
  size_t max_bytes_;
  std::vector<std::unique_ptr<Node[]>> chunks_;
  std::vector<uint32_t> free_;
  IdTable children_;
  size_t num_nodes_ = 0;
  size_t continuation_bytes_ = 0;
  size_t text_bytes_ = 0;
  size_t partition_bytes_ = 0;
  Partitions partitions_;
  std::deque<Sequence> sequences_;
  uint64_t first_sequence_ = 0;  // number of the oldest
  mutable std::vector<Continuation> scratch_;
};

}  // namespace forerun::suffix
