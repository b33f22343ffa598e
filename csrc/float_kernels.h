// The float kernels, written once over a vector type V of sixteen lanes (scalar::V16, avx2::V16, avx512::V16).
// Orders of summation are part of the contract: see ARCHITECTURE.md, "Numerics".
#pragma once
#include <cmath>
#include <cstring>

#include "half.h"
#include "layout.h"

namespace forerun {
namespace {

constexpr float kNegInf = -__builtin_inff();

// exp(x) for x <= 88; exactly 0 below -87. Cephes' expf polynomial, every product and sum an explicit FMA.
template <class V>
inline V exp_v(V x) {
  V clamped = min(x, V::set1(88.0f));
  clamped = max(clamped, V::set1(-87.5f));
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
  return zero_where_less(x, V::set1(-87.0f), mul(y, pow2(n)));
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

template <class V>
void rms_norm(const float* x, const float* w, float eps, int n, float* out) {
  V acc = V::set1(0.0f);
  for (int i = 0; i < n; i += 16) {
    V v = V::load(x + i);
    acc = fma(v, v, acc);
  }
  float mean = reduce_add(acc) / static_cast<float>(n);
  V inv = V::set1(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < n; i += 16) mul(mul(V::load(x + i), inv), V::load(w + i)).store(out + i);
}

template <class V>
bool quantise_row(const float* x, const Acts& acts, int row) {
  const int block = row / acts.block_rows;
  const int in_block = row - block * acts.block_rows;
  const bool is_amx = acts.block_rows == kAmxRows;
  const int mr = is_amx ? kAmxRows : acts.block_size(block);
  int8_t* codes = acts.codes + static_cast<size_t>(block) * acts.block_rows * acts.inputs;
  const size_t at = acts.group_at(block) + in_block;
  bool is_finite = true;
  for (int g = 0; g < acts.groups; g++) {
    V a = V::load(x + g * kGroup), b = V::load(x + g * kGroup + 16);
    uint32_t bits = max_abs_bits(a, b);
    float amax;
    std::memcpy(&amax, &bits, 4);
    alignas(64) int8_t group[kGroup];
    int32_t sum = 0;
    float scale = 0.0f;
    // Below 1e-30 the reciprocal could leave the float range; such a group is zero.
    if (bits >= 0x7f800000u || !(amax > 1e-30f)) {
      if (bits >= 0x7f800000u) is_finite = false;
      std::memset(group, 0, kGroup);
    } else {
      scale = amax / 127.0f;
      V inv = V::set1(127.0f / amax);
      sum = store_codes(round_to_int(mul(a, inv)), round_to_int(mul(b, inv)), group);
    }
    if (is_amx) {
      std::memcpy(codes + (static_cast<size_t>(g) * kAmxRows + in_block) * kGroup, group, kGroup);
    } else if (mr == 1) {
      std::memcpy(codes + g * kGroup, group, kGroup);
    } else {
      for (int q = 0; q < kQuads; q++)
        std::memcpy(codes + (static_cast<size_t>(g * kQuads + q) * mr + in_block) * 4, group + 4 * q, 4);
    }
    acts.scale[at + static_cast<size_t>(g) * mr] = scale;
    acts.scaled_sum[at + static_cast<size_t>(g) * mr] = scale * static_cast<float>(sum);
    acts.sum[at + static_cast<size_t>(g) * mr] = sum;
  }
  return is_finite;
}

template <class V>
void silu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += 16) {
    V g = V::load(gate + i);
    V e = exp_v(neg(g));
    mul(div(g, add(V::set1(1.0f), e)), V::load(up + i)).store(out + i);
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

template <class V, class E>
void append_value_as(const KvLayer& kv, int page, int lane, int kv_head, const float* v) {
  E* values = static_cast<E*>(kv.data) + kv.offset(page, kv_head) + static_cast<size_t>(kPageTokens) * kv.head_dim +
              static_cast<size_t>(lane) * kv.d_pad;
  int d = 0;
  for (; d + 16 <= kv.head_dim; d += 16) V::load(v + d).store(values + d);
  for (; d < kv.head_dim; d++) store_elem(v[d], &values[d]);
}

template <class V>
void append_key(const KvLayer& kv, int page, int lane, int kv_head, const float* k) {
  if (kv.is_f32)
    append_key_as<V, float>(kv, page, lane, kv_head, k);
  else
    append_key_as<V, uint16_t>(kv, page, lane, kv_head, k);
}

template <class V>
void append_value(const KvLayer& kv, int page, int lane, int kv_head, const float* v) {
  if (kv.is_f32)
    append_value_as<V, float>(kv, page, lane, kv_head, v);
  else
    append_value_as<V, uint16_t>(kv, page, lane, kv_head, v);
}

template <class V>
void divide(const float* x, float by, int n, float* out) {
  V b = V::set1(by);
  int i = 0;
  for (; i + 16 <= n; i += 16) div(V::load(x + i), b).store(out + i);
  for (; i < n; i++) out[i] = x[i] / by;
}

// ---- attention -----------------------------------------------------------------------------------------------------

// A pair is (row, head of the group): pair = row * group_heads + head.
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

// scores[pair][16 * page] for P pairs and N pages at once: one FMA chain over d per score.
template <class V, class E, int P, int N>
inline void score_pages(const float* const* q, int d, const PageRef<E>* pages, float* const* scores) {
  V acc[P][N];
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n] = V::set1(0.0f);
  for (int i = 0; i < d; i++) {
    V k[N];
    for (int n = 0; n < N; n++) k[n] = V::load(pages[n].keys + static_cast<size_t>(i) * kPageTokens);
    for (int p = 0; p < P; p++) {
      V x = V::set1(q[p][i]);
      for (int n = 0; n < N; n++) acc[p][n] = fma(x, k[n], acc[p][n]);
    }
  }
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n].store(scores[p] + 16 * n);
}

template <class V, class E, int P>
void score_pairs(const float* const* q, int d, const PageRef<E>* pages, int num_pages, float* const* scores) {
  constexpr int N = V::kChains / P >= 4 ? 4 : V::kChains / P >= 2 ? 2 : 1;
  float* at[P];
  int n = 0;
  for (; n + N <= num_pages; n += N) {
    for (int p = 0; p < P; p++) at[p] = scores[p] + 16 * n;
    score_pages<V, E, P, N>(q, d, pages + n, at);
  }
  for (; n < num_pages; n++) {
    for (int p = 0; p < P; p++) at[p] = scores[p] + 16 * n;
    score_pages<V, E, P, 1>(q, d, pages + n, at);
  }
}

// acc[pair][d0 .. d0 + 16 * N) += sum over positions [0, num) of prob[pair][pos] * V[pos]: one FMA chain per lane.
template <class V, class E, int P, int N>
inline void weigh_values(const float* const* prob, int num, const PageRef<E>* pages, int d_pad, int d0,
                         float* const* acc_rows) {
  V acc[P][N];
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n] = V::load(acc_rows[p] + d0 + 16 * n);
  for (int pos = 0; pos < num; pos++) {
    const E* row = pages[pos / kPageTokens].values + static_cast<size_t>(pos % kPageTokens) * d_pad + d0;
    V v[N];
    for (int n = 0; n < N; n++) v[n] = V::load(row + 16 * n);
    for (int p = 0; p < P; p++) {
      V w = V::set1(prob[p][pos]);
      for (int n = 0; n < N; n++) acc[p][n] = fma(w, v[n], acc[p][n]);
    }
  }
  for (int p = 0; p < P; p++)
    for (int n = 0; n < N; n++) acc[p][n].store(acc_rows[p] + d0 + 16 * n);
}

