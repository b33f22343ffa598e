// The controller's arithmetic and the rows of drafts without Python, for the sanitizers: random proposals are merged,
// chosen among and scored. Which numbers come out is tested against a slow reference, from Python.
#include "control.h"
#include "step_rows.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <vector>


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
  Candidates first, second;
  for (int step = 0; step < 300; step++) {
    for (Candidates* candidates : {&first, &second}) {
      candidates->clear();
      for (RequestRates* rates : {&one, &two}) {
        const Proposal p = random.proposal(random.below(65));
        candidates->merge({p.token_ids, p.parents, p.cells}, random.below(8) == 0, *rates);
        rates->score({p.token_ids, p.parents, p.cells}, random.proposal(random.below(9)).token_ids);
      }
    }
    const std::vector<int> max_nodes{random.below(64), random.below(64)};
    const Terms terms{true, random.below(4) ? &costs : nullptr, 2 + random.below(80), 2, 1.0 * step, 256, 1.0};
    const std::vector<Choice> choices = choose({&first, &second}, max_nodes, terms);
    check(choices.size() == 2, "a choice for each");
    for (size_t i = 0; i < 2; i++) {
      check(static_cast<int>(choices[i].candidates.size()) <= max_nodes[i], "no more than there may be");
      check_choice(choices[i], i ? second : first);
    }
    costs.learn(1 + static_cast<int>(choices[0].candidates.size()), 1 + random.below(3), step, random.below(2) == 0,
                1.0 + random.below(3), 0.1);
  }
}

void check_rows(uint32_t seed) {
  Random random(seed);
  const Proposal p = random.proposal(random.below(65));
  const std::vector<int32_t> table(6, 3);
  StepRows rows;
  rows.add_draft(7, p.token_ids, p.parents, 20, table.data(), table.size());
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

// Pieces of several sequences, with tables of several lengths, and what is refused without a trace.
void check_pieces() {
  const std::vector<int32_t> one{0}, two{5, 6}, chain{-1, 0}, table{4, 9}, short_table{3};
  StepRows rows;
  rows.add_prompt(two, 14, short_table.data(), 1, 1);
  rows.add_draft(8, two, chain, 17, table.data(), 2);
  check_refused([&] { rows.add_draft(1, one, one, 0, table.data(), 2); }, "a row that is its own parent");
  check_refused([&] { rows.add_draft(1, one, chain, 0, table.data(), 2); }, "a node without a parent");
  check_refused([&] { rows.add_draft(1, two, chain, 14, short_table.data(), 1); }, "a node behind the table");
  check_refused([&] { rows.add_draft(1, two, chain, -1, table.data(), 2); }, "a slot before the table");
  check_refused([&] { rows.add_prompt(two, 15, short_table.data(), 1, 1); }, "a token behind the table");
  check_refused([&] { rows.add_prompt(two, 0, table.data(), 2, 3); }, "more logits than rows");
  check_refused([&] { rows.add_prompt({}, 0, table.data(), 2, 0); }, "a piece without rows");
  const StepArgs args = rows.args();
  check(args.num_rows == 5 && args.num_seqs == 2 && args.num_table_pages == 2, "two pieces");
  check(args.num_logit_rows == 4 && args.logit_rows[0] == 1 && args.logit_rows[3] == 4, "the last, and all of a draft");
  check(args.seq_ids[1] == 0 && args.seq_ids[2] == 1 && args.slots[2] == 17 && args.positions[4] == 19, "rows in order");
  check(args.page_tables[0] == 3 && args.page_tables[2] == 4 && args.page_tables[3] == 9, "a table of each");
  rows.clear();
  check(rows.args().num_rows == 0 && rows.args().num_seqs == 0, "nothing is left");
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
  check_pieces();
  std::printf("control: ok\n");
}
