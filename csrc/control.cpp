#include "control.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace forerun::control {
namespace {

constexpr double kPriorWeight = 5.0;  // observations that a prior rate counts for
constexpr double kDecay = 0.99;       // an observation counts half after about 70 more of its cell
constexpr double kMinRate = 1e-3, kMaxRate = 1.0 - 1e-3;
const double kMaxLogOdds = std::log(4.0);
constexpr double kOddsStep = 0.1;  // step of the stochastic gradient on a request's log-odds

// A size's newest step weighs this much, and more the longer the size was not run.
constexpr double kSizeSmoothing = 1.0 / 8.0, kSizeSmoothingPerStep = 1.0 / 256.0, kMaxSizeSmoothing = 0.5;
// Slower, so that a wrong entry of the curve is blamed on its size and not on the machine.
constexpr double kDriftSmoothing = 1.0 / 64.0;
constexpr double kOverheadSmoothing = 1.0 / 16.0;
// Every so many steps all corrections of sizes move this share back: what was seen long ago may not hold any more.
constexpr int64_t kRelaxSteps = 16;
constexpr double kRelaxShare = 1.0 / 64.0;
// What a plain step takes is the measure of everything, so it is tried when none was run for so many steps, and sooner
// after one that took something else than expected.
constexpr int64_t kPlainSteps = 256, kSurprisedPlainSteps = 16;
constexpr double kPlainSurprise = 0.15;
constexpr double kMaxSurprise = 3.0;  // a step counts as at most so many times slower or faster: a hitch is no trend

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// Throws std::invalid_argument unless it is a tree with one cell per node.
void check(const Nodes& nodes) {
  const size_t n = nodes.token_ids.size();
  require(nodes.parents.size() == n && nodes.cells.size() == n, "the arrays of a proposal differ in length");
  for (size_t i = 0; i < n; i++)
    require(nodes.parents[i] >= -1 && nodes.parents[i] < static_cast<int32_t>(i), "a draft node precedes its parent");
}

}  // namespace

AcceptanceTable::AcceptanceTable(std::vector<double> priors) : priors_(std::move(priors)) { clear(); }

void AcceptanceTable::clear() {
  trials_.assign(priors_.size(), 0.0);
  successes_.assign(priors_.size(), 0.0);
}

size_t AcceptanceTable::checked(int64_t cell) const {
  if (cell < 0 || cell >= static_cast<int64_t>(priors_.size()))
    throw std::out_of_range("there is no acceptance cell " + std::to_string(cell) + " among " +
                            std::to_string(priors_.size()));
  return static_cast<size_t>(cell);
}

double AcceptanceTable::rate(int64_t cell) const {
  const size_t i = checked(cell);
  const double rate = (kPriorWeight * priors_[i] + successes_[i]) / (kPriorWeight + trials_[i]);
  return std::min(std::max(rate, kMinRate), kMaxRate);
}

void AcceptanceTable::record(int64_t cell, bool is_right) {
  const size_t i = checked(cell);
  trials_[i] = kDecay * trials_[i] + 1.0;
  successes_[i] = kDecay * successes_[i] + (is_right ? 1.0 : 0.0);
}

double RequestRates::rate(int64_t cell) const {
  const double rate = table_.rate(cell);
  return rate * factor_ / (1.0 - rate + rate * factor_);
}

// The gradient of the log-likelihood, as for the intercept of a logistic regression.
void RequestRates::record(int64_t cell, bool is_right) {
  const double log_odds = log_odds_ + kOddsStep * ((is_right ? 1.0 : 0.0) - rate(cell));
  log_odds_ = std::min(std::max(log_odds, -kMaxLogOdds), kMaxLogOdds);
  factor_ = std::exp(log_odds_);
  table_.record(cell, is_right);
}

void RequestRates::score(const Nodes& nodes, const std::vector<int32_t>& emitted) {
  check(nodes);
  depths_.assign(nodes.token_ids.size(), -1);  // of the nodes on the emitted path
  for (size_t i = 0; i < depths_.size(); i++) {
    const int32_t parent = nodes.parents[i];
    const int depth = parent < 0 ? 0 : depths_[static_cast<size_t>(parent)];
    if (depth < 0 || static_cast<size_t>(depth) >= emitted.size()) continue;
    const bool is_right = nodes.token_ids[i] == emitted[static_cast<size_t>(depth)];
    record(nodes.cells[i], is_right);
    if (is_right) depths_[i] = depth + 1;
  }
}