template <class V, class E, int P>
void weigh_pairs(const float* const* prob, int num, const PageRef<E>* pages, int d_pad, float* const* acc) {
  constexpr int N = V::kChains / P >= 4 ? 4 : V::kChains / P >= 2 ? 2 : 1;
  int d0 = 0;
  for (; d0 + 16 * N <= d_pad; d0 += 16 * N) weigh_values<V, E, P, N>(prob, num, pages, d_pad, d0, acc);
  for (; d0 < d_pad; d0 += 16) weigh_values<V, E, P, 1>(prob, num, pages, d_pad, d0, acc);
}

// Calls f8, f4, f3, f2 or f1 with the first of 8, 4, 3, 2 or 1 pairs, so that their number is a constant inside.
template <class V, class F8, class F4, class F3, class F2, class F1>
inline void for_pairs(int num, F8 f8, F4 f4, F3 f3, F2 f2, F1 f1) {
  int p = 0;
  if (V::kChains >= 8)
    for (; num - p >= 8; p += 8) f8(p);
  while (num - p > 0) {
    int left = num - p;
    if (left >= 4) {
      f4(p);
      p += 4;
    } else if (left == 3) {
      f3(p);
      p += 3;
    } else if (left == 2) {
      f2(p);
      p += 2;
    } else {
      f1(p);
      p += 1;
    }
  }
}

