// The float kernels, written once over a vector type V of sixteen lanes (scalar::V16, avx2::V16, avx512::V16).
// Orders of summation are part of the contract: see ARCHITECTURE.md, "Numerics".
#pragma once
#include <cmath>
#include <cstring>

#include "counts.h"
#include "gemm_float.h"
#include "half.h"
#include "layout.h"
#include "prefetch.h"

namespace forerun {
namespace {

constexpr float kNegInf = -__builtin_inff();

// exp(x) for x <= 88; exactly 0 below -87. Cephes' expf polynomial, every product and sum an explicit FMA.
template <class V>
inline V exp_bounded(V x) {
  V clamped = max(x, V::set1(-87.5f));
  auto n = round_to_int(mul(clamped, V::set1(1.44269504088896341f)));
  V nf = to_float(n);
  V r = fma(nf, V::set1(-0.693359375f), clamped);
  r = fma(nf, V::set1(2.12194440e-4f), r);
  V p = V::set1(1.9875691500e-4f);
  p = fma(p, r, V::set1(1.3981999507e-3f));
  p = fma(p, r, V::set1(8.3334519073e-3f));
  p = fma(p, r, V::set1(4.1665795894e-2f));
  p = fma(p, r, V::set1(1.6666665459e-1f));
  p = fma(p, r, V::set1(5.0000001201e-1f));
  V y = add(fma(p, mul(r, r), r), V::set1(1.0f));
  return zero_where_less(x, V::set1(-87.0f), scale_pow2(y, n));
}

// The same for any x; above 88 it is exp(88).
template <class V>
inline V exp_v(V x) {
  return exp_bounded(min(x, V::set1(88.0f)));
}

template <class V>
float exp_scalar(float x) {
  float lanes[16];
  exp_v(V::set1(x)).store(lanes);
  return lanes[0];
}

template <class V>
void exp_f32(const float* x, int n, float* out) {
  for (int i = 0; i < n; i++) out[i] = exp_scalar<V>(x[i]);
}

// R rows at a time: one row's chain of sums would wait for itself.
template <class V, int R>
inline void rms_norm_rows(const float* const* x, const float* w, float eps, int n, float* out, size_t ldo) {
  V acc[R];
  for (int r = 0; r < R; r++) acc[r] = V::set1(0.0f);
  for (int i = 0; i < n; i += 16) {
    for (int r = 0; r < R; r++) {
      V v = V::load(x[r] + i);
      acc[r] = fma(v, v, acc[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    float mean = reduce_add(acc[r]) / static_cast<float>(n);
    acc[r] = V::set1(1.0f / std::sqrt(mean + eps));
  }
  for (int i = 0; i < n; i += 16) {
    V weight = V::load(w + i);
    for (int r = 0; r < R; r++)
      mul(mul(V::load(x[r] + i), acc[r]), weight).store(out + static_cast<size_t>(r) * ldo + i);
  }
}

template <class V>
void rms_norm(const float* const* x, int num_rows, const float* w, float eps, int n, float* out, size_t ldo) {
  int r = 0;
  for (; r + 4 <= num_rows; r += 4) rms_norm_rows<V, 4>(x + r, w, eps, n, out + static_cast<size_t>(r) * ldo, ldo);
  for (; r < num_rows; r++) rms_norm_rows<V, 1>(x + r, w, eps, n, out + static_cast<size_t>(r) * ldo, ldo);
}

template <class V>
bool quantise_row(const float* x, const Acts& acts, int row, int group_begin, int num_groups) {
  const int block = row / acts.block_rows;
  const int in_block = row - block * acts.block_rows;
  const bool is_amx = acts.block_rows == kAmxRows;
  const int mr = is_amx ? kAmxRows : acts.block_size(block);
  int8_t* codes = acts.codes + static_cast<size_t>(block) * acts.block_rows * acts.inputs;
  const size_t at = acts.group_at(block) + in_block;
  bool is_finite = true;
  for (int g = group_begin; g < group_begin + num_groups; g++, x += kGroup) {
    V a = V::load(x), b = V::load(x + 16);
    uint32_t bits = max_abs_bits(a, b);
    float amax;
    std::memcpy(&amax, &bits, 4);
    alignas(64) int8_t group[kGroup];
    int32_t sums[2] = {};  // of each half
    float scale = 0.0f;
    // Below 1e-30 the reciprocal could leave the float range; such a group is zero.
    if (bits >= 0x7f800000u || !(amax > 1e-30f)) {
      if (bits >= 0x7f800000u) is_finite = false;
      std::memset(group, 0, kGroup);
    } else {
      scale = amax / 127.0f;
      V inv = V::set1(127.0f / amax);
      store_codes(round_to_int(mul(a, inv)), round_to_int(mul(b, inv)), group, sums);
    }
    if (is_amx) {
      std::memcpy(codes + (static_cast<size_t>(g) * kAmxRows + in_block) * kGroup, group, kGroup);
    } else if (mr == 1) {
      std::memcpy(codes + g * kGroup, group, kGroup);
    } else {
      for (int q = 0; q < kQuads; q++)
        std::memcpy(codes + (static_cast<size_t>(g * kQuads + q) * mr + in_block) * 4, group + 4 * q, 4);
    }
    const size_t i = at + static_cast<size_t>(g) * mr, half = 2 * (i - in_block) + in_block;
    acts.scale[i] = scale;
    acts.scaled_sum[i] = scale * static_cast<float>(sums[0] + sums[1]);
    acts.bias[i] = -128 * (sums[0] + sums[1]);
    acts.half_bias[half] = -32 * sums[0];
    acts.half_bias[half + mr] = -32 * sums[1];
  }
  return is_finite;
}

template <class V>
uint32_t quantise_rows(const float* x, size_t ldx, int num_rows, const Acts& acts, int row, int group, int num_groups) {
  uint32_t non_finite = 0;
  for (int r = 0; r < num_rows; r++)
    if (!quantise_row<V>(x + static_cast<size_t>(r) * ldx, acts, row + r, group, num_groups)) non_finite |= 1u << r;
  return non_finite;
}

template <class V>
void silu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    V g = V::load(gate + i);
    V e = exp_v(neg(g));
    mul(div(g, add(V::set1(1.0f), e)), V::load(up + i)).store(out + i);
  }
}

// The tanh form of GELU: x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class V>
void gelu_mul(const float* gate, const float* up, int n, float* out) {
  const V minus_two_a = V::set1(-1.5957691216057308f), b = V::set1(0.044715f), one = V::set1(1.0f);
  for (int i = 0; i < n; i += 16) {
    V g = V::load(gate + i);
    V e = exp_v(mul(minus_two_a, mul(g, fma(mul(b, g), g, one))));
    mul(div(g, add(one, e)), V::load(up + i)).store(out + i);
  }
}

template <class V>
void add_rows(const float* a, const float* b, int n, float* out) {
  for (int i = 0; i < n; i += 16) add(V::load(a + i), V::load(b + i)).store(out + i);
}

template <class V>
void rope(float* head, const float* cos, const float* sin, int half, float scale) {
  V s = V::set1(scale);
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    V x0 = V::load(head + i), x1 = V::load(head + half + i), c = V::load(cos + i), sn = V::load(sin + i);
    mul(fma(x0, c, neg(mul(x1, sn))), s).store(head + i);
    mul(fma(x1, c, mul(x0, sn)), s).store(head + half + i);
  }
  for (; i < half; i++) {
    float x0 = head[i], x1 = head[half + i];
    head[i] = std::fmaf(x0, cos[i], -(x1 * sin[i])) * scale;
    head[half + i] = std::fmaf(x1, cos[i], x0 * sin[i]) * scale;
  }
}

inline void store_elem(float x, float* out) { *out = x; }
inline void store_elem(float x, uint16_t* out) { *out = float_to_half(x); }
inline float load_elem(const float* p) { return *p; }
inline float load_elem(const uint16_t* p) { return half_to_float(*p); }

template <class V, class E>
void append_key_as(const KvLayer& kv, int page, int lane, int kv_head, const float* k) {
  E* keys = static_cast<E*>(kv.data) + kv.offset(page, kv_head) + lane;
  int d = 0;
  for (; d + 16 <= kv.head_dim; d += 16) {
    alignas(64) E lanes[16];
    V::load(k + d).store(lanes);
    for (int i = 0; i < 16; i++) keys[static_cast<size_t>(d + i) * kPageTokens] = lanes[i];
  }
  for (; d < kv.head_dim; d++) store_elem(k[d], &keys[static_cast<size_t>(d) * kPageTokens]);
}

template <class V>
void append_keys(const KvLayer& kv, int page, int lane, int num_tokens, int kv_head, const float* k, size_t ldk) {
  for (int token = 0; token < num_tokens; token++, k += ldk) {
    if (kv.is_f32)
      append_key_as<V, float>(kv, page, lane + token, kv_head, k);
    else
      append_key_as<V, uint16_t>(kv, page, lane + token, kv_head, k);
  }
}

template <class V, class E>
void append_values_as(const KvLayer& kv, int page, int lane, int num_tokens, int kv_head, int begin, int end,
                      const float* v, size_t ldv) {
  E* values = static_cast<E*>(kv.data) + kv.offset(page, kv_head) + static_cast<size_t>(kPageTokens) * kv.head_dim +
              static_cast<size_t>(lane) * kv.d_pad + begin;
  for (int token = 0; token < num_tokens; token++, v += ldv, values += kv.d_pad) {
    int d = 0;
    for (; d + 16 <= end - begin; d += 16) V::load(v + d).store(values + d);
    for (; d < end - begin; d++) store_elem(v[d], &values[d]);
  }
}

template <class V>
void append_values(const KvLayer& kv, int page, int lane, int num_tokens, int kv_head, int begin, int end,
                   const float* v, size_t ldv) {
  if (kv.is_f32)
    append_values_as<V, float>(kv, page, lane, num_tokens, kv_head, begin, end, v, ldv);
  else
    append_values_as<V, uint16_t>(kv, page, lane, num_tokens, kv_head, begin, end, v, ldv);
}

template <class V>
void divide(const float* x, float by, int n, float* out) {
  V b = V::set1(by);
  int i = 0;
  for (; i + 16 <= n; i += 16) div(V::load(x + i), b).store(out + i);
  for (; i < n; i++) out[i] = x[i] / by;
}

// ---- attention -----------------------------------------------------------------------------------------------------

// A pair is (row, head of the group): pair = row * group_heads + head. Blocks of at most V::kPairs pairs share a pass
// over a split; each sum keeps its own order, so neither blocks nor their sizes show in the result.

template <class E>
struct PageRef {
  const E* keys;
  const E* values;
};

template <class E>
inline PageRef<E> page_at(const KvLayer& kv, int kv_head, int page) {
  const E* keys = static_cast<const E*>(kv.data) + kv.offset(page, kv_head);
  return {keys, keys + static_cast<size_t>(kPageTokens) * kv.head_dim};
}

// Accumulators side by side for P pairs.
template <class V>
constexpr int chains_for(int num_pairs) {
  return V::kAttendChains / num_pairs >= 4 ? 4 : V::kAttendChains / num_pairs >= 2 ? 2 : 1;
}

// scores[kScoreStride * pair][16 * page] for P pairs and N pages at once: one FMA chain over d per score. Fetches the
// values of these pages on the way, each line once and to L2: the hardware's own streams begin anew with every page.
template <class V, class E, int P, int N>
inline void score_pages(const float* q, int d, const PageRef<E>* pages, float* scores) {
  V acc[P][N];
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n] = V::set1(0.0f);
  size_t at = 0;
  do {  // kQueryChunk inputs
    const float* const end = q + (d < kQueryChunk ? d : kQueryChunk);
    const float* x = q;
    do {
      V k[N];
      for (int n = 0; n < N; n++) {
        k[n] = V::load(pages[n].keys + at);
        if (at % (64 / sizeof(E)) == 0) fetch_to_l2(reinterpret_cast<const uint8_t*>(pages[n].values + at));
      }
      at += kPageTokens;
      for (int p = 0; p < P; p++) {
        V w = V::set1(x[p * kQueryChunk]);
        for (int n = 0; n < N; n++) acc[p][n] = fma(w, k[n], acc[p][n]);
      }
    } while (++x < end);
    q += V::kPairs * kQueryChunk;
    d -= kQueryChunk;
  } while (d > 0);
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n].store(scores + p * kScoreStride + 16 * n);
}

