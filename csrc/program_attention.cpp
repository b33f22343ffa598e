// The attention of a program: work items, splits of positions, and who folds them.
#include <algorithm>
#include <cstring>
#include <utility>

#include "prefetch.h"
#include "program.h"

namespace forerun {

constexpr int kItemsPerThread = 3;  // attention items a thread should find, so that all end at about the same time

// Fewer items than this share their splits out.
size_t Program::most_split_items() const { return size_t{4} * static_cast<size_t>(pool_.num_threads()); }

// Room for what plan_attention may plan, now or once the rows are fewer: the threads of a pass must not allocate.
void Program::reserve_partials() {
  const size_t num_splits = static_cast<size_t>((longest_context(0, num_rows_) + kSplit - 1) / kSplit);
  const size_t need = num_splits * most_split_items() * partial_floats(round_up(geometry_.head_dim, 16));
  if (num_splits <= 1 || need <= partials_capacity_) return;
  partials_ = Array<float>(need);
  partials_capacity_ = need;
}

void Program::plan_attention() {
  const int kv_heads = geometry_.num_kv_heads, group = geometry_.num_heads / kv_heads;
  const int longest = longest_context(0, num_rows_), num_threads = pool_.num_threads();
  auto sequence = [&](int row) { return views_[static_cast<size_t>(row)].page_table; };
  // As many rows as share their reads of the cache, but enough items to keep all threads busy until the end. Few rows
  // share all of them; heads that are left when each thread has as many are cut by rows if no split is.
  const bool is_few = num_rows_ * group <= kBlockPairs && sequence(0) == sequence(num_rows_ - 1);
  const int num_whole = is_few && longest < kSplit * 3 / 2 ? kv_heads / num_threads * num_threads : kv_heads;
  const int64_t work = static_cast<int64_t>(num_rows_) * kv_heads * std::max(1, longest / kSplit);
  const int64_t wanted = int64_t{kItemsPerThread} * num_threads;
  const int64_t fair_rows = is_few ? num_rows_ : (work + wanted - 1) / wanted;
  const int rows_at_once = static_cast<int>(std::clamp<int64_t>(fair_rows, 1, kMaxPairs / group));
  items_.clear();
  parts_.clear();
  int num_parts = 0;
  for (int r = 0; r < num_rows_;) {
    int n = 1;
    while (r + n < num_rows_ && n < rows_at_once && sequence(r + n) == sequence(r)) n++;
    for (int h = 0; h < kv_heads; h++) {
      const int num_pieces = h < num_whole ? 1 : std::min(num_threads, n);
      for (int piece = 0; piece < num_pieces; piece++) {
        const Range rows = share(n, piece, num_pieces);
        const int size = rows.end - rows.begin;
        const int num_splits = (longest_context(r + rows.begin, size) + kSplit - 1) / kSplit;
        items_.push_back({r + rows.begin, size, h, num_splits, num_parts});
        num_parts += num_splits;
      }
    }
    r += n;
  }
  if (longest <= kSplit || items_.size() >= most_split_items()) {
    std::reverse(items_.begin(), items_.end());  // the longest contexts first
    return;
  }
  // The last splits, which are short, come last.
  for (int split = 0; split * kSplit < longest; split++)
    for (size_t i = 0; i < items_.size(); i++)
      if (split < items_[i].num_splits) parts_.push_back({static_cast<int>(i), split});
  for (size_t i = 0; i < items_.size(); i++) pending_[i].store(items_[i].num_splits, std::memory_order_relaxed);
}

// Heads whose size is whole tiles are shared out by columns, so that a thread rotates and stores what it just made:
// about as many query and key heads for each, and so much of the values, which need no rotation, that all have as many
// tiles.
QkvShare qkv_share(const Geometry& g, int thread, int num_threads) {
  const int d = g.head_dim, first_key = g.num_heads * d, first_value = first_key + g.num_kv_heads * d;
  const int num_columns = first_value + g.num_kv_heads * d;
  const Range queries = share(g.num_heads, thread, num_threads), kv = share(g.num_kv_heads, thread, num_threads);
  QkvShare mine = {{queries.begin * d, queries.end * d},
                   {first_key + kv.begin * d, first_key + kv.end * d},
                   {first_value + kv.begin * d, first_value + kv.end * d}};
  if (d % kTileRows != 0) return mine;
  mine.values.begin = first_value;
  for (int t = 1; t <= thread + 1; t++) {
    // Where the values of the threads before t end if all have as many tiles; a thread with many heads gets none.
    const int tiles = share(num_columns / kTileRows, t, num_threads).begin;
    const int heads = share(g.num_heads, t, num_threads).begin + share(g.num_kv_heads, t, num_threads).begin;
    const int edge = std::clamp(first_value + tiles * kTileRows - heads * d, mine.values.begin, num_columns);
    if (t <= thread)
      mine.values.begin = edge;
    else
      mine.values.end = edge;
  }
  return mine;
}

bool Program::has_wide_norm(const Instr& instr) const {
  for (const int v : {instr.q_norm, instr.k_norm})
    if (v >= 0 && vector_size(v) != geometry_.head_dim) return true;
  return false;
}

// RMSNorm of x[0, n) in place.
void Program::norm_slice(int norm, float eps, int n, int thread, float* x) {
  if (n % kTileRows == 0) return kernels_.rms_norm(&x, 1, vector(norm), eps, n, x, 0);
  // A norm reads whole vectors, and behind this slice lies another.
  float* padded = scratch_[static_cast<size_t>(thread)].rows.get();
  std::memcpy(padded, x, sizeof(float) * static_cast<size_t>(n));
  std::fill(padded + n, padded + round_up(n, kTileRows), 0.0f);
  kernels_.rms_norm(&padded, 1, vector(norm), eps, n, padded, 0);
  std::memcpy(x, padded, sizeof(float) * static_cast<size_t>(n));
}

// Norms over all heads of a row, by whole rows; all of QKV is there, and the next barrier is passed before it is
// rotated.
void Program::norm_wide(const Instr& instr, int thread) {
  const Geometry& g = geometry_;
  const Buffer& qkv = buffers_[static_cast<size_t>(instr.out)];
  const Range rows = share(num_rows_, thread, pool_.num_threads());
  const int q_size = g.num_heads * g.head_dim;
  for (int row = rows.begin; row < rows.end; row++) {
    float* x = qkv.data.get() + static_cast<size_t>(row) * qkv.stride;
    for (const auto& [norm, at] : {std::pair{instr.q_norm, 0}, std::pair{instr.k_norm, q_size}})
      if (norm >= 0 && vector_size(norm) != g.head_dim)
        norm_slice(norm, instr.qk_eps, vector_size(norm), thread, x + at);
  }
  pool_.barrier();
}

// Norms, rotates and scales the heads in `columns` of a run's rows.
void Program::rotate(const Instr& instr, const SlotRun& run, const Range& columns, int norm, float scale, int thread) {
  const Buffer& qkv = buffers_[static_cast<size_t>(instr.out)];
  const int d = geometry_.head_dim;
  const bool is_normed = norm >= 0 && vector_size(norm) == d;
  const RopeTable* table = instr.rope < 0 ? nullptr : &ropes_[static_cast<size_t>(instr.rope)];
  const int half = table ? table->half : 0;
  for (int row = run.row; row < run.row + run.num_rows; row++) {
    const size_t at = static_cast<size_t>(views_[static_cast<size_t>(row)].position) * static_cast<size_t>(half);
    for (int column = columns.begin; column < columns.end; column += d) {
      float* head = qkv.data.get() + static_cast<size_t>(row) * qkv.stride + column;
      if (is_normed) norm_slice(norm, instr.qk_eps, d, thread, head);
      if (table) kernels_.rope(head, table->cos.get() + at, table->sin.get() + at, half, scale);
      for (int i = 2 * half; i < d && scale != 1.0f; i++) head[i] *= scale;  // what is not rotated
    }
  }
}

void Program::rotate_and_append(const Instr& instr, const QkvShare& share, int thread) {
  const Geometry& g = geometry_;
  const Buffer& qkv = buffers_[static_cast<size_t>(instr.out)];
  const KvLayer& kv = kv_[static_cast<size_t>(instr.layer)];
  const size_t stride = static_cast<size_t>(qkv.stride);
  const int d = g.head_dim, first_key = g.num_heads * d, first_value = first_key + g.num_kv_heads * d;
  for (const SlotRun& run : runs_) {
    rotate(instr, run, share.queries, instr.q_norm, instr.scale, thread);
    rotate(instr, run, share.keys, instr.k_norm, 1.0f, thread);
    const float* x = qkv.data.get() + static_cast<size_t>(run.row) * stride;
    for (int column = share.keys.begin; column < share.keys.end; column += d)
      kernels_.append_keys(kv, run.page, run.lane, run.num_rows, (column - first_key) / d, x + column, stride);
    for (int column = share.values.begin; column < share.values.end;) {
      const int kv_head = (column - first_value) / d, begin = (column - first_value) % d;
      const int end = std::min(d, begin + share.values.end - column);
      kernels_.append_values(kv, run.page, run.lane, run.num_rows, kv_head, begin, end, x + column, stride);
      column += end - begin;
    }
  }
}

AttendArgs Program::attend_args(const Instr& instr, int row, int num_rows, int kv_head, int thread) {
  const Buffer& qkv = buffers_[static_cast<size_t>(instr.in)];
  return {&kv_[static_cast<size_t>(instr.layer)],
          qkv.data.get() + static_cast<size_t>(row) * qkv.stride,
          static_cast<size_t>(qkv.stride),
          views_.data() + row,
          num_rows,
          geometry_.num_heads / geometry_.num_kv_heads,
          kv_head,
          instr.window,
          scratch_[static_cast<size_t>(thread)].attend.get(),
          {}};
}

void Program::store_heads(const Instr& instr, int row, int num_rows, int kv_head, const float* sum, const float* acc) {
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const int group = geometry_.num_heads / geometry_.num_kv_heads, d = geometry_.head_dim, d_pad = round_up(d, 16);
  for (int r = 0; r < num_rows; r++)
    for (int h = 0; h < group; h++)
      kernels_.divide(acc + static_cast<size_t>(r * group + h) * d_pad, sum[r * group + h], d,
                      out.data.get() + static_cast<size_t>(row + r) * out.stride +
                          static_cast<size_t>(kv_head * group + h) * d);
}

void Program::run_attention(const Instr& instr, int index, int thread) {
  const int num = num_parts();
  // Each thread's first part is fixed, and the next is taken before its turn, so that both can be fetched ahead.
  for (int i = thread; i < num;) {
    const int next = pool_.num_threads() + next_item_[static_cast<size_t>(index)].fetch_add(1);
    if (parts_.empty())
      attend_item(instr, i, next, thread);
    else
      attend_part(instr, parts_[static_cast<size_t>(i)], next, thread);
    i = next;
  }
}

// The i-th part; where whole items are taken, what the i-th begins with.
Program::AttendPart Program::part_at(int index) const {
  return parts_.empty() ? AttendPart{index, 0} : parts_[static_cast<size_t>(index)];
}

KeysAhead Program::keys_of(int layer, const AttendPart& part) const {
  const AttendItem& item = items_[static_cast<size_t>(part.item)];
  const KvLayer& kv = kv_[static_cast<size_t>(layer)];
  const size_t elem_bytes = kv.is_f32 ? sizeof(float) : sizeof(uint16_t);
  const int first = part.split * (kSplit / kPageTokens);
  // A row that sees slots twice counts more of them than there are.
  const int last = std::min(longest_context(item.row, item.num_rows), step_->num_table_pages * kPageTokens);
  const int end = (last + kPageTokens - 1) / kPageTokens;
  const int32_t* table = views_[static_cast<size_t>(item.row)].page_table + first;
  KeysAhead keys;
  keys.num_pages = std::clamp(end - first, 0, kSplit / kPageTokens);
  keys.page_bytes = static_cast<size_t>(kPageTokens) * static_cast<size_t>(kv.head_dim) * elem_bytes;
  for (int i = 0; i < keys.num_pages; i++)
    keys.pages[i] = static_cast<const uint8_t*>(kv.data) + kv.offset(table[i], item.kv_head) * elem_bytes;
  return keys;
}

// Fetches what a thread's attention begins with, while others may still work on what comes before. Many rows have so much
// to compute that it is no gain.
void Program::fetch_first_keys(int layer, int thread) const {
  if (thread >= num_parts() || num_rows_ >= kBlockRows) return;
  const KeysAhead keys = keys_of(layer, part_at(thread));
  for (int i = 0; i < keys.num_pages; i++)
    for (size_t at = 0; at < keys.page_bytes; at += 64) fetch_to_l2(keys.pages[i] + at);
}

// Takes one split into the running softmax of each pair that sees something in it.
void Program::combine(const AttendArgs& args, int split, const Partial& part, const Partial& run) {
  const size_t d_pad = static_cast<size_t>(args.kv->d_pad);
  for (int p = 0; p < args.num_rows * args.group_heads; p++) {
    const RowView& row = args.rows[p / args.group_heads];
    const int first = first_split(row, args.window);
    const float* acc = part.acc + static_cast<size_t>(p) * d_pad;
    float* run_acc = run.acc + static_cast<size_t>(p) * d_pad;
    if (split < first || row.total_len() <= split * kSplit) continue;
    if (split > first) {
      kernels_.attend_combine(part.max[p], part.sum[p], acc, args.kv->d_pad, run.max + p, run.sum + p, run_acc);
    } else if (run_acc != acc) {
      run.max[p] = part.max[p];
      run.sum[p] = part.sum[p];
      std::memcpy(run_acc, acc, sizeof(float) * d_pad);
    }
  }
}

void Program::attend_item(const Instr& instr, int index, int next, int thread) {
  const AttendItem& item = items_[static_cast<size_t>(index)];
  AttendArgs args = attend_args(instr, item.row, item.num_rows, item.kv_head, thread);
  const Partial run = partial_at(args.scratch + attend_scratch_floats(geometry_.head_dim));
  const Partial part = partial_at(run.max + partial_floats(args.kv->d_pad));
  int first = first_split(args.rows[0], args.window), last_first = first;
  for (int r = 1; r < item.num_rows; r++) {
    const int own = first_split(args.rows[r], args.window);
    first = std::min(first, own);
    last_first = std::max(last_first, own);
  }
  for (int split = first; split < item.num_splits; split++) {
    // Where all rows begin, their partial sums are the running ones.
    const Partial& to = split == first && first == last_first ? run : part;
    if (split + 1 < item.num_splits)
      args.ahead = keys_of(instr.layer, {index, split + 1});
    else
      args.ahead = next < num_parts() ? keys_of(instr.layer, part_at(next)) : KeysAhead{};
    kernels_.attend_split(args, split, to);
    combine(args, split, to, run);
  }
  store_heads(instr, item.row, item.num_rows, item.kv_head, run.sum, run.acc);
}

void Program::attend_part(const Instr& instr, const AttendPart& part, int next, int thread) {
  const AttendItem& item = items_[static_cast<size_t>(part.item)];
  AttendArgs args = attend_args(instr, item.row, item.num_rows, item.kv_head, thread);
  if (next < num_parts()) args.ahead = keys_of(instr.layer, part_at(next));
  const size_t stride = partial_floats(args.kv->d_pad);
  float* partials = partials_.get() + static_cast<size_t>(item.first_part) * stride;
  kernels_.attend_split(args, part.split, partial_at(partials + static_cast<size_t>(part.split) * stride));
  // Whoever finishes an item's last part folds all of them, in order.
  std::atomic<int>& pending = pending_[static_cast<size_t>(part.item)];
  if (pending.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  pending.store(item.num_splits, std::memory_order_relaxed);  // for the next layer
  const Partial run = partial_at(args.scratch + attend_scratch_floats(geometry_.head_dim));
  for (int split = 0; split < item.num_splits; split++)
    combine(args, split, partial_at(partials + static_cast<size_t>(split) * stride), run);
  store_heads(instr, item.row, item.num_rows, item.kv_head, run.sum, run.acc);
}

}  // namespace forerun
