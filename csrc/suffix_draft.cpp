#include "suffix_draft.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace forerun::suffix {
namespace {

// Contexts speak until less than this is left for the next shorter one, and what would get less from a context is left
// out: no such token is worth a row.
constexpr double kMinShare = 1.0 / 64.0;

double discount_of(const std::vector<double>& discounts, int match_len) {
  return discounts[std::min<size_t>(match_len, discounts.size()) - 1];
}

}  // namespace

Drafts::Drafts(const SuffixIndex* text, std::vector<Source> sources, std::vector<int32_t> end_ids)
    : text_(text),
      sources_(std::move(sources)),
      end_ids_(std::move(end_ids)),
      matches_(sources_.size()),
      is_located_(sources_.size()) {
  for (const Source& source : sources_) {
    max_depth_ = std::max(max_depth_, static_cast<size_t>(source.contexts->max_depth()));
    if (source.discounts.empty()) throw std::domain_error("there is no discount");
    for (const double discount : source.discounts)
      if (!(discount > 0.0 && discount <= 1.0)) throw std::domain_error("a discount must be above 0 and at most 1");
  }
}

const std::vector<DraftNode>& Drafts::propose(const DraftLimits& limits) {
  nodes_.clear();
  path_probs_.clear();
  open_.clear();
  num_opened_ = 0;
  const auto [text, length] = text_->newest_text();
  tail_.assign(text + length - std::min(length, max_depth_), text + length);
  int32_t node = -1;
  while (nodes_.size() < limits.max_nodes) {
    const bool is_end = node >= 0 && std::count(end_ids_.begin(), end_ids_.end(), nodes_[node].token_id) > 0;
    if (!is_end) {
      load_context(node);
      predict();
      open_children(node, limits);
    }
    if (open_.empty()) break;
    node = close_best();
  }
  return nodes_;
}

void Drafts::load_context(int32_t node) {
  context_.clear();
  for (; node >= 0; node = nodes_[node].parent) context_.push_back(nodes_[node].token_id);
  context_.insert(context_.end(), tail_.rbegin(), tail_.rend());
  std::reverse(context_.begin(), context_.end());
}

// The source with the longest context that has not spoken, -1 without one. A source is looked into only once its deepest
// context would be the longest: that takes cache misses, and longer contexts of others often leave nothing to say.
int Drafts::find_longest() {
  const int32_t* end = context_.data() + context_.size();
  int longest = -1, match_len = 0;
  for (size_t i = 0; i < sources_.size(); i++) {
    const Source& source = sources_[i];
    if (!is_located_[i] && source.contexts->max_depth() > match_len) {
      source.contexts->locate(source.partition, end, context_.size(), &matches_[i]);
      is_located_[i] = true;
    }
    if (!is_located_[i] || matches_[i].empty() || matches_[i].back().match_len <= match_len) continue;
    longest = static_cast<int>(i);
    match_len = matches_[i].back().match_len;
  }
  return longest;
}

void Drafts::predict() {
  std::fill(is_located_.begin(), is_located_.end(), false);
  candidates_.clear();
  match_len_ = 0;
  double rest = 1.0;
  while (rest >= kMinShare) {
    const int longest = find_longest();
    if (longest < 0) break;
    const Source& source = sources_[static_cast<size_t>(longest)];
    std::vector<Match>& matches = matches_[static_cast<size_t>(longest)];
    const Match match = matches.back();
    matches.pop_back();
    const double discount = discount_of(source.discounts, match.match_len);
    if (discount == 1.0) continue;
    if (match_len_ == 0) {
      match_len_ = match.match_len;
      source_ = longest;
    }
    rest *= add_level(*source.contexts, match.node, discount, rest);
  }
}

double Drafts::add_level(const Contexts& contexts, uint32_t node, double discount, double rest) {
  const double count = contexts.num_occurrences(node);
  contexts.followers(node, static_cast<uint32_t>(std::ceil(kMinShare * count / rest)), &followers_);
  for (const Follower& entry : followers_) {
    const double prob = rest * (entry.count - discount) / count;
    const auto known = std::find_if(candidates_.begin(), candidates_.end(),
                                    [&](const Candidate& other) { return other.token_id == entry.token_id; });
    if (known == candidates_.end()) {
      candidates_.push_back({entry.token_id, prob});
    } else {
      known->prob += prob;
    }
  }
  return discount * contexts.num_continuations(node) / count;
}

void Drafts::open_children(int32_t parent, const DraftLimits& limits) {
  if (limits.is_chain && !candidates_.empty()) {
    const auto best = std::max_element(candidates_.begin(), candidates_.end(),
                                       [](const Candidate& a, const Candidate& b) { return a.prob < b.prob; });
    candidates_ = {*best};
  }
  const double above = parent < 0 ? 1.0 : path_probs_[parent];
  for (const Candidate& candidate : candidates_) {
    const double path_prob = above * candidate.prob;
    if (path_prob < limits.min_prob) continue;
    open_.push_back({path_prob, num_opened_++, {candidate.token_id, parent, candidate.prob, match_len_, source_}});
    std::push_heap(open_.begin(), open_.end());
  }
}

int32_t Drafts::close_best() {
  std::pop_heap(open_.begin(), open_.end());
  nodes_.push_back(open_.back().node);
  path_probs_.push_back(open_.back().path_prob);
  open_.pop_back();
  return static_cast<int32_t>(nodes_.size()) - 1;
}

}  // namespace forerun::suffix
