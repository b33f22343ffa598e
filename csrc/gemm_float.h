// Float weights times float rows, written once over a vector type V of sixteen lanes. One FMA chain over ascending k
// per output in float32, whatever the weights' type: narrow ones are widened, which is exact.
#pragma once
#include "counts.h"
#include "half.h"
#include "layout.h"
#include "prefetch.h"

namespace forerun {
namespace {

// Input k + i of sixteen output rows; `p` points to input k, an even one.
template <class V, int i>
inline V load_weights(const float* p) {
  return V::load(p + i * kTileRows);
}
template <class V, int i>
inline V load_weights(const uint16_t* p) {
  return V::load(p + i * kTileRows);
}
template <class V, int i>
inline V load_weights(const Bf16* p) {
  return i == 0 ? V::load_even(p) : V::load_odd(p);
}

// What a microkernel reads: tiles of elements E, `stride` bytes apart.
template <class E>
struct FloatTiles {
  const uint8_t* data;
  size_t stride;
  int inputs;

  const E* at(int tile, int k) const {
    return reinterpret_cast<const E*>(data + static_cast<size_t>(tile) * stride) + static_cast<size_t>(k) * kTileRows;
  }
};

// The rows of activations, ldx floats apart, and where their products go, ldo floats apart.
struct FloatRows {
  const float* x;
  size_t ldx;
  float* out;
  size_t ldo;