template <class V, class E, int P>
void score_pairs(const float* q, int d, const PageRef<E>* pages, int num_pages, float* scores) {
  constexpr int N = chains_for<V>(P);
  int n = 0;
  for (; n + N <= num_pages; n += N) score_pages<V, E, P, N>(q, d, pages + n, scores + 16 * n);
  for (; n < num_pages; n++) score_pages<V, E, P, 1>(q, d, pages + n, scores + 16 * n);
}

// Fetches keys, some lines a step. While values are weighed, which were fetched before, memory has nothing else to do.
class KeyFetcher {
 public:
  // num_steps >= 1.
  KeyFetcher(const KeysAhead& keys, int num_steps) : keys_(keys) {
    const int num_lines = keys.num_pages * static_cast<int>(keys.page_bytes / 64);
    lines_at_once_ = (num_lines + num_steps - 1) / num_steps;
  }

  void step() {
    for (int i = 0; i < lines_at_once_; i++) {
      if (at_ == end_) {
        if (page_ == keys_.num_pages) return;
        at_ = keys_.pages[page_++];
        end_ = at_ + keys_.page_bytes;
      }
      fetch_to_l2(at_);
      at_ += 64;
    }
  }

 private:
  const KeysAhead& keys_;
  const uint8_t* at_ = nullptr;
  const uint8_t* end_ = nullptr;
  int page_ = 0;
  int lines_at_once_;
};

