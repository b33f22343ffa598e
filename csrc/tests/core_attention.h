// Attention kernels of test_core.cpp: appending, one split, combining splits.
#pragma once
#include <algorithm>

#include "core_support.h"

namespace forerun {
namespace test {

struct AttentionShape {
  int head_dim;
  int group_heads;
  bool is_f32;
  int num_slots;
  int window = 0;

  int d_pad() const { return round_up(head_dim, 16); }
};

// The cache of one layer with two KV heads, and one sequence in it whose pages lie in no order. What was appended is
// kept beside it as plain floats [slot][kv head][head_dim], rounded as the cache rounds.
class Cache {
 public:
  Cache(Rng& rng, const AttentionShape& shape, const KernelTable& table) : shape_(shape), table_(table) {
    const int num_pages = (shape.num_slots + kPageTokens - 1) / kPageTokens;
    kv_ = {nullptr, shape.is_f32, 2, shape.head_dim, shape.d_pad()};
    data_ = std::vector<uint8_t>(static_cast<size_t>(num_pages + 1) * 2 * kv_.page_elems() * (shape.is_f32 ? 4 : 2));
    kv_.data = data_.data();
    for (int page = 0; page < num_pages; page++) page_table_.push_back(page + 1);
    for (int i = num_pages - 1; i > 0; i--)
      std::swap(page_table_[static_cast<size_t>(i)], page_table_[static_cast<size_t>(rng.between(0, i))]);
    keys_.assign(static_cast<size_t>(shape.num_slots) * 2 * static_cast<size_t>(shape.head_dim), 0.0f);
    values_ = keys_;
  }

  void append(int slot, int kv_head, const float* key, const float* value) {
    const int page = page_table_[static_cast<size_t>(slot / kPageTokens)], lane = slot % kPageTokens;
    const int half = shape_.head_dim / 2;
    table_.append_keys(kv_, page, lane, 1, kv_head, key, 0);
    table_.append_values(kv_, page, lane, 1, kv_head, 0, half, value, 0);
    table_.append_values(kv_, page, lane, 1, kv_head, half, shape_.head_dim, value + half, 0);
    for (int d = 0; d < shape_.head_dim; d++) {
      keys_[at(slot, kv_head) + static_cast<size_t>(d)] = rounded(key[d]);
      values_[at(slot, kv_head) + static_cast<size_t>(d)] = rounded(value[d]);
    }
  }
  // Slots [begin, begin + num) of one page at once, as a prompt or a draft leaves them; rows lie ld floats apart.
  void append_run(int begin, int num, int kv_head, const float* keys, const float* values, size_t ld) {
    const int page = page_table_[static_cast<size_t>(begin / kPageTokens)], lane = begin % kPageTokens;
    table_.append_keys(kv_, page, lane, num, kv_head, keys, ld);
    table_.append_values(kv_, page, lane, num, kv_head, 0, shape_.head_dim, values, ld);
  }
  // What earlier requests may have left: nothing that a row does not see may reach it.
  void fill_with_garbage() {
    const float nan = std::numeric_limits<float>::quiet_NaN(), large = 3e38f;
    const std::vector<float> nans(static_cast<size_t>(shape_.head_dim), nan), larges(nans.size(), large);
    for (int slot = 0; slot < shape_.num_slots; slot++)
      for (int head = 0; head < 2; head++) append(slot, head, nans.data(), (slot % 3 ? nans : larges).data());
  }
  void fill(Rng& rng) {
    for (int slot = 0; slot < shape_.num_slots; slot++)
      for (int head = 0; head < 2; head++) {
        const size_t n = static_cast<size_t>(shape_.head_dim);
        append(slot, head, random_floats(rng, n).data(), random_floats(rng, n).data());
      }
  }

  const float* key(int slot, int kv_head) const { return keys_.data() + at(slot, kv_head); }
  const float* value(int slot, int kv_head) const { return values_.data() + at(slot, kv_head); }
  const std::vector<uint8_t>& data() const { return data_; }
  const KvLayer& kv() const { return kv_; }
  const int32_t* page_table() const { return page_table_.data(); }

 private:
  size_t at(int slot, int kv_head) const {
    return static_cast<size_t>(slot * 2 + kv_head) * static_cast<size_t>(shape_.head_dim);
  }
  float rounded(float x) const { return shape_.is_f32 ? x : half_to_float(float_to_half(x)); }

