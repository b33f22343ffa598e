// What followed the ends of a text elsewhere, as draft trees ask for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace forerun::suffix {

// A token that followed a context.
struct Follower {
  int32_t token_id;
  uint32_t count;
};

// A context that occurred: its length in tokens and the node that has its occurrences.
struct Match {
  int match_len;
  uint32_t node;
};

class Contexts {
 public:
  virtual ~Contexts() = default;
  // Tokens of the longest context.
  virtual int max_depth() const = 0;
  // The contexts ending at `end` that occurred in a partition, shortest first, of several with the same occurrences the
  // longest one. Looks at the last max_depth of num_tokens tokens.
  virtual void locate(const std::string& partition, const int32_t* end, size_t num_tokens,
                      std::vector<Match>* out) const = 0;
  virtual uint32_t num_occurrences(uint32_t node) const = 0;
  // Different tokens that followed.
  virtual size_t num_continuations(uint32_t node) const = 0;
  // Those that were seen at least min_count times, most frequent first; an index may know the most frequent ones only.
  virtual void followers(uint32_t node, uint32_t min_count, std::vector<Follower>* out) const = 0;
};

}  // namespace forerun::suffix