// acc[pair][d0 .. d0 + 16 * N) = sum over positions [0, num) of prob[pair][pos] * V[pos]: one FMA chain per lane.
template <class V, class E, int P, int N>
inline void weigh_values(const float* probs, int num, const PageRef<E>* pages, int d_pad, int d0, float* acc_rows,
                         KeyFetcher& fetcher) {
  V acc[P][N];
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n] = V::set1(0.0f);
  int begin = 0;
  do {
    const E* row = pages[begin / kPageTokens].values + d0;
    const float* prob = probs + begin;
    const float* end = prob + (num - begin < kPageTokens ? num - begin : kPageTokens);
    do {
      V v[N];
      for (int n = 0; n < N; n++) v[n] = V::load(row + 16 * n);
      for (int p = 0; p < P; p++) {
        V w = V::set1(prob[p * kScoreStride]);
        for (int n = 0; n < N; n++) acc[p][n] = fma(w, v[n], acc[p][n]);
      }
      row += d_pad;
      fetcher.step();
    } while (++prob < end);
    begin += kPageTokens;
  } while (begin < num);
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n].store(acc_rows + static_cast<size_t>(p) * d_pad + d0 + 16 * n);
}

template <class V, class E, int P>
void weigh_pairs(const float* probs, int num, const PageRef<E>* pages, int d_pad, float* acc, const KeysAhead& keys) {
  constexpr int N = chains_for<V>(P);
  KeyFetcher fetcher(keys, num * (d_pad / 16 / N + d_pad / 16 % N));
  int d0 = 0;
  for (; d0 + 16 * N <= d_pad; d0 += 16 * N) weigh_values<V, E, P, N>(probs, num, pages, d_pad, d0, acc, fetcher);
  for (; d0 < d_pad; d0 += 16) weigh_values<V, E, P, 1>(probs, num, pages, d_pad, d0, acc, fetcher);
}

