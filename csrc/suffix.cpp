#include "suffix.h"

#include <algorithm>
#include <stdexcept>

namespace forerun::suffix {
namespace {

constexpr size_t kMallocBytes = 16;  // of bookkeeping per allocation
// A map's node and a deque's share, about.
constexpr size_t kPartitionBytes = 128;
constexpr size_t kSequenceBytes = 64;

uint32_t hash_of(int32_t token_id) { return hash_pair(0, static_cast<uint32_t>(token_id)); }

}  // namespace

Continuations::Continuations(Continuation first, Continuation second) {
  entries_.reserve(2);
  if (first.count < second.count) std::swap(first, second);
  append(first);
  append(second);
}

uint32_t Continuations::find(int32_t token_id) const {
  if (has_table()) {
    return table_.find(hash_of(token_id), [&](uint32_t id) { return entries_[id].token_id == token_id; });
  }
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].token_id == token_id) return i;
  }
  return IdTable::kNone;
}

void Continuations::append(const Continuation& entry) {
  entries_.push_back(entry);
  const uint32_t index = static_cast<uint32_t>(entries_.size() - 1);
  if (has_table()) {
    table_.insert(hash_of(entry.token_id), index);
  } else if (entries_.size() > kMaxScanned) {
    for (uint32_t i = 0; i <= index; ++i) table_.insert(hash_of(entries_[i].token_id), i);
  }
}

void Continuations::swap(uint32_t left, uint32_t right) {
  if (left == right) return;
  if (has_table()) {
    table_.swap(hash_of(entries_[left].token_id), left, hash_of(entries_[right].token_id), right);
  }
  std::swap(entries_[left], entries_[right]);
}

void Continuations::add(int32_t token_id, Place place) {
  const uint32_t index = find(token_id);
  if (index == IdTable::kNone) {
    append({token_id, 1, place});
    return;
  }
  // Changes places with the first of those that are as frequent, so that the order holds after counting.
  const uint32_t count = entries_[index].count;
  const auto first = std::partition_point(entries_.begin(), entries_.begin() + index,
                                          [count](const Continuation& entry) { return entry.count > count; });
  const uint32_t to = static_cast<uint32_t>(first - entries_.begin());
  swap(index, to);
  ++entries_[to].count;
  entries_[to].last = place;
}

void Continuations::remove(int32_t token_id) {
  const uint32_t index = find(token_id);
  const uint32_t count = entries_[index].count;
  const auto beyond = std::partition_point(entries_.begin() + index, entries_.end(),
                                           [count](const Continuation& entry) { return entry.count == count; });
  const uint32_t to = static_cast<uint32_t>(beyond - entries_.begin() - 1);
  swap(index, to);
  if (--entries_[to].count > 0) return;
  if (has_table()) table_.erase(hash_of(token_id), to);
  entries_.pop_back();
}

size_t Continuations::bytes() const {
  return sizeof(*this) + kMallocBytes + entries_.capacity() * sizeof(Continuation) + kMallocBytes + table_.bytes();
}

SuffixIndex::SuffixIndex(int max_depth, size_t max_bytes) : max_depth_(max_depth), max_bytes_(max_bytes) {
  if (max_depth < 1 || max_depth > kMaxDepth) {
    throw std::domain_error("max_depth is " + std::to_string(max_depth) + ", but must be between 1 and " +
                            std::to_string(kMaxDepth));
  }
}

void SuffixIndex::begin(const std::string& partition) {
  auto found = partitions_.find(partition);
  if (found == partitions_.end()) {
    found = partitions_.emplace(partition, Partition{create(kNone, 0, 0, 0, {}), 0}).first;
    partition_bytes_ += bytes_of(partition);
  }
  ++found->second.num_sequences;
  sequences_.push_back({found, {}});
}

void SuffixIndex::append(const int32_t* token_ids, size_t num_tokens) {
  if (sequences_.empty()) throw std::domain_error("there is no sequence to append to");
  if (std::any_of(token_ids, token_ids + num_tokens, [](int32_t id) { return id < 0; })) {
    throw std::domain_error("a token id is below 0");
  }
  if (sequences_.back().token_ids.size() + num_tokens >= Place::kMaxTokens) {
    throw std::domain_error("a sequence is too long to be indexed");
  }
  std::vector<int32_t>& text = sequences_.back().token_ids;
  const uint64_t sequence = first_sequence_ + sequences_.size() - 1;
  const uint32_t root = sequences_.back().partition->second.root;
  for (size_t i = 0; i < num_tokens; ++i) {
    text_bytes_ -= text.capacity() * sizeof(int32_t);
    text.push_back(token_ids[i]);
    text_bytes_ += text.capacity() * sizeof(int32_t);
    insert(root, Place(sequence, text.size() - 1));
    hold_bound();
    if (sequences_.empty()) return;
  }
}