  FloatRows from(int row) const {
    return {x + static_cast<size_t>(row) * ldx, ldx, out + static_cast<size_t>(row) * ldo, ldo};
  }
};

// Input k + i of MR rows times RB tiles. Of weights and activations the fewer stay in registers.
template <int i, class V, class E, int MR, int RB>
inline void multiply_input(const FloatTiles<E>& w, const FloatRows& rows, int k, V (&acc)[MR][RB]) {
  auto weights = [&](int r) { return load_weights<V, i>(w.at(r, k)); };
  const float* x = rows.x + k + i;
  auto activation = [&](int m) { return V::set1(x[static_cast<size_t>(m) * rows.ldx]); };
  V kept[MR < RB ? MR : RB];
  if constexpr (MR < RB) {
    for (int m = 0; m < MR; m++) kept[m] = activation(m);
    for (int r = 0; r < RB; r++) {
      const V v = weights(r);
      for (int m = 0; m < MR; m++) acc[m][r] = fma(kept[m], v, acc[m][r]);
    }
  } else {
    for (int r = 0; r < RB; r++) kept[r] = weights(r);
    for (int m = 0; m < MR; m++) {
      const V v = activation(m);
      for (int r = 0; r < RB; r++) acc[m][r] = fma(v, kept[r], acc[m][r]);
    }
  }
}

constexpr size_t kFloatFetchBytes = 2048;  // that streamed tiles are fetched ahead

// MR rows times RB tiles. Streamed tiles are fetched ahead, each as the one stream that it is, whose end leads on to
// the tile that this stream takes next; beside tiles in cache `next` is fetched, `step` bytes with each pair of inputs.
template <class V, class E, int MR, int RB, bool kIsStreamed>
inline void multiply_float_tiles(const FloatTiles<E>& w, const FloatRows& rows, const uint8_t* next, size_t step) {
  constexpr size_t kPairBytes = 2 * kTileRows * sizeof(E);
  V acc[MR][RB];
  for (int m = 0; m < MR; m++)
    for (int r = 0; r < RB; r++) acc[m][r] = V::set1(0.0f);
  size_t fetched = kFloatFetchBytes;
  int k = 0;
  for (; k + 2 <= w.inputs; k += 2) {
    if constexpr (kIsStreamed) {
      const uint8_t* ahead = w.data + (fetched < w.stride ? fetched : fetched + (RB - 1) * w.stride);
      for (int r = 0; r < RB; r++, ahead += w.stride)
        for (size_t line = 0; line < kPairBytes; line += 64) fetch_to_l1(ahead + line);
      fetched += kPairBytes;
    } else {
      for (size_t line = 0; line < kPairBytes; line += 64) fetch_to_l2(next + line);
      next += step;
    }
    multiply_input<0>(w, rows, k, acc);
    multiply_input<1>(w, rows, k, acc);
  }
  if (k < w.inputs) multiply_input<0>(w, rows, k, acc);
  for (int m = 0; m < MR; m++)
    for (int r = 0; r < RB; r++)
      acc[m][r].store(rows.out + static_cast<size_t>(m) * rows.ldo + static_cast<size_t>(r) * kTileRows);
}

// So many tiles at once that their accumulators stay in registers.
template <class V, int MR>
constexpr int kFloatTilesAtOnce = V::kChains / MR >= 4 ? 4 : V::kChains / MR >= 2 ? 2 : 1;

// MR rows times num_tiles tiles, RB at once as long as there are.
template <class V, class E, int MR, int RB, bool kIsStreamed>
void multiply_float_run(FloatTiles<E> w, int num_tiles, FloatRows rows, const uint8_t* next, size_t step) {
  for (; num_tiles >= RB; num_tiles -= RB) {
    multiply_float_tiles<V, E, MR, RB, kIsStreamed>(w, rows, next, step);
    w.data += RB * w.stride;
    rows.out += RB * kTileRows;
    if constexpr (!kIsStreamed) next += step * static_cast<size_t>(w.inputs / 2);
  }
  if constexpr (RB > 1)
    if (num_tiles > 0) multiply_float_run<V, E, MR, RB / 2, kIsStreamed>(w, num_tiles, rows, next, step);
}

// At most V::kFloatRows rows.
template <class V, class E, bool kIsStreamed>
void multiply_float_block(const FloatTiles<E>& w, int num_tiles, const FloatRows& rows, int num_rows,
                          const uint8_t* next, size_t next_bytes) {
  with_count<V::kFloatRows>(num_rows, [&](auto count) {
    constexpr int MR = decltype(count)::value, RB = kFloatTilesAtOnce<V, MR>;
    const size_t num_pairs = static_cast<size_t>((num_tiles + RB - 1) / RB) * static_cast<size_t>(w.inputs / 2);
    multiply_float_run<V, E, MR, RB, kIsStreamed>(w, num_tiles, rows, next, next_bytes / (num_pairs + 1) + 1);
  });
}

// The tiles as float32, in `scratch`.
template <class V, class E>
FloatTiles<float> widened(const FloatTiles<E>& w, int num_tiles, uint8_t* scratch) {
  float* to = reinterpret_cast<float*>(scratch);
  for (int t = 0; t < num_tiles; t++) {
    for (int k = 0; k < w.inputs; k += 2, to += 2 * kTileRows) {
      load_weights<V, 0>(w.at(t, k)).store(to);
      load_weights<V, 1>(w.at(t, k)).store(to + kTileRows);
    }
  }
  return {scratch, w.stride * (sizeof(float) / sizeof(E)), w.inputs};
}

// num_tiles tiles times several blocks of rows, each of which fetches its share of the tiles after them.
template <class V, class E>
void multiply_float_blocks(const FloatTiles<E>& w, int num_tiles, const FloatRows& rows, int num_rows, int num_blocks,
                           const uint8_t* next, size_t next_bytes) {
  const int block_rows = (num_rows + num_blocks - 1) / num_blocks;
  const size_t share = next_bytes / static_cast<size_t>(num_blocks);
  for (int row = 0; row < num_rows; row += block_rows, next += share) {
    const int left = num_rows - row;
    multiply_float_block<V, E, false>(w, num_tiles, rows.from(row), left < block_rows ? left : block_rows, next, share);
  }
}

// Many blocks: to widen a tile costs about what a block of rows does.
constexpr int kManyBlocks = 8;

// Rows of one block stream the weights. Those of more take a few tiles at once, which come from memory once; for many
// blocks narrow weights are widened once.
template <class V, class E>
void gemm_float_as(FloatTiles<E> w, int num_tiles, FloatRows rows, int num_rows, uint8_t* scratch) {
  const int num_blocks = (num_rows + V::kFloatRows - 1) / V::kFloatRows;
  if (num_blocks == 1) return multiply_float_block<V, E, true>(w, num_tiles, rows, num_rows, nullptr, 0);
  for (int n; num_tiles > 0; num_tiles -= n) {
    n = num_tiles < kWidenedTiles ? num_tiles : kWidenedTiles;
    const size_t bytes = static_cast<size_t>(n) * w.stride;
    const uint8_t* next = w.data + bytes;
    if (sizeof(E) < sizeof(float) && num_blocks > kManyBlocks)
      multiply_float_blocks<V>(widened<V>(w, n, scratch), n, rows, num_rows, num_blocks, next, bytes);
    else
      multiply_float_blocks<V>(w, n, rows, num_rows, num_blocks, next, bytes);
    w.data = next;
    rows.out += n * kTileRows;
  }
}

template <class V>
void gemm_float(const PackedMatrix& w, int tile, int num_tiles, const float* x, size_t ldx, int num_rows, float* out,
                size_t ldo, uint8_t* scratch) {
  auto run = [&](auto element) {
    using E = decltype(element);
    const FloatTiles<E> tiles{w.tile(tile), w.tile_bytes, w.inputs};
    gemm_float_as<V>(tiles, num_tiles, FloatRows{x, ldx, out, ldo}, num_rows, scratch);
  };
  if (w.format == Format::F16) return run(uint16_t{});
  if (w.format == Format::BF16) return run(Bf16{});
  run(float{});
}

}  // namespace
}  // namespace forerun