// The largest of the scores [0, num), num >= 1; pads them to whole vectors.
template <class V>
inline float max_score(float* s, int num) {
  const int padded = round_up(num, 16);
  for (int pos = num; pos < padded; pos++) s[pos] = kNegInf;
  V best = V::load(s);
  for (int i = 16; i < padded; i += 16) best = max(best, V::load(s + i));
  return reduce_max(best);
}

// Turns the scores [0, num) into exp(score - top) and returns their sum: by lanes in order, then the tree.
template <class V>
inline float exp_scores(float* s, int num, float top) {
  const V shift = V::set1(top);
  V sum = V::set1(0.0f);
  for (int i = 0; i < num; i += 16) {
    V e = exp_bounded(sub(V::load(s + i), shift));
    e.store(s + i);
    sum = add(sum, e);
  }
  return reduce_add(sum);
}

// The positions of one row that lie in a split: `dense` slots from `begin` on, then ancestors.
struct RowSpan {
  const RowView* row;
  int begin;
  int dense;
  int total;
  int hidden;  // the first so many of them lie before the window

  RowSpan() = default;
  RowSpan(const RowView& view, int split, int window) : row(&view), begin(split * kSplit) {
    dense = inside(view.visible_len);
    total = inside(view.total_len());
    hidden = window > 0 ? inside(view.total_len() - window) : 0;
    if (hidden == total) dense = total = hidden = 0;
  }
  int inside(int len) const { return len <= begin ? 0 : len - begin < kSplit ? len - begin : kSplit; }
  // Calls f(position in the split, slot) for each ancestor, in order.
  template <class F>
  void each_ancestor(F f) const {
    uint64_t mask = row->tail_mask;
    for (int skip = begin + dense - row->visible_len; skip > 0; skip--) mask &= mask - 1;
    for (int pos = dense; pos < total; pos++, mask &= mask - 1) f(pos, row->tail_base + __builtin_ctzll(mask));
  }
};