// The slot of the j-th tail position of a row, in ancestor order.
inline int tail_slot(const RowView& row, int j) {
  uint64_t mask = row.tail_mask;
  for (; j > 0; j--) mask &= mask - 1;
  return row.tail_base + __builtin_ctzll(mask);
}

template <class V, class E>
void attend_split_as(const AttendArgs& args, int split, const Partial& out) {
  const KvLayer& kv = *args.kv;
  const int d = kv.head_dim, d_pad = kv.d_pad, heads = args.group_heads;
  const int begin = split * kSplit;
  const int num_pairs = args.num_rows * heads;
  float* scores = args.scratch;                                     // [pairs][kSplit]
  const float* q[kMaxPairs];
  float* s[kMaxPairs];
  const float* prob[kMaxPairs];
  float* acc[kMaxPairs];
  int dense[kMaxPairs], total[kMaxPairs];  // per row: positions of this split, dense and with the tail
  int most_dense = 0, least_dense = kSplit;
  for (int r = 0; r < args.num_rows; r++) {
    const RowView& row = args.rows[r];
    auto inside = [&](int len) { return len <= begin ? 0 : len - begin < kSplit ? len - begin : kSplit; };
    dense[r] = inside(row.visible_len);
    total[r] = inside(row.total_len());
    most_dense = dense[r] > most_dense ? dense[r] : most_dense;
    least_dense = dense[r] < least_dense ? dense[r] : least_dense;
    for (int h = 0; h < heads; h++) {
      int p = r * heads + h;
      q[p] = args.q + static_cast<size_t>(r) * args.q_stride + static_cast<size_t>(args.kv_head * heads + h) * d;
      s[p] = scores + static_cast<size_t>(p) * kSplit;
      prob[p] = s[p];
      acc[p] = out.acc + static_cast<size_t>(p) * d_pad;
    }
  }
  PageRef<E> pages[kSplit / kPageTokens];
  const int num_pages = (most_dense + kPageTokens - 1) / kPageTokens;
  const int32_t* table = args.rows[0].page_table + begin / kPageTokens;
  for (int i = 0; i < num_pages; i++) pages[i] = page_at<E>(kv, args.kv_head, table[i]);

  for_pairs<V>(
      num_pairs, [&](int p) { score_pairs<V, E, 8>(q + p, d, pages, num_pages, s + p); },
      [&](int p) { score_pairs<V, E, 4>(q + p, d, pages, num_pages, s + p); },
      [&](int p) { score_pairs<V, E, 3>(q + p, d, pages, num_pages, s + p); },
      [&](int p) { score_pairs<V, E, 2>(q + p, d, pages, num_pages, s + p); },
      [&](int p) { score_pairs<V, E, 1>(q + p, d, pages, num_pages, s + p); });

  for (int r = 0; r < args.num_rows; r++) {
    if (total[r] == 0) continue;
    const RowView& row = args.rows[r];
    for (int h = 0; h < heads; h++) {
      int p = r * heads + h;
      for (int pos = dense[r]; pos < total[r]; pos++) {  // the row's own ancestors, one chain over d as above
        int slot = tail_slot(row, begin + pos - row.visible_len);
        const E* key = page_at<E>(kv, args.kv_head, row.page_table[slot / kPageTokens]).keys + slot % kPageTokens;
        float x = 0.0f;
        for (int i = 0; i < d; i++) x = std::fmaf(q[p][i], load_elem(key + static_cast<size_t>(i) * kPageTokens), x);
        s[p][pos] = x;
      }
      const int padded = round_up(total[r], 16);
      for (int pos = total[r]; pos < padded; pos++) s[p][pos] = kNegInf;
      V best = V::load(s[p]);
      for (int i = 16; i < padded; i += 16) best = max(best, V::load(s[p] + i));
      const float top = reduce_max(best);
      V sum = V::set1(0.0f);
      for (int i = 0; i < padded; i += 16) {
        V e = exp_v(sub(V::load(s[p] + i), V::set1(top)));
        e.store(s[p] + i);
        sum = add(sum, e);
      }
      out.max[p] = top;
      out.sum[p] = reduce_add(sum);
      std::memset(acc[p], 0, sizeof(float) * static_cast<size_t>(d_pad));
    }
  }

  // Positions that every row sees, all pairs at once; then each row's own rest. The chain per lane is the same.
  for_pairs<V>(
      num_pairs, [&](int p) { weigh_pairs<V, E, 8>(prob + p, least_dense, pages, d_pad, acc + p); },
      [&](int p) { weigh_pairs<V, E, 4>(prob + p, least_dense, pages, d_pad, acc + p); },
      [&](int p) { weigh_pairs<V, E, 3>(prob + p, least_dense, pages, d_pad, acc + p); },
      [&](int p) { weigh_pairs<V, E, 2>(prob + p, least_dense, pages, d_pad, acc + p); },
      [&](int p) { weigh_pairs<V, E, 1>(prob + p, least_dense, pages, d_pad, acc + p); });
  for (int r = 0; r < args.num_rows; r++) {
    const RowView& row = args.rows[r];
    for (int pos = least_dense; pos < total[r]; pos++) {
      int slot = pos < dense[r] ? begin + pos : tail_slot(row, begin + pos - row.visible_len);
      const E* value = page_at<E>(kv, args.kv_head, row.page_table[slot / kPageTokens]).values +
                       static_cast<size_t>(slot % kPageTokens) * d_pad;
      for (int h = 0; h < heads; h++) {
        int p = r * heads + h;
        V w = V::set1(prob[p][pos]);
        for (int i = 0; i < d_pad; i += 16) fma(w, V::load(value + i), V::load(acc[p] + i)).store(acc[p] + i);
      }
    }
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
  const float a = exp_scalar<V>(*run_max - top), b = exp_scalar<V>(part_max - top);
  *run_max = top;
  *run_sum = std::fmaf(*run_sum, a, part_sum * b);
  V va = V::set1(a), vb = V::set1(b);
  for (int i = 0; i < d_pad; i += 16)
    fma(V::load(run_acc + i), va, mul(V::load(part_acc + i), vb)).store(run_acc + i);
}

template <class V>
int argmax(const float* x, int n, float* value) {
  float top = x[0];
  int i = 0;
  if (n >= 16) {
    V best = V::load(x);
    for (i = 16; i + 16 <= n; i += 16) best = max(best, V::load(x + i));
    top = reduce_max(best);
  }
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  *value = top;
  for (int k = 0; k < n; k++)
    if (x[k] == top) return k;
  return 0;
}

// ---- float weights -------------------------------------------------------------------------------------------------

template <class V, int MR, int RB>
inline void gemm_f32_block(const PackedMatrix& w, int tile, const float* x, size_t ldx, float* out, size_t ldo) {
  V acc[MR][RB];
  for (int m = 0; m < MR; m++)
    for (int r = 0; r < RB; r++) acc[m][r] = V::set1(0.0f);
  const float* tiles[RB];
  for (int r = 0; r < RB; r++) tiles[r] = reinterpret_cast<const float*>(w.tile(tile + r));
  for (int k = 0; k < w.inputs; k++) {
    V wv[RB];
    for (int r = 0; r < RB; r++) wv[r] = V::load(tiles[r] + static_cast<size_t>(k) * 16);
    for (int m = 0; m < MR; m++) {
      V xv = V::set1(x[m * ldx + k]);
      for (int r = 0; r < RB; r++) acc[m][r] = fma(xv, wv[r], acc[m][r]);
    }
  }
  for (int m = 0; m < MR; m++)
    for (int r = 0; r < RB; r++) acc[m][r].store(out + m * ldo + 16 * r);
}

template <class V, int MR>
void gemm_f32_rows(const PackedMatrix& w, int tile, int num_tiles, const float* x, size_t ldx, float* out, size_t ldo) {
  constexpr int RB = V::kChains / MR >= 4 ? 4 : V::kChains / MR >= 2 ? 2 : 1;
  int i = 0;
  for (; i + RB <= num_tiles; i += RB) gemm_f32_block<V, MR, RB>(w, tile + i, x, ldx, out + 16 * i, ldo);
  for (; i < num_tiles; i++) gemm_f32_block<V, MR, 1>(w, tile + i, x, ldx, out + 16 * i, ldo);
}

template <class V>
void gemm_f32(const PackedMatrix& w, int tile, int num_tiles, const float* x, size_t ldx, int mr, float* out,
              size_t ldo) {
  switch (mr) {
    case 1: return gemm_f32_rows<V, 1>(w, tile, num_tiles, x, ldx, out, ldo);
    case 2: return gemm_f32_rows<V, 2>(w, tile, num_tiles, x, ldx, out, ldo);
    case 3: return gemm_f32_rows<V, 3>(w, tile, num_tiles, x, ldx, out, ldo);
    case 4: return gemm_f32_rows<V, 4>(w, tile, num_tiles, x, ldx, out, ldo);
    case 5: return gemm_f32_rows<V, 5>(w, tile, num_tiles, x, ldx, out, ldo);
    case 6: return gemm_f32_rows<V, 6>(w, tile, num_tiles, x, ldx, out, ldo);
    case 7: return gemm_f32_rows<V, 7>(w, tile, num_tiles, x, ldx, out, ldo);
    default: return gemm_f32_rows<V, 8>(w, tile, num_tiles, x, ldx, out, ldo);
  }
}

// ---- plain C++, the same for all ------------------------------------------------------------------------------------

inline void dequantise_row(const PackedMatrix& w, int n, float* out) {
  const uint8_t* tile = w.tile(n / kTileRows);
  const int lane = n % kTileRows;
  if (w.format == Format::F32) {
    const float* values = reinterpret_cast<const float*>(tile);
    for (int k = 0; k < w.inputs; k++) out[k] = values[static_cast<size_t>(k) * kTileRows + lane];
    return;
  }
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(tile);
  const uint8_t* codes = tile + w.codes_at;
  for (int k = 0; k < w.inputs; k++) {
    const int g = k / kGroup, quad = k % kGroup / 4;
    if (w.format == Format::Q4) {
      const float s = half_to_float(scales[g * 32 + lane]), m = half_to_float(scales[g * 32 + 16 + lane]);
      const uint8_t byte = codes[(static_cast<size_t>(g) * 4 + quad / 2) * 64 + lane * 4 + k % 4];
      out[k] = s * static_cast<float>(quad % 2 ? byte >> 4 : byte & 15) + m;
    } else {
      const float s = half_to_float(scales[g * 16 + lane]);
      const uint8_t byte = codes[(static_cast<size_t>(g) * kQuads + quad) * 64 + lane * 4 + k % 4];
      out[k] = s * static_cast<float>(static_cast<int>(byte) - 128);
    }
  }
}

template <class V>
KernelTable float_kernel_table(const char* name) {
  KernelTable table{};
  table.name = name;
  table.rms_norm = rms_norm<V>;
  table.quantise_row = quantise_row<V>;
  table.gemm_f32 = gemm_f32<V>;
  table.dequantise_row = dequantise_row;
  table.silu_mul = silu_mul<V>;
  table.add = add_rows<V>;
  table.rope = rope<V>;
  table.append_key = append_key<V>;
  table.append_value = append_value<V>;
  table.divide = divide<V>;
  table.attend_split = attend_split<V>;
  table.attend_combine = attend_combine<V>;
  table.argmax = argmax<V>;
  table.exp_f32 = exp_f32<V>;
  return table;
}

}  // namespace
}  // namespace forerun
