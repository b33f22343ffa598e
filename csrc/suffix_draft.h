// Draft trees from suffix indexes: what may follow a text's end, and how likely it is.
//
// A context that occurred n times, u different tokens after it, says of a token that came c times
//
//    p(token) = (c - d) / n  +  d * u / n * p'(token)
//
// where p' is what the next shorter context says and d, between 0 and 1, is how far a context of this length is to be
// distrusted: absolute discounting (Ney, Essen, Kneser 1994, "On structuring probabilistic dependences in stochastic
// language modelling"). The longest context speaks first, whichever index it is from; of equal ones the own text's, then that of
// the index that is named first.
//
// The tree is grown best first by the product of p along the path; for a node's children the path's tokens are part of
// the context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "suffix.h"

namespace forerun::suffix {

struct DraftNode {
  int32_t token_id;
  int32_t parent;  // index of the parent node, -1 for the text's last token
  double prob;     // given the parent
  int match_len;   // of the longest context that was found
  int source;      // in which index that was, see Drafts
};

struct DraftLimits {
  size_t max_nodes;
  double min_prob;  // of a path, below which nothing is proposed
  bool is_chain;    // each node has its likeliest child only
};

// Contexts to draft from, which must outlive the drafts.
struct Source {
  const Contexts* contexts;
  std::string partition;
  // By match length, the last one serving longer ones too; 1 leaves contexts of that length out.
  std::vector<double> discounts;
};

class Drafts {
 public:
  // What is continued is the newest sequence of `text`. No node follows one of the end_ids. Throws std::domain_error
  // unless each source has a discount and every discount is in (0, 1].
  Drafts(const SuffixIndex* text, std::vector<Source> sources, std::vector<int32_t> end_ids);

  // What may follow the text.
  const std::vector<DraftNode>& propose(const DraftLimits& limits);

 private:
  struct Candidate {
    int32_t token_id;
    double prob;
  };
  // A node that may come next; the likeliest does, of equals the one that was found first.
  struct Open {
    double path_prob;
    size_t order;
    DraftNode node;
    bool operator<(const Open& other) const {
      return path_prob != other.path_prob ? path_prob < other.path_prob : order > other.order;
    }
  };

  void load_context(int32_t node);
  // Fills candidates_ with what may follow the context.
  void predict();
  int find_longest();
  // Adds what one context says, given `rest` to share out; returns the part of it that is left.
  double add_level(const Contexts& contexts, uint32_t node, double discount, double rest);
  void open_children(int32_t parent, const DraftLimits& limits);
  int32_t close_best();

  const SuffixIndex* text_;
  std::vector<Source> sources_;
  std::vector<int32_t> end_ids_;
  size_t max_depth_ = 0;  // of any source
  // Scratch of one call.
  std::vector<int32_t> tail_, context_;
  std::vector<std::vector<Match>> matches_;  // by source, those that have not spoken
  std::vector<bool> is_located_;             // whether they were looked for
  std::vector<Follower> followers_;
  std::vector<Candidate> candidates_;
  std::vector<Open> open_;
  std::vector<DraftNode> nodes_;
  std::vector<double> path_probs_;  // of nodes_
  size_t num_opened_ = 0;
  int match_len_ = 0;
  int source_ = 0;
};

}  // namespace forerun::suffix