// One block of pairs over one split.
template <class V, class E>
struct AttendBlock {
  const AttendArgs& args;
  const PageRef<E>* pages;  // of the split, as far as any row is dense
  int first;                // pairs [first, first + num)
  int num;
  float* scores;            // [num][kScoreStride]
  float* q;                 // [ceil(d / kQueryChunk)][V::kPairs][kQueryChunk]
  const RowSpan* spans[V::kPairs];
  int least_dense = kSplit, most_dense = 0;

  const RowSpan& span(int p) const { return *spans[p]; }

  AttendBlock(const AttendArgs& a, const PageRef<E>* split_pages, const RowSpan* row_spans, int begin, int count)
      : args(a), pages(split_pages), first(begin), num(count), scores(a.scratch), q(scores + V::kPairs * kScoreStride) {
    const int d = a.kv->head_dim;
    int row = first / a.group_heads, head = first % a.group_heads;
    for (int p = 0; p < num; p++) {
      spans[p] = row_spans + row;
      least_dense = span(p).dense < least_dense ? span(p).dense : least_dense;
      most_dense = span(p).dense > most_dense ? span(p).dense : most_dense;
      const float* from = a.q + static_cast<size_t>(row) * a.q_stride +
                          static_cast<size_t>(a.kv_head * a.group_heads + head) * d;
      for (int at = 0; at < d; at += kQueryChunk)
        std::memcpy(q + at * V::kPairs + p * kQueryChunk, from + at,
                    sizeof(float) * static_cast<size_t>(d - at < kQueryChunk ? d - at : kQueryChunk));
      if (++head == a.group_heads) {
        head = 0;
        row++;
      }
    }
  }