  AttentionShape shape_;
  const KernelTable& table_;
  KvLayer kv_;
  std::vector<uint8_t> data_;
  std::vector<int32_t> page_table_;
  std::vector<float> keys_, values_;
};

// Runs of every place and length within a page give the bytes of one token after the other, and touch no other.
inline void check_runs(Rng& rng, const AttentionShape& shape) {
  const size_t d = static_cast<size_t>(shape.head_dim), ld = d + 3;
  for (const KernelTable* table : all_tables()) {
    Rng pages(1);
    Cache one_by_one(pages, shape, reference());
    pages = Rng(1);
    Cache runs(pages, shape, *table);
    one_by_one.fill_with_garbage();
    runs.fill_with_garbage();
    for (int round = 0; round < 40; round++) {
      const int begin = rng.between(0, shape.num_slots - 1), left = shape.num_slots - begin;
      const int num = rng.between(1, std::min(left, kPageTokens - begin % kPageTokens)), head = rng.between(0, 1);
      const std::vector<float> keys = random_floats(rng, static_cast<size_t>(num) * ld);
      const std::vector<float> values = random_floats(rng, static_cast<size_t>(num) * ld);
      runs.append_run(begin, num, head, keys.data(), values.data(), ld);
      for (int i = 0; i < num; i++) {
        const size_t at = static_cast<size_t>(i) * ld;
        one_by_one.append(begin + i, head, keys.data() + at, values.data() + at);
      }
      CHECK(same_bits(one_by_one.data(), runs.data()), "%s: %d tokens from slot %d, head size %d, f32 %d", table->name,
            num, begin, shape.head_dim, shape.is_f32);
    }
  }
}

// The slots of a row's path, in logical order.
inline std::vector<int> path_slots(const RowView& row) {
  std::vector<int> slots;
  for (int slot = 0; slot < row.visible_len; slot++) slots.push_back(slot);
  for (int bit = 0; bit < 64; bit++)
    if (row.tail_mask >> bit & 1) slots.push_back(row.tail_base + bit);
  return slots;
}

// Those it sees.
inline std::vector<int> seen_slots(const RowView& row, int window) {
  std::vector<int> slots = path_slots(row);
  const long hidden = static_cast<long>(slots.size()) - window;
  if (window > 0 && hidden > 0) slots.erase(slots.begin(), slots.begin() + hidden);
  return slots;
}

struct Attention {
  std::vector<float> max, sum, acc;  // after the last split, per pair
  std::vector<float> out;            // [pairs][head_dim]
};

// All splits of some rows, folded in order as the program folds them.
inline Attention attend(const KernelTable& table, const AttentionShape& shape, const KvLayer& kv, int kv_head,
                        const std::vector<float>& q, const std::vector<RowView>& rows) {
  const int pairs = static_cast<int>(rows.size()) * shape.group_heads, d_pad = shape.d_pad();
  CHECK(pairs <= kMaxPairs, "%d pairs", pairs);
  const Aligned<float> scratch(attend_scratch_floats(shape.head_dim));
  const auto* keys = static_cast<const uint8_t*>(kv.data);
  const AttendArgs args{
      &kv,     q.data(),     q.size() / rows.size(), rows.data(), static_cast<int>(rows.size()), shape.group_heads,
      kv_head, shape.window, scratch.get(),          {{keys, keys, keys}, 3, 64}};
  const size_t n = static_cast<size_t>(pairs), width = static_cast<size_t>(d_pad);
  Attention run{std::vector<float>(n), std::vector<float>(n), std::vector<float>(n * width), {}};
  int longest = 0;
  for (const RowView& row : rows) longest = std::max(longest, row.total_len());
  for (int split = 0; split * kSplit < longest; split++) {
    Attention part{
        std::vector<float>(n, -1e9f), std::vector<float>(n, -1e9f), std::vector<float>(n * width, -1e9f), {}};
    table.attend_split(args, split, {part.max.data(), part.sum.data(), part.acc.data()});
    for (size_t p = 0; p < n; p++) {
      const float* acc = part.acc.data() + p * width;
      const RowView& row = rows[p / static_cast<size_t>(shape.group_heads)];
      const int first = first_split(row, shape.window);
      if (row.total_len() <= split * kSplit || split < first) {
        CHECK(part.max[p] == -1e9f && part.sum[p] == -1e9f && acc[0] == -1e9f && acc[d_pad - 1] == -1e9f,
              "%s writes to a row that has nothing in split %d", table.name, split);
      } else if (split == first) {
        run.max[p] = part.max[p];
        run.sum[p] = part.sum[p];
        std::copy(acc, acc + width, run.acc.begin() + static_cast<long>(p * width));
      } else {
        table.attend_combine(part.max[p], part.sum[p], acc, d_pad, &run.max[p], &run.sum[p],
                             run.acc.data() + p * width);
      }
    }
  }
  for (size_t p = 0; p < n; p++) {
    run.out.resize(run.out.size() + static_cast<size_t>(shape.head_dim));
    table.divide(run.acc.data() + p * width, run.sum[p], shape.head_dim,
                 run.out.data() + p * static_cast<size_t>(shape.head_dim));
  }
  return run;
}

// softmax(q k) v in double over the slots a row sees.
inline void check_softmax(const AttentionShape& shape, const Cache& cache, int kv_head, const float* q,
                          const RowView& row, const float* got, const char* isa) {
  const std::vector<int> slots = seen_slots(row, shape.window);
  std::vector<double> weights;
  double top = -1e300, total = 0;
  for (const int slot : slots) {
    double score = 0;
    for (int d = 0; d < shape.head_dim; d++) score += static_cast<double>(q[d]) * cache.key(slot, kv_head)[d];
    weights.push_back(score);
    top = std::max(top, score);
  }
  for (double& w : weights) total += w = std::exp(w - top);
  for (int d = 0; d < shape.head_dim; d++) {
    double want = 0;
    for (size_t i = 0; i < slots.size(); i++) want += weights[i] / total * cache.value(slots[i], kv_head)[d];
    // Scores of order ten in float32 are off by 1e-5 at worst, and so are the weights, relatively.
    CHECK(std::fabs(got[d] - want) < 3e-5, "%s: lane %d is %g, not %g", isa, d, static_cast<double>(got[d]), want);
  }
}

// Rows of one sequence: prompt rows, chain rows and tree rows around the borders of pages and splits. The tree rows of
// a draft share their prefix and tail; half of the time they don't.
inline std::vector<RowView> random_views(Rng& rng, const AttentionShape& shape, const int32_t* page_table) {
  std::vector<RowView> rows;
  const int num_rows = rng.between(1, std::min(kMaxPairs / shape.group_heads, 10));
  const bool is_draft = rng.between(0, 1);
  RowView tree{};
  for (int r = 0; r < num_rows; r++) {
    RowView row{0, 0, rng.between(1, shape.num_slots), 0, 0, page_table};
    if (rng.between(0, 2) && shape.num_slots > 2) {
      if (r == 0 || !is_draft || tree.page_table == nullptr) {
        tree.page_table = page_table;
        tree.visible_len = rng.between(0, shape.num_slots - 2);
        tree.tail_base = rng.between(tree.visible_len, std::min(shape.num_slots - 1, tree.visible_len + 70));
      }
      row = tree;
      const int width = std::min(64, shape.num_slots - row.tail_base);
      row.tail_mask = rng.bits() & rng.bits();
      if (width < 64) row.tail_mask &= (uint64_t{1} << width) - 1;
      row.tail_mask |= uint64_t{1} << rng.between(0, width - 1);
    }
    rows.push_back(row);
  }
  return rows;
}

// A row gives the bits of a lone row, and those of a chain whose slots hold what the row sees, in that order.
inline void check_alone_and_as_a_chain(Rng& rng, const AttentionShape& shape, const Cache& cache, int kv_head,
                                       const std::vector<float>& q, const RowView& row, const float* want,
                                       const KernelTable& table) {
  const std::vector<float> alone = attend(table, shape, cache.kv(), kv_head, q, {row}).out;
  CHECK(std::memcmp(alone.data(), want, alone.size() * 4) == 0, "%s: a row depends on its neighbours", table.name);
  if (row.tail_mask == 0) return;
  const std::vector<int> slots = path_slots(row);
  AttentionShape chain_shape = shape;
  chain_shape.num_slots = static_cast<int>(slots.size());
  Cache chain(rng, chain_shape, table);
  for (size_t i = 0; i < slots.size(); i++)
    chain.append(static_cast<int>(i), kv_head, cache.key(slots[i], kv_head), cache.value(slots[i], kv_head));
  const RowView view{0, 0, chain_shape.num_slots, 0, 0, chain.page_table()};
  const std::vector<float> as_chain = attend(table, shape, chain.kv(), kv_head, q, {view}).out;
  CHECK(std::memcmp(as_chain.data(), want, as_chain.size() * 4) == 0, "%s: a tree row of %zu differs from its chain",
        table.name, slots.size());
}

// The cache of each table: the same bytes, and where layout.h says.
inline void check_appended(const AttentionShape& shape, const Cache& cache, const Cache& want, const char* isa) {
  CHECK(same_bits(cache.data(), want.data()), "%s: head size %d, f32 %d", isa, shape.head_dim, shape.is_f32);
  for (int slot = 0; slot < shape.num_slots; slot += 5) {
    for (int head = 0; head < 2; head++) {
      const size_t at = cache.kv().offset(cache.page_table()[slot / kPageTokens], head);
      const size_t lane = static_cast<size_t>(slot % kPageTokens), d_pad = static_cast<size_t>(shape.d_pad());
      for (size_t d = 0; d < static_cast<size_t>(shape.head_dim); d++) {
        const size_t key = at + d * kPageTokens + lane;
        const size_t value = at + static_cast<size_t>(kPageTokens * shape.head_dim) + lane * d_pad + d;
        auto element = [&](size_t i) {
          return shape.is_f32 ? static_cast<const float*>(cache.kv().data)[i]
                              : half_to_float(static_cast<const uint16_t*>(cache.kv().data)[i]);
        };
        CHECK(element(key) == cache.key(slot, head)[d] && element(value) == cache.value(slot, head)[d], "%s slot %d",
              isa, slot);
      }
    }
  }
}

inline void check_attention(uint64_t seed, const AttentionShape& shape) {
  std::vector<float> want;
  std::unique_ptr<Cache> first;
  for (const KernelTable* table : all_tables()) {
    Rng rng(seed);  // the same inputs for every table
    auto cache = std::make_unique<Cache>(rng, shape, *table);
    cache->fill_with_garbage();
    const std::vector<RowView> views = random_views(rng, shape, cache->page_table());
    const int kv_head = rng.between(0, 1);
    // What no row sees stays garbage.
    std::vector<bool> is_seen(static_cast<size_t>(shape.num_slots));
    for (const RowView& row : views)
      for (const int slot : path_slots(row)) is_seen[static_cast<size_t>(slot)] = true;
    for (int slot = 0; slot < shape.num_slots; slot++) {
      if (!is_seen[static_cast<size_t>(slot)]) continue;
      const std::vector<float> kv = random_floats(rng, 2 * static_cast<size_t>(shape.head_dim));
      cache->append(slot, kv_head, kv.data(), kv.data() + shape.head_dim);
    }
    const size_t heads = static_cast<size_t>(2 * shape.group_heads), d = static_cast<size_t>(shape.head_dim);
    const size_t q_stride = heads * d + 5;
    const std::vector<float> q = random_floats(rng, views.size() * q_stride, 0.7f);
    const Attention got = attend(*table, shape, cache->kv(), kv_head, q, views);
    if (!first) {
      want = got.out;
      first = std::move(cache);
    } else {
      CHECK(same_bits(want, got.out), "%s: head size %d, group %d, f32 %d, %d slots", table->name, shape.head_dim,
            shape.group_heads, shape.is_f32, shape.num_slots);
      continue;
    }
    for (size_t r = 0; r < views.size(); r++) {
      const std::vector<float> row_q(q.begin() + static_cast<long>(r * q_stride),
                                     q.begin() + static_cast<long>((r + 1) * q_stride));
      const size_t pair = r * static_cast<size_t>(shape.group_heads);
      for (size_t h = 0; h < static_cast<size_t>(shape.group_heads); h++)
        check_softmax(shape, *first, kv_head, row_q.data() + (static_cast<size_t>(kv_head * shape.group_heads) + h) * d,
                      views[r], got.out.data() + (pair + h) * d, table->name);
      for (const KernelTable* other : all_tables())
        check_alone_and_as_a_chain(rng, shape, *first, kv_head, row_q, views[r], got.out.data() + pair * d, *other);
    }
  }
}

inline void test_attention() {
  Rng rng(20);
  for (const int head_dim : {16, 24, 64, 80, 128}) {
    for (const int group_heads : {1, 3, 7}) {
      for (const bool is_f32 : {false, true}) {
        const int num_slots = rng.between(0, 3) ? rng.between(1, 90) : rng.between(250, head_dim > 64 ? 330 : 560);
        const int window = rng.between(0, 1) ? 0 : rng.between(1, num_slots + 9);
        check_attention(rng.bits(), {head_dim, group_heads, is_f32, num_slots, window});
      }
    }
    for (const bool is_f32 : {false, true}) {
      const AttentionShape shape{head_dim, 1, is_f32, 40};
      const uint64_t seed = rng.bits();
      std::unique_ptr<Cache> want;
      for (const KernelTable* table : all_tables()) {
        Rng same(seed);
        auto cache = std::make_unique<Cache>(same, shape, *table);
        cache->fill(same);
        check_appended(shape, *cache, want ? *want : *cache, table->name);
        if (!want) want = std::move(cache);
      }
      check_runs(rng, shape);
    }
  }
  // Exactly at and around the borders of a split and of a page.
  for (const int num_slots : {15, 16, 17, 255, 256, 257, 512, 513})
    for (const int window : {0, 1, 16, 255, 256, 257}) check_attention(rng.bits(), {16, 3, false, num_slots, window});
}

}  // namespace test
}  // namespace forerun