StepCosts::StepCosts(std::vector<double> base_s, int64_t context_len, double per_token_s, double per_token_row_s,
                     double overhead_s)
    : base_(std::move(base_s)),
      corrections_(base_.size(), 1.0),
      last_run_(base_.size(), 0),
      context_len_(context_len),
      per_token_s_(per_token_s),
      per_token_row_s_(per_token_row_s),
      overhead_s_(overhead_s),
      plain_steps_(kPlainSteps) {
  require(base_.size() >= 2, "a cost curve needs a pass of one row");
}

double StepCosts::pass_s(int num_rows, int num_seqs, double context_len) const {
  if (num_rows < 0) throw std::out_of_range("there is no cost of " + std::to_string(num_rows) + " rows");
  const size_t size = size_of(num_rows), half = base_.size() / 2;
  const double rows = num_rows, num_more = rows - static_cast<double>(size);
  const double slope = (base_.back() - base_[half]) / static_cast<double>(std::max<size_t>(base_.size() - 1 - half, 1));
  const double base = base_[size] + (num_more > 0.0 ? num_more * slope : 0.0);
  const double extra_per_seq = context_len - static_cast<double>(context_len_);
  const double extra = context_len * num_seqs - static_cast<double>(context_len_);
  const double seconds = base + extra * per_token_s_ + extra_per_seq * per_token_row_s_ * rows;
  return std::max(seconds, 0.5 * base) * corrections_[size] * drift_;
}

double StepCosts::step_s(int num_rows, int num_seqs, double context_len) const {
  return pass_s(num_rows, num_seqs, context_len) + overhead_s_ * num_seqs;
}

void StepCosts::learn(int num_rows, int num_seqs, double context_len, bool is_plain, double forward_s,
                      double overhead_s) {
  double surprise = forward_s / pass_s(num_rows, num_seqs, context_len);
  surprise = std::min(std::max(surprise, 1.0 / kMaxSurprise), kMaxSurprise);
  drift_ *= 1.0 + kDriftSmoothing * (surprise - 1.0);
  ++num_steps_;
  if (num_rows <= max_rows()) {
    const size_t size = size_of(num_rows);
    const double num_stale = static_cast<double>(num_steps_ - 1 - last_run_[size]);
    const double gain = std::min(kSizeSmoothing + kSizeSmoothingPerStep * num_stale, kMaxSizeSmoothing);
    corrections_[size] *= 1.0 + gain * (surprise - 1.0);
    last_run_[size] = num_steps_;
  }
  if (is_plain) {
    plain_steps_ = std::abs(surprise - 1.0) < kPlainSurprise ? kPlainSteps : kSurprisedPlainSteps;
    // What comes on top where several tokens are emitted is no part of a plain step.
    overhead_s_ += kOverheadSmoothing * (std::min(overhead_s, forward_s) / num_seqs - overhead_s_);
  }
  if (num_steps_ % kRelaxSteps == 0)
    for (double& correction : corrections_) correction += kRelaxShare * (1.0 - correction);
}

bool StepCosts::is_due(int num_rows) const {
  return num_rows <= max_rows() && num_steps_ - last_run_[size_of(num_rows)] >= plain_steps_;
}

void Candidates::clear() {
  nodes_.clear();
  num_proposals_ = 0;
}

void Candidates::merge(const Nodes& nodes, bool is_fixed, const RequestRates& rates) {
  check(nodes);
  rates_.clear();
  for (const int32_t cell : nodes.cells) rates_.push_back(rates.rate(cell));
  places_.clear();  // of its nodes among the candidates
  for (size_t i = 0; i < rates_.size(); i++) {
    const int parent = nodes.parents[i] < 0 ? -1 : places_[static_cast<size_t>(nodes.parents[i])];
    const Node node{nodes.token_ids[i], parent, rates_[i], is_fixed, num_proposals_, static_cast<int>(i)};
    const auto known = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& other) {
      return other.parent == node.parent && other.token_id == node.token_id;
    });
    places_.push_back(static_cast<int>(known - nodes_.begin()));
    if (known == nodes_.end()) {
      nodes_.push_back(node);
      continue;
    }
    const bool is_any_fixed = known->is_fixed || is_fixed;
    if (node.rate > known->rate) *known = node;
    known->is_fixed = is_any_fixed;
  }
  num_proposals_++;
}