  void score_dense() const {
    const int num_pages = (most_dense + kPageTokens - 1) / kPageTokens;
    with_count<V::kPairs>(num, [&](auto count) {
      score_pairs<V, E, decltype(count)::value>(q, args.kv->head_dim, pages, num_pages, scores);
    });
  }

  // Scores whole pages of ancestors for pairs [p, end), which share a tail, then picks each row's own.
  void score_tail(int p, int end) const {
    uint64_t mask = 0;
    for (int i = p; i < end; i++) mask |= span(i).total > span(i).dense ? span(i).row->tail_mask : 0;
    if (mask == 0) return;
    const RowView& row = *span(p).row;
    const int page = (row.tail_base + __builtin_ctzll(mask)) / kPageTokens;
    const int last = (row.tail_base + 63 - __builtin_clzll(mask)) / kPageTokens;
    PageRef<E> tail[kTailPages];
    for (int i = page; i <= last; i++) tail[i - page] = page_at<E>(*args.kv, args.kv_head, row.page_table[i]);
    with_count<V::kPairs>(end - p, [&](auto count) {
      score_pairs<V, E, decltype(count)::value>(q + p * kQueryChunk, args.kv->head_dim, tail, last - page + 1,
                                                scores + p * kScoreStride + kSplit);
    });
    for (int i = p; i < end; i++) {
      float* s = scores + i * kScoreStride;
      span(i).each_ancestor([&](int pos, int slot) { s[pos] = s[kSplit + slot - page * kPageTokens]; });
    }
  }

  void score_tails() const {
    for (int p = 0, end; p < num; p = end) {
      for (end = p + 1; end < num && span(end).row->tail_base == span(p).row->tail_base;) end++;
      score_tail(p, end);
    }
  }

  // Positions that not all rows of the block see; the chains go on where the common part left them.
  void weigh_rest(int p, float* acc) const {
    const RowSpan& s = span(p);
    const int d_pad = args.kv->d_pad;
    const float* prob = scores + p * kScoreStride;
    auto weigh = [&](int pos, int slot) {
      const E* value = page_at<E>(*args.kv, args.kv_head, s.row->page_table[slot / kPageTokens]).values +
                       static_cast<size_t>(slot % kPageTokens) * d_pad;
      V w = V::set1(prob[pos]);
      for (int i = 0; i < d_pad; i += 16) fma(w, V::load(value + i), V::load(acc + i)).store(acc + i);
    };
    for (int pos = least_dense; pos < s.dense; pos++) weigh(pos, s.begin + pos);
    s.each_ancestor(weigh);
  }

  void softmax(const Partial& out) const {
    for (int p = 0; p < num; p++)
      for (int pos = 0; pos < span(p).hidden; pos++) scores[p * kScoreStride + pos] = kNegInf;
    for (int p = 0; p < num; p++)
      if (span(p).total > 0) out.max[first + p] = max_score<V>(scores + p * kScoreStride, span(p).total);
    for (int p = 0; p < num; p++)
      if (span(p).total > 0)
        out.sum[first + p] = exp_scores<V>(scores + p * kScoreStride, span(p).total, out.max[first + p]);
  }

  void run(const Partial& out) const {
    score_dense();
    score_tails();
    softmax(out);
    const size_t d_pad = static_cast<size_t>(args.kv->d_pad);
    float* acc = out.acc + static_cast<size_t>(first) * d_pad;
    if (least_dense > 0)
      with_count<V::kPairs>(num, [&](auto count) {
        weigh_pairs<V, E, decltype(count)::value>(scores, least_dense, pages, args.kv->d_pad, acc,
                                                  first == 0 ? args.ahead : KeysAhead{});
      });
    for (int p = 0; p < num; p++) {
      if (span(p).total == 0) continue;
      if (least_dense == 0) std::memset(acc + p * d_pad, 0, sizeof(float) * d_pad);
      if (span(p).total > least_dense) weigh_rest(p, acc + p * d_pad);
    }
  }
};

