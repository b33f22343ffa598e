// The controller's arithmetic: how often nodes are accepted, what steps take, and which nodes of several proposals pay.
//
// It runs right after a pass that has left nothing else in the processor's caches, where each object that an interpreter
// touches is waited for; hence one piece of plain numbers. What the classes mean is said in `forerun.control`, where
// they are used; tests/helpers/control_reference.py computes the same numbers slowly.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace forerun::control {

// The nodes of one proposal: token, parent's index (-1 is the root) and acceptance cell of each.
struct Nodes {
  const std::vector<int32_t>& token_ids;
  const std::vector<int32_t>& parents;
  const std::vector<int32_t>& cells;
};

// Decayed counts of trials and successes per cell, on top of some trials at the prior's rate.
class AcceptanceTable {
 public:
  explicit AcceptanceTable(std::vector<double> priors);
  void clear();
  size_t num_cells() const { return priors_.size(); }
  // Throws std::out_of_range where there is no such cell, as all that take a cell do.
  double rate(int64_t cell) const;
  void record(int64_t cell, bool is_right);

 private:
  size_t checked(int64_t cell) const;

  std::vector<double> priors_, trials_, successes_;  // of one length
};

// The rates of a table as they hold for one request: its odds times a factor of the request's own.
class RequestRates {
 public:
  // The table outlives it; observations go there too.
  explicit RequestRates(AcceptanceTable& table) : table_(table) {}
  double rate(int64_t cell) const;
  void record(int64_t cell, bool is_right);
  // Compares a proposal with the tokens that came: a node counts where its parent was emitted and its token is known.
  void score(const Nodes& nodes, const std::vector<int32_t>& emitted);

 private:
  AcceptanceTable& table_;
  double log_odds_ = 0.0;
  double factor_ = 1.0;  // exp(log_odds_)
  std::vector<int> depths_;  // scratch of score
};

// What a step takes by its rows and its context: a measured curve, corrected by what steps really take.
class StepCosts {
 public:
  // base_s: seconds of a pass of 0, 1, ... rows at context_len tokens. overhead_s: of a step beside its pass, until steps
  // have been seen. Throws std::invalid_argument for fewer than two sizes.
  StepCosts(std::vector<double> base_s, int64_t context_len, double per_token_s, double per_token_row_s,
            double overhead_s);
  int max_rows() const { return static_cast<int>(base_.size()) - 1; }
  // Of a step over sequences of context_len tokens each, on the average, with num_rows rows in all; more rows than the
  // curve has are taken to cost what its upper half costs, row by row. Throws std::out_of_range for fewer than 0.
  double step_s(int num_rows, int num_seqs, double context_len) const;
  // Of one row per sequence if `is_plain`. Ignores passes of more rows than the curve has, but for the machine's drift.
  void learn(int num_rows, int num_seqs, double context_len, bool is_plain, double forward_s, double overhead_s);
  // Whether it is time to run a step of so many rows, to see what it takes.
  bool is_due(int num_rows) const;

 private:
  double pass_s(int num_rows, int num_seqs, double context_len) const;
  size_t size_of(int num_rows) const { return static_cast<size_t>(std::min(num_rows, max_rows())); }

  std::vector<double> base_, corrections_;
  std::vector<int64_t> last_run_;  // the step after which each size was run last
  int64_t context_len_;
  double per_token_s_, per_token_row_s_;
  double drift_ = 1.0;
  double overhead_s_;
  int64_t num_steps_ = 0;
  int64_t plain_steps_;
};

// What is chosen of the candidates.
struct Choice {
  std::vector<int> candidates;  // ascending; with a node its parent is among them
  std::vector<int> parents;     // of each, within the choice
  int num_fixed;                // nodes that must be verified, chosen or not
  double expected_tokens;
};

// On what terms nodes are chosen.
struct Terms {
  // Without costs, or if nodes that pay are not wanted, fixed nodes are chosen alone.
  bool takes_paying;
  const StepCosts* costs;
  int num_rows;        // of the pass, apart from nodes
  int num_seqs;        // in it
  double context_len;  // tokens of each sequence, on the average
  int max_rows;        // of the pass
  double price;        // tokens per second that the engine makes otherwise
};

// Proposals of several drafters as one tree: nodes of one parent and one token are one node.
class Candidates {
 public:
  struct Node {
    int32_t token_id;
    int parent;
    double rate;    // acceptance, given its parent's
    bool is_fixed;  // must be verified whatever it costs
    int proposal;   // whose it is: of the proposals of its parent and token the one with the larger rate
    int index;      // in that proposal
  };

  void clear();
  // Adds the next proposal. Throws std::invalid_argument if its arrays differ in length or a parent doesn't precede its
  // node, std::out_of_range if there is no such cell, and then adds nothing.
  void merge(const Nodes& nodes, bool is_fixed, const RequestRates& rates);
  const std::vector<Node>& nodes() const { return nodes_; }

 private:
  friend std::vector<Choice> choose(const std::vector<Candidates*>&, const std::vector<int>&, const Terms&);
  // The order in which nodes are taken, at most max_nodes: fixed ones first, then those that survive most. Every
  // beginning of it is a tree: a parent survives at least as often as its child and was added before it, and a fixed
  // node's parent is fixed.
  void rank(int max_nodes);
  void find_survivals();
  double survival(size_t place) const { return survivals_[static_cast<size_t>(order_[place])]; }
  Choice take(size_t count);

  std::vector<Node> nodes_;
  int num_proposals_ = 0;
  size_t num_fixed_ = 0;  // of the ranked ones
  // Scratch of one call.
  std::vector<double> rates_, totals_, survivals_;
  std::vector<int> order_, places_;
};

// Chooses among the candidates of several requests, of which max_nodes[i] at most of request i: fixed nodes, and of the
// others those that survive most, whose ever they are, as many as are worth it by the rate rule. No candidates may be
// there twice.
std::vector<Choice> choose(const std::vector<Candidates*>& requests, const std::vector<int>& max_nodes,
                           const Terms& terms);

}  // namespace forerun::control