// Siblings exclude each other, so together they are emitted with at most 1.
void Candidates::find_survivals() {
  const size_t n = nodes_.size();
  totals_.assign(n + 1, 0.0);
  for (const Node& node : nodes_) totals_[static_cast<size_t>(node.parent + 1)] += node.rate;
  survivals_.resize(n);
  for (size_t i = 0; i < n; i++) {
    const Node& node = nodes_[i];
    const double above = node.parent < 0 ? 1.0 : survivals_[static_cast<size_t>(node.parent)];
    survivals_[i] = above * node.rate / std::max(1.0, totals_[static_cast<size_t>(node.parent + 1)]);
  }
}

void Candidates::rank(int max_nodes) {
  find_survivals();
  order_.resize(nodes_.size());
  for (size_t i = 0; i < order_.size(); i++) order_[i] = static_cast<int>(i);
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    const size_t i = static_cast<size_t>(a), j = static_cast<size_t>(b);
    if (nodes_[i].is_fixed != nodes_[j].is_fixed) return nodes_[i].is_fixed;
    return survivals_[i] != survivals_[j] ? survivals_[i] > survivals_[j] : a < b;
  });
  order_.resize(std::min(order_.size(), static_cast<size_t>(std::max(max_nodes, 0))));
  num_fixed_ = static_cast<size_t>(std::count_if(
      order_.begin(), order_.end(), [&](int node) { return nodes_[static_cast<size_t>(node)].is_fixed; }));
}

Choice Candidates::take(size_t count) {
  Choice choice;
  choice.num_fixed =
      static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.is_fixed; }));
  double tokens = 0.0;
  for (size_t i = 0; i < count; i++) tokens += survival(i);
  choice.expected_tokens = 1.0 + tokens;
  choice.candidates.assign(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count));
  std::sort(choice.candidates.begin(), choice.candidates.end());
  places_.assign(nodes_.size(), -1);
  for (size_t i = 0; i < count; i++) {
    const size_t node = static_cast<size_t>(choice.candidates[i]);
    const int parent = nodes_[node].parent;
    choice.parents.push_back(parent < 0 ? -1 : places_[static_cast<size_t>(parent)]);
    places_[node] = static_cast<int>(i);
  }
  return choice;
}

namespace {

struct Place {
  double survival;
  size_t request;
};

// How many of the ranked places are taken; all counts are tried, since a pass gets dearer in steps, not evenly.
size_t best_count(const std::vector<Place>& places, int num_rows, const Terms& terms) {
  const auto seconds = [&](size_t count) {
    return terms.costs->step_s(num_rows + static_cast<int>(count), terms.num_seqs, terms.context_len);
  };
  const size_t room = static_cast<size_t>(std::max(0, terms.max_rows - num_rows));
  double tokens = 0.0, best_value = -terms.price * seconds(0);
  size_t best = 0;
  for (size_t count = 1; count <= std::min(places.size(), room); count++) {
    tokens += places[count - 1].survival;
    const double value = tokens - terms.price * seconds(count);
    if (value > best_value) {
      best_value = value;
      best = count;
    }
  }
  return best;
}

}  // namespace

std::vector<Choice> choose(const std::vector<Candidates*>& requests, const std::vector<int>& max_nodes,
                           const Terms& terms) {
  if (requests.size() != max_nodes.size()) throw std::invalid_argument("one limit per request");
  std::vector<size_t> counts;
  std::vector<Place> places;
  int num_rows = terms.num_rows;
  for (size_t i = 0; i < requests.size(); i++) {
    Candidates& request = *requests[i];
    request.rank(max_nodes[i]);
    counts.push_back(request.num_fixed_);
    num_rows += static_cast<int>(request.num_fixed_);
    for (size_t place = request.num_fixed_; place < request.order_.size(); place++)
      places.push_back({request.survival(place), i});
  }
  if (terms.costs && terms.takes_paying) {
    // Stable: those of one request stay in their order.
    std::stable_sort(places.begin(), places.end(),
                     [](const Place& a, const Place& b) { return a.survival > b.survival; });
    places.resize(best_count(places, num_rows, terms));
    for (const Place& place : places) counts[place.request]++;
  }
  std::vector<Choice> choices;
  for (size_t i = 0; i < requests.size(); i++) choices.push_back(requests[i]->take(counts[i]));
  return choices;
}

}  // namespace forerun::control