template <class V, class E>
void attend_split_as(const AttendArgs& args, int split, const Partial& out) {
  static_assert(V::kPairs <= kBlockPairs, "the scratch holds kBlockPairs");
  const KvLayer& kv = *args.kv;
  RowSpan spans[kMaxPairs];
  int most = 0;
  for (int r = 0; r < args.num_rows; r++) {
    spans[r] = RowSpan(args.rows[r], split, args.window);
    most = spans[r].dense > most ? spans[r].dense : most;
  }
  PageRef<E> pages[kSplit / kPageTokens];
  const int num_pages = (most + kPageTokens - 1) / kPageTokens;
  const int32_t* table = args.rows[0].page_table + split * (kSplit / kPageTokens);
  for (int i = 0; i < num_pages; i++) pages[i] = page_at<E>(kv, args.kv_head, table[i]);
  const int num_pairs = args.num_rows * args.group_heads;
  for (int p = 0; p < num_pairs; p += V::kPairs) {
    const int num = num_pairs - p < V::kPairs ? num_pairs - p : V::kPairs;
    AttendBlock<V, E>(args, pages, spans, p, num).run(out);
  }
}

template <class V>
void attend_split(const AttendArgs& args, int split, const Partial& out) {
  if (args.kv->is_f32)
    attend_split_as<V, float>(args, split, out);
  else
    attend_split_as<V, uint16_t>(args, split, out);
}

template <class V>
void attend_combine(float part_max, float part_sum, const float* part_acc, int d_pad, float* run_max, float* run_sum,
                    float* run_acc) {
  const float top = *run_max > part_max ? *run_max : part_max;
  // One of the two is exp(0), which is exactly 1.
  const float other = exp_scalar<V>((*run_max > part_max ? part_max : *run_max) - top);
  const float a = *run_max > part_max ? 1.0f : other, b = *run_max > part_max ? other : 1.0f;
  *run_max = top;
  *run_sum = std::fmaf(*run_sum, a, part_sum * b);
  V va = V::set1(a), vb = V::set1(b);
  for (int i = 0; i < d_pad; i += 16)
    fma(V::load(run_acc + i), va, mul(V::load(part_acc + i), vb)).store(run_acc + i);
}

template <class V>
bool is_finite(const float* x, int n) {
  uint32_t worst = 0;
  for (int i = 0; i < n; i += 16) {
    const V v = V::load(x + i);
    const uint32_t bits = max_abs_bits(v, v);
    worst = bits > worst ? bits : worst;
  }
  return worst < 0x7f800000u;
}

template <class V>
bool largest(const float* x, int n, float* value) {
  float top = x[0];
  V sums = V::set1(0.0f);  // of 0 * x: a NaN once one value is not finite
  int i = 0;
  if (n >= 16) {
    V best = V::load(x);
    for (; i + 16 <= n; i += 16) {
      const V v = V::load(x + i);
      best = max(best, v);
      sums = fma(v, V::set1(0.0f), sums);
    }
    top = reduce_max(best);
  }
  float sum = reduce_add(sums);
  for (; i < n; i++) {
    top = x[i] > top ? x[i] : top;
    sum += 0.0f * x[i];
  }
  *value = top;
  return sum == 0.0f;
}

// ---- plain C++, the same for all ------------------------------------------------------------------------------------

