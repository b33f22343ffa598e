#include "ngram_table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "prefetch.h"

namespace forerun::suffix {
namespace {

// Of a context, from that of the context without its first token.
uint64_t extend(uint64_t hash, int32_t token_id) {
  uint64_t x = hash + static_cast<uint32_t>(token_id) + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint32_t check_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

template <class T>
uint16_t narrowed(T count) {
  return static_cast<uint16_t>(std::min<T>(count, std::numeric_limits<uint16_t>::max()));
}

}  // namespace

NgramTable::NgramTable(const int32_t* token_ids, size_t num_tokens, const std::vector<size_t>& lengths) {
  std::vector<Occurrence> occurrences;
  occurrences.reserve(num_tokens * kDepth);
  size_t begin = 0;
  for (const size_t length : lengths) {
    if (length > num_tokens - begin) throw std::domain_error("the lengths of the texts exceed their tokens");
    const int32_t* text = token_ids + begin;
    for (size_t i = 0; i < length; i++) {
      if (text[i] < 0) throw std::domain_error("a token id is below 0");
      uint64_t hash = 0;
      for (size_t n = 1; n <= std::min<size_t>(i, kDepth); n++) {
        hash = extend(hash, text[i - n]);
        occurrences.push_back({hash, text[i]});
      }
    }
    begin += length;
  }
  if (begin != num_tokens) throw std::domain_error("the lengths of the texts fall short of their tokens");
  std::sort(occurrences.begin(), occurrences.end());
  const auto is_other = [](const Occurrence& a, const Occurrence& b) { return a.hash != b.hash; };
  for (auto at = occurrences.begin(); at != occurrences.end(); num_contexts_++)
    at = std::find_if(at, occurrences.end(), [&](const Occurrence& o) { return is_other(o, *at); });
  size_t num_records = 1;
  while (num_records * 2 < num_contexts_ * 3) num_records *= 2;
  records_ = Array<Record>(num_records);
  mask_ = num_records - 1;
  const Occurrence* const end = occurrences.data() + occurrences.size();
  for (const Occurrence* group = occurrences.data(); group != end;) {
    const Occurrence* next = std::find_if(group, end, [&](const Occurrence& o) { return is_other(o, *group); });
    insert(group, next);
    group = next;
  }
}

// Occurrences of one context, by token.
void NgramTable::insert(const Occurrence* begin, const Occurrence* end) {
  size_t at = begin->hash & mask_;
  while (records_[at].num_occurrences) at = (at + 1) & mask_;
  Record& record = records_[at];
  record.check = check_of(begin->hash);
  record.num_occurrences = static_cast<uint32_t>(end - begin);
  size_t num_different = 0;
  while (begin != end) {
    const int32_t token_id = begin->token_id;
    const Occurrence* next = std::find_if(begin, end, [&](const Occurrence& o) { return o.token_id != token_id; });
    uint16_t count = narrowed(next - begin);
    int place = kKept;
    while (place > 0 && count > record.counts[place - 1]) place--;  // of equals the one that came first stays
    for (int i = kKept - 1; i > place; i--) {
      record.counts[i] = record.counts[i - 1];
      record.token_ids[i] = record.token_ids[i - 1];
    }
    if (place < kKept) {
      record.counts[place] = count;
      record.token_ids[place] = token_id;
    }
    num_different++;
    begin = next;
  }
  record.num_continuations = narrowed(num_different);
}

void NgramTable::locate(const std::string&, const int32_t* end, size_t num_tokens, std::vector<Match>* out) const {
  out->clear();
  if (num_contexts_ == 0) return;
  uint64_t hashes[kDepth];
  const int depth = static_cast<int>(std::min<size_t>(num_tokens, kDepth));
  for (int n = 0; n < depth; n++) {
    hashes[n] = extend(n ? hashes[n - 1] : 0, end[-1 - n]);
    fetch_to_l1(reinterpret_cast<const uint8_t*>(&records_[hashes[n] & mask_]));
  }
  for (int n = 0; n < depth; n++) {
    size_t at = hashes[n] & mask_;
    while (records_[at].num_occurrences && records_[at].check != check_of(hashes[n])) at = (at + 1) & mask_;
    const uint32_t count = records_[at].num_occurrences;
    if (count == 0) return;  // nor did a longer one occur
    if (!out->empty() && num_occurrences(out->back().node) == count) out->pop_back();
    out->push_back({n + 1, static_cast<uint32_t>(at)});
  }
}

void NgramTable::followers(uint32_t node, uint32_t min_count, std::vector<Follower>* out) const {
  out->clear();
  const Record& record = records_[node];
  for (int i = 0; i < kKept && record.counts[i] >= std::max(min_count, 1u); i++)
    out->push_back({record.token_ids[i], record.counts[i]});
}

}  // namespace forerun::suffix