void SuffixIndex::hold_bound() {
  while (max_bytes_ != 0 && bytes() > max_bytes_ && !sequences_.empty()) remove_oldest();
}

void SuffixIndex::remove_oldest() {
  if (sequences_.empty()) throw std::domain_error("there is no sequence to remove");
  Sequence& oldest = sequences_.front();
  Partition& partition = oldest.partition->second;
  for (size_t i = 0; i < oldest.token_ids.size(); ++i) remove(partition.root, Place(first_sequence_, i));
  text_bytes_ -= oldest.token_ids.capacity() * sizeof(int32_t);
  if (--partition.num_sequences == 0) {
    destroy(partition.root);
    partition_bytes_ -= bytes_of(oldest.partition->first);
    partitions_.erase(oldest.partition);
  }
  sequences_.pop_front();
  ++first_sequence_;
}

size_t SuffixIndex::bytes_of(const std::string& partition) { return kPartitionBytes + partition.size(); }

void SuffixIndex::clear() { *this = SuffixIndex(max_depth_, max_bytes_); }

size_t SuffixIndex::bytes() const {
  constexpr size_t kNodeBytes =
      sizeof(Node) + sizeof(uint32_t) + static_cast<size_t>(IdTable::kSlotBytes * IdTable::kMaxSlotsPerId);
  return num_nodes_ * kNodeBytes + continuation_bytes_ + text_bytes_ + partition_bytes_ +
         sequences_.size() * kSequenceBytes;
}

const int32_t* SuffixIndex::text(Place place) const {
  return sequences_[place.sequence() - first_sequence_].token_ids.data() + place.offset();
}

std::pair<const int32_t*, size_t> SuffixIndex::newest_text() const {
  if (sequences_.empty()) return {nullptr, 0};
  const std::vector<int32_t>& text = sequences_.back().token_ids;
  return {text.data(), text.size()};
}

uint32_t SuffixIndex::child_of(uint32_t node, int32_t token_id) const {
  return children_.find(hash_pair(node, static_cast<uint32_t>(token_id)), [&](uint32_t id) {
    return at(id).parent == node && at(id).token_id == token_id;
  });
}

uint32_t SuffixIndex::create(uint32_t parent, int32_t token_id, uint32_t depth, uint32_t count, Place newest) {
  if (free_.empty()) {
    const uint32_t first = static_cast<uint32_t>(chunks_.size() * kChunkNodes);
    chunks_.push_back(std::make_unique<Node[]>(kChunkNodes));
    free_.reserve(chunks_.size() * kChunkNodes);
    for (uint32_t i = kChunkNodes; i-- > 0;) free_.push_back(first + i);
  }
  const uint32_t id = free_.back();
  free_.pop_back();
  Node& node = at(id);
  node.depth = depth;
  node.count = count;
  node.newest = newest;
  ++num_nodes_;
  if (parent != kNone) hang(id, parent, token_id);
  return id;
}

void SuffixIndex::destroy(uint32_t id) {
  Node& node = at(id);
  if (node.parent != kNone) unhang(id);
  if (node.continuations) continuation_bytes_ -= node.continuations->bytes();
  node = Node();
  free_.push_back(id);
  --num_nodes_;
}

void SuffixIndex::hang(uint32_t node, uint32_t parent, int32_t token_id) {
  at(node).parent = parent;
  at(node).token_id = token_id;
  children_.insert(hash_pair(parent, static_cast<uint32_t>(token_id)), node);
}

void SuffixIndex::unhang(uint32_t node) {
  children_.erase(hash_pair(at(node).parent, static_cast<uint32_t>(at(node).token_id)), node);
}

uint32_t SuffixIndex::common_depth(uint32_t child, const int32_t* end, uint32_t limit) const {
  const Node& node = at(child);
  const int32_t* edge = text(node.newest);
  uint32_t depth = at(node.parent).depth + 1;
  while (depth < limit && end[-1 - static_cast<ptrdiff_t>(depth)] == edge[-1 - static_cast<ptrdiff_t>(depth)]) ++depth;
  return depth;
}

uint32_t SuffixIndex::split(uint32_t child, uint32_t depth) {
  const Node& below = at(child);
  const uint32_t parent = below.parent;
  const int32_t token_id = below.token_id;
  unhang(child);
  const uint32_t middle = create(parent, token_id, depth, below.count, below.newest);
  if (below.continuations) {
    at(middle).continuations = std::make_unique<Continuations>(*below.continuations);
    continuation_bytes_ += at(middle).continuations->bytes();
  }
  hang(child, middle, text(below.newest)[-1 - static_cast<ptrdiff_t>(depth)]);
  return middle;
}