// The code at a byte of a quad vector of a group, as the file has it.
inline int code_at(Format format, const uint8_t* codes, int quad, int byte) {
  const int bits = code_bits(format);
  if (bits == 8) return codes[quad * 64 + byte];
  const int low = codes[quad / 2 * 64 + byte] >> (quad % 2 * 4) & 15;
  const uint8_t* high = codes + code_bytes(Format::Q4);
  if (bits == 5) return low | (high[quad * 8 + byte / 8] >> byte % 8 & 1) << 4;
  if (bits == 6) return low | (high[quad / 4 * 64 + byte] >> (quad % 4 * 2) & 3) << 4;
  return low;
}

// What turns the codes of one row's group into weights.
struct LaneScale {
  float scale;      // not of halved formats
  float min;        // 0 without minima
  float d;          // halved formats: what multiplies the scales of both halves
  int halves[2];
};

inline LaneScale lane_scale(Format format, const uint8_t* tile, int g, int lane) {
  const uint8_t* own = tile + scales_at(format, static_cast<size_t>(g));
  const uint16_t* halfs = reinterpret_cast<const uint16_t*>(tile + supers_at(format, static_cast<size_t>(g)));
  LaneScale out{};
  out.d = out.scale = half_to_float(halfs[lane]);
  if (has_min(format)) out.min = half_to_float(halfs[16 + lane]);
  if (is_halved(format)) {
    for (int half = 0; half < 2; half++) out.halves[half] = static_cast<int8_t>(own[16 * half + lane]);
  } else if (is_super(format)) {
    out.scale *= static_cast<float>(own[lane]);
    out.min *= -static_cast<float>(own[16 + lane]);
  }
  return out;
}

// Input k of one row of a tile of floats.
inline float float_at(Format format, const uint8_t* tile, int k, int lane) {
  const uint8_t* p = tile + float_index(format, k, lane) * float_bytes(format);
  if (format == Format::F16) return half_to_float(*reinterpret_cast<const uint16_t*>(p));
  if (format == Format::BF16) return bf16_to_float(*reinterpret_cast<const Bf16*>(p));
  return *reinterpret_cast<const float*>(p);
}

inline void dequantise_row(const PackedMatrix& w, int n, float* out) {
  const uint8_t* tile = w.tile(n / kTileRows);
  const int lane = n % kTileRows;
  if (is_float(w.format)) {
    for (int k = 0; k < w.inputs; k++) out[k] = float_at(w.format, tile, k, lane);
    return;
  }
  const int offset = w.format == Format::Q8 ? 128 : w.format == Format::Q5 ? 16 : is_halved(w.format) ? 32 : 0;
  for (int g = 0; g < w.groups; g++) {
    const uint8_t* codes = tile + w.codes_at + static_cast<size_t>(g) * code_bytes(w.format);
    const LaneScale s = lane_scale(w.format, tile, g, lane);
    for (int k = 0; k < kGroup; k++) {
      const float code = static_cast<float>(code_at(w.format, codes, k / 4, lane * 4 + k % 4) - offset);
      const float scale = is_halved(w.format) ? s.d * static_cast<float>(s.halves[k / 16]) : s.scale;
      out[g * kGroup + k] = has_min(w.format) ? scale * code + s.min : scale * code;
    }
  }
}

template <class V>
KernelTable float_kernel_table(const char* name) {
  KernelTable table{};
  table.name = name;
  table.rms_norm = rms_norm<V>;
  table.quantise_rows = quantise_rows<V>;
  table.gemm_float = gemm_float<V>;
  table.is_finite = is_finite<V>;
  table.dequantise_row = dequantise_row;
  table.silu_mul = silu_mul<V>;
  table.gelu_mul = gelu_mul<V>;
  table.add = add_rows<V>;
  table.rope = rope<V>;
  table.append_keys = append_keys<V>;
  table.append_values = append_values<V>;
  table.divide = divide<V>;
  table.attend_split = attend_split<V>;
  table.attend_combine = attend_combine<V>;
  table.largest = largest<V>;
  table.exp_f32 = exp_f32<V>;
  return table;
}

}  // namespace
}  // namespace forerun
