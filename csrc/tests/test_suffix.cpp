// The suffix index without Python, for the sanitizers: random texts come and go, and after every operation the index
// agrees with itself. What it counts and proposes is tested against a scan, from Python.
#include "suffix.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "ngram_table.h"
#include "suffix_draft.h"

using namespace forerun::suffix;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed) {}
  uint32_t below(uint32_t limit) {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<uint32_t>((static_cast<uint64_t>(state_ >> 8) * limit) >> 24);
  }
  // Exactly as long as it must be, so that the address sanitizer sees one step too far.
  std::vector<int32_t> text(uint32_t num_ids) {
    std::vector<int32_t> out(below(60));
    for (int32_t& id : out) id = static_cast<int32_t>(below(num_ids));
    out.shrink_to_fit();
    return out;
  }

 private:
  uint32_t state_;
};

void check_matches(const SuffixIndex& index, const std::string& partition, const std::vector<int32_t>& ids) {
  std::vector<Match> matches;
  std::vector<Continuation> continuations;
  index.locate(partition, ids.data() + ids.size(), ids.size(), &matches);
  int match_len = 0;
  uint32_t count = 0xffffffffu;
  for (const Match& match : matches) {
    check(match.match_len > match_len && match.match_len <= index.max_depth(), "matches grow");
    check(index.num_occurrences(match.node) < count, "a longer match occurs less often");
    match_len = match.match_len;
    count = index.num_occurrences(match.node);
    index.continuations(match.node, 0, &continuations);
    uint32_t total = 0;
    for (const Continuation& entry : continuations) total += entry.count;
    check(total == count, "every occurrence was followed by something");
    check(continuations.size() == index.num_continuations(match.node), "continuations are counted");
  }
}

void check_draft(const std::vector<DraftNode>& nodes, const DraftLimits& limits) {
  check(nodes.size() <= limits.max_nodes, "a draft is no larger than it may");
  std::vector<double> paths;
  for (const DraftNode& node : nodes) {
    const int index = static_cast<int>(paths.size());
    check(node.parent >= -1 && node.parent < index, "parents come first");
    check(node.prob > 0.0 && node.prob <= 1.0, "a probability is one");
    check(node.parent < 0 || nodes[node.parent].token_id != 0, "nothing follows an end");
    paths.push_back(node.prob * (node.parent < 0 ? 1.0 : paths[node.parent]));
    check(paths.back() >= limits.min_prob, "nothing unlikely is proposed");
    check(index == 0 || paths[index] <= paths[index - 1], "the likeliest comes first");
    for (int other = 0; other < index; ++other) {
      check(nodes[other].parent != node.parent || (nodes[other].token_id != node.token_id && !limits.is_chain),
            "siblings differ, and a chain has none");
    }
  }
}

void run(uint32_t seed, int max_depth, uint32_t num_ids, size_t max_bytes) {
  Random random(seed);
  SuffixIndex index(max_depth, max_bytes);
  for (int step = 0; step < 100; ++step) {
    const std::string partition(random.below(3), 'x');
    const uint32_t operation = random.below(10);
    const std::vector<int32_t> ids = random.text(num_ids);
    if (operation < 4 || index.num_sequences() == 0) {
      index.begin(partition);
    } else if (operation < 8) {
      index.append(ids.data(), ids.size());
    } else if (operation < 9) {
      index.remove_oldest();
    } else if (random.below(30) == 0) {
      index.clear();
    }
    index.check_integrity();
    check(max_bytes == 0 || operation < 4 || index.bytes() <= max_bytes, "the bound holds");
    check_matches(index, partition, ids);

    SuffixIndex own(max_depth, 0);
    own.begin("");
    own.append(ids.data(), ids.size());
    const DraftLimits limits{random.below(40), 0.01, random.below(2) == 0};
    const NgramTable table(ids.data(), ids.size(), {ids.size() / 2, ids.size() - ids.size() / 2});
    const Source text{&own, "", {0.7, 0.4, 0.2}};
    check_draft(Drafts(&own, {text}, {0}).propose(limits), limits);
    check_draft(Drafts(&own, {text, {&index, partition, {1.0, 0.8}}, {&table, "", {0.9}}}, {0}).propose(limits), limits);
  }
  while (index.num_sequences() != 0) index.remove_oldest();
  index.check_integrity();
  check(index.bytes() == 0 && index.num_nodes() == 0, "nothing is left");
}

template <typename Call>
void check_refused(Call call) {
  try {
    call();
  } catch (const std::domain_error&) {
    return;
  }
  check(false, "what can't be is refused");
}

}  // namespace

int main() {
  uint32_t seed = 0;
  for (const int max_depth : {1, 3, 64}) {
    for (const uint32_t num_ids : {1u, 2u, 9u, 2000u}) {
      for (const size_t max_bytes : {size_t{0}, size_t{30000}}) run(++seed, max_depth, num_ids, max_bytes);
    }
  }
  check_refused([] { SuffixIndex(0, 0); });
  check_refused([] { SuffixIndex(kMaxDepth + 1, 0); });
  check_refused([] { SuffixIndex(4, 0).append(nullptr, 0); });
  check_refused([] { SuffixIndex(4, 0).remove_oldest(); });
  const SuffixIndex index(4, 0);
  check_refused([&] { Drafts(&index, {{&index, "", {}}, {&index, "", {0.5}}}, {}); });
  check_refused([&] { Drafts(&index, {{&index, "", {0.5}}, {&index, "", {0.0}}}, {}); });
  const int32_t ids[] = {1, 2, -1};
  check_refused([&] { NgramTable(ids, 2, {3}); });
  check_refused([&] { NgramTable(ids, 2, {1}); });
  check_refused([&] { NgramTable(ids, 3, {3}); });
  check(NgramTable(ids, 0, {}).num_contexts() == 0, "no text has no contexts");
  std::puts("suffix: ok");
  return 0;
}