void SuffixIndex::insert(uint32_t root, Place place) {
  const int32_t* end = text(place);
  const uint32_t limit = static_cast<uint32_t>(std::min<uint64_t>(place.offset(), max_depth_));
  uint32_t node = root;
  ++at(root).count;
  at(root).newest = place;
  for (uint32_t depth = 0; depth < limit;) {
    const int32_t token_id = end[-1 - static_cast<ptrdiff_t>(depth)];
    const uint32_t child = child_of(node, token_id);
    if (child == kNone) {
      create(node, token_id, limit, 1, place);
      return;
    }
    const uint32_t child_depth = at(child).depth;
    depth = common_depth(child, end, std::min(child_depth, limit));
    node = depth == child_depth ? child : split(child, depth);
    visit(node, place, *end);
  }
}

void SuffixIndex::visit(uint32_t id, Place place, int32_t token_id) {
  Node& node = at(id);
  if (node.continuations) {
    continuation_bytes_ -= node.continuations->bytes();
    node.continuations->add(token_id, place);
    continuation_bytes_ += node.continuations->bytes();
  } else if (const int32_t only = *text(node.newest); only != token_id) {
    node.continuations = std::make_unique<Continuations>(Continuation{only, node.count, node.newest},
                                                         Continuation{token_id, 1, place});
    continuation_bytes_ += node.continuations->bytes();
  }
  ++node.count;
  node.newest = place;
}

void SuffixIndex::remove(uint32_t root, Place place) {
  const int32_t* end = text(place);
  const uint32_t limit = static_cast<uint32_t>(std::min<uint64_t>(place.offset(), max_depth_));
  uint32_t node = root;
  --at(root).count;
  while (at(node).depth < limit) {
    node = child_of(node, end[-1 - static_cast<ptrdiff_t>(at(node).depth)]);
    leave(node, *end);
  }
  if (node == root) return;
  if (at(node).count == 0) {
    const uint32_t parent = at(node).parent;
    destroy(node);
    node = parent;
  }
  if (node != root) merge_if_redundant(node);
}

void SuffixIndex::leave(uint32_t id, int32_t token_id) {
  Node& node = at(id);
  --node.count;
  if (!node.continuations) return;
  continuation_bytes_ -= node.continuations->bytes();
  node.continuations->remove(token_id);
  if (node.continuations->all().size() == 1) {
    node.continuations.reset();
  } else {
    continuation_bytes_ += node.continuations->bytes();
  }
}

void SuffixIndex::merge_if_redundant(uint32_t id) {
  const Node& node = at(id);
  if (node.newest.offset() <= node.depth) return;  // its newest context ends here
  const uint32_t child = child_of(id, text(node.newest)[-1 - static_cast<ptrdiff_t>(node.depth)]);
  if (child == kNone || at(child).count != node.count) return;
  const uint32_t parent = node.parent;
  const int32_t token_id = node.token_id;
  unhang(child);
  destroy(id);
  hang(child, parent, token_id);
}

void SuffixIndex::locate(const std::string& partition, const int32_t* end, size_t num_tokens,
                         std::vector<Match>* out) const {
  out->clear();
  const auto found = partitions_.find(partition);
  if (found == partitions_.end()) return;
  uint32_t node = found->second.root;
  const uint32_t limit = static_cast<uint32_t>(std::min<size_t>(num_tokens, max_depth_));
  for (uint32_t depth = 0; depth < limit;) {
    node = child_of(node, end[-1 - static_cast<ptrdiff_t>(depth)]);
    if (node == kNone) return;
    const uint32_t child_depth = at(node).depth;
    depth = common_depth(node, end, std::min(child_depth, limit));
    out->push_back({static_cast<int>(depth), node});
    if (depth < child_depth) return;
  }
}

size_t SuffixIndex::num_continuations(uint32_t id) const {
  const Node& node = at(id);
  return node.continuations ? node.continuations->all().size() : 1;
}

void SuffixIndex::continuations(uint32_t id, uint32_t min_count, std::vector<Continuation>* out) const {
  out->clear();
  const Node& node = at(id);
  if (!node.continuations) {
    out->push_back({*text(node.newest), node.count, node.newest});
    return;
  }
  for (const Continuation& entry : node.continuations->all()) {
    if (entry.count < min_count) break;
    out->push_back(entry);
  }
  std::sort(out->begin(), out->end(), [](const Continuation& a, const Continuation& b) {
    return a.count != b.count ? a.count > b.count : b.last < a.last;
  });
}

void SuffixIndex::followers(uint32_t id, uint32_t min_count, std::vector<Follower>* out) const {
  continuations(id, min_count, &scratch_);
  out->clear();
  for (const Continuation& entry : scratch_) out->push_back({entry.token_id, entry.count});
}

}  // namespace forerun::suffix
