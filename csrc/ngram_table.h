// What followed each run of one to four tokens in texts that don't change, with counts of the three most frequent tokens.
//
// Where an index that grows (suffix.h) follows several pointers for each context length, and has a tree to follow them in,
// this is one table of records of half a cache line. The places of all lengths are known from the tokens alone, so they
// are fetched together: a look into texts of any size costs about one miss.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "contexts.h"
#include "memory.h"

namespace forerun::suffix {

class NgramTable : public Contexts {
 public:
  static constexpr int kDepth = 4;
  static constexpr int kKept = 3;

  // Texts back to back. Throws std::domain_error for an id below 0, and unless the lengths add up to num_tokens.
  NgramTable(const int32_t* token_ids, size_t num_tokens, const std::vector<size_t>& lengths);

  size_t num_contexts() const { return num_contexts_; }
  size_t bytes() const { return num_contexts_ ? records_.num_bytes() : 0; }

  int max_depth() const override { return kDepth; }
  // There is one partition, whatever it is called.
  void locate(const std::string& partition, const int32_t* end, size_t num_tokens,
              std::vector<Match>* out) const override;
  uint32_t num_occurrences(uint32_t node) const override { return records_[node].num_occurrences; }
  size_t num_continuations(uint32_t node) const override { return records_[node].num_continuations; }
  // Of equals the lowest id first. Counts end at 65,535.
  void followers(uint32_t node, uint32_t min_count, std::vector<Follower>* out) const override;

 private:
  struct alignas(32) Record {
    uint32_t check;            // the half of the hash that does not say where the record is
    uint32_t num_occurrences;  // 0: there is none here
    int32_t token_ids[kKept];
    uint16_t counts[kKept];    // 0 behind the last
    uint16_t num_continuations;
  };
  struct Occurrence {
    uint64_t hash;  // of the context
    int32_t token_id;
    bool operator<(const Occurrence& other) const {
      return hash != other.hash ? hash < other.hash : token_id < other.token_id;
    }
  };

  void insert(const Occurrence* begin, const Occurrence* end);

  Array<Record> records_;  // open addressing with linear probing
  size_t mask_ = 0;
  size_t num_contexts_ = 0;
};

}  // namespace forerun::suffix
