// The controller's arithmetic and the rows of drafts without Python, for the sanitizers: random proposals are merged,
// chosen among and scored. Which numbers come out is tested against a slow reference, from Python.
#include "control.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <vector>

#include "draft_rows.h"

using namespace forerun;
using namespace forerun::control;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

constexpr int kNumCells = 5;

struct Proposal {
  std::vector<int32_t> token_ids, parents, cells;
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int32_t below(int32_t limit) { return static_cast<int32_t>(engine_() % static_cast<uint32_t>(limit)); }
  // Exactly as long as it must be, so that the address sanitizer sees one step too far.
  Proposal proposal(int32_t num_nodes) {
    Proposal out;
    for (int32_t node = 0; node < num_nodes; node++) {
      out.token_ids.push_back(below(3));
      out.parents.push_back(below(node + 1) - 1);
      out.cells.push_back(below(kNumCells));
    }
    for (std::vector<int32_t>* v : {&out.token_ids, &out.parents, &out.cells}) v->shrink_to_fit();
    return out;
  }

 private:
  std::mt19937 engine_;
};

void check_choice(const Choice& choice, const Candidates& candidates) {
  check(choice.parents.size() == choice.candidates.size(), "a parent for each node");
  for (size_t i = 0; i < choice.parents.size(); i++) {
    const int parent = choice.parents[i];
    check(parent >= -1 && parent < static_cast<int>(i), "what is chosen is a tree");
    const int expected = candidates.nodes()[static_cast<size_t>(choice.candidates[i])].parent;
    check((parent < 0 ? -1 : choice.candidates[static_cast<size_t>(parent)]) == expected, "of the candidates");
  }
}

void check_requests(uint32_t seed) {
  Random random(seed);
  AcceptanceTable table(std::vector<double>{0.0, 0.1, 0.5, 0.9, 1.0});
  RequestRates one(table), two(table);
  StepCosts costs(std::vector<double>(65, 1.0), 100, 1e-3, 1e-4, 0.1);
  Candidates candidates;
  for (int step = 0; step < 300; step++) {
    candidates.clear();
    for (RequestRates* rates : {&one, &two}) {
      const Proposal p = random.proposal(random.below(65));
      candidates.merge({p.token_ids, p.parents, p.cells}, random.below(8) == 0, *rates);
      rates->score({p.token_ids, p.parents, p.cells}, random.proposal(random.below(9)).token_ids);
    }
    const int max_nodes = random.below(64);
    const Choice choice = candidates.choose(max_nodes, true, random.below(4) ? &costs : nullptr, step, 1.0);
    check(static_cast<int>(choice.candidates.size()) <= max_nodes, "no more than there may be");
    check_choice(choice, candidates);
    costs.learn(1 + static_cast<int>(choice.candidates.size()), step, 1.0 + random.below(3), 0.1);
  }
}

void check_rows(uint32_t seed) {
  Random random(seed);
  const Proposal p = random.proposal(random.below(65));
  const DraftRows rows(7, p.token_ids, p.parents, 20);
  const StepArgs args = rows.args();
  check(args.num_rows == 1 + static_cast<int>(p.token_ids.size()) && args.num_logit_rows == args.num_rows, "all rows");
  for (int row = 0; row < args.num_rows; row++) {
    check(args.slots[row] == 20 + row, "slots follow each other");
    check(args.tail_mask[row] == 0 || args.tail_mask[row] >> (row - 1) == 1, "a node sees itself, and none after it");
    const int num_seen = args.visible_len[row] + __builtin_popcountll(args.tail_mask[row]);
    check(num_seen == args.positions[row] + 1, "a row sees as much as lies before it, and itself");
  }
}

template <class F>
void check_refused(F call, const char* what) {
  try {
    call();
  } catch (const std::logic_error&) {
    return;
  }
  check(false, what);
}

}  // namespace

int main() {
  for (uint32_t seed = 0; seed < 20; seed++) check_requests(seed);
  for (uint32_t seed = 0; seed < 500; seed++) check_rows(seed);
  AcceptanceTable table({0.5});
  RequestRates rates(table);
  Candidates candidates;
  const std::vector<int32_t> one{0}, bad{-2}, none;
  check_refused([&] { candidates.merge({one, bad, one}, false, rates); }, "a parent before the root");
  check_refused([&] { candidates.merge({one, one, one}, false, rates); }, "a node that is its own parent");
  check_refused([&] { candidates.merge({one, none, one}, false, rates); }, "a node without a parent");
  check_refused([&] { rates.score({one, none, one}, one); }, "a node without a parent");
  check_refused([&] { table.rate(1); }, "a cell that isn't there");
  check_refused([&] { DraftRows(1, one, one, 0); }, "a row that is its own parent");
  std::printf("control: ok\n");
}
