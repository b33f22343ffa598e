// The table of kernels of one instruction set. All sets compute the same bits; the scalar one is the reference.
#pragma once
#include "layout.h"

namespace forerun {

struct KernelTable {
  const char* name;
  bool has_amx;

  // Row by row out[i] = x[i] * inv * w[i], inv = 1 / sqrt(mean(x^2) + eps); n floats, buffers readable and zero up to a
  // multiple of 16. The rows of x lie anywhere, those of out ldo floats apart; num_rows <= kBlockRows.
  void (*rms_norm)(const float* const* x, int num_rows, const float* w, float eps, int n, float* out, size_t ldo);
  // Quantises groups [group, group + num_groups) of rows [row, row + num_rows) of `acts`, at most kBlockRows rows of
  // one block, from x, which points to the first of them and has ldx floats from one row to the next. Bit i of the
  // result: row i holds a NaN or an infinity there.
  uint32_t (*quantise_rows)(const float* x, size_t ldx, int num_rows, const Acts& acts, int row, int group,
                            int num_groups);
  // All rows of `acts` times tiles [tile, tile + num_tiles): out[row * ldo + 16 * i + lane]. `scratch` holds
  // unpacked_bytes(w), 64-byte aligned.
  void (*gemm_quant)(const PackedMatrix& w, int tile, int num_tiles, const Acts& acts, float* out, size_t ldo,
                     uint8_t* scratch);
  // The same for float weights and rows of x, ldx floats apart.
  void (*gemm_float)(const PackedMatrix& w, int tile, int num_tiles, const float* x, size_t ldx, int num_rows,
                     float* out, size_t ldo, uint8_t* scratch);
  // Whether x[0, n) holds neither a NaN nor an infinity; readable up to a multiple of 16, finite past n.
  bool (*is_finite)(const float* x, int n);
  // Row `n` of a packed matrix, dequantised.
  void (*dequantise_row)(const PackedMatrix& w, int n, float* out);
  // out = gate / (1 + exp(-gate)) * up, n a multiple of 16.
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  // out = gelu(gate) * up in the tanh form, n a multiple of 16.
  void (*gelu_mul)(const float* gate, const float* up, int n, float* out);
  // out = a + b, n a multiple of 16.
  void (*add)(const float* a, const float* b, int n, float* out);
  // Rotates one head in place, pairs (i, i + half): y0 = x0 c - x1 s, y1 = x1 c + x0 s, then multiplies by scale.
  void (*rope)(float* head, const float* cos, const float* sin, int half, float scale);
  // Writes the keys of one head of num_tokens tokens, the first into `lane` of a page and all in it; k holds them ldk
  // apart.
  void (*append_keys)(const KvLayer& kv, int page, int lane, int num_tokens, int kv_head, const float* k, size_t ldk);
  // The same for dimensions [begin, end) of their values; v points to the first one's dimension `begin`.
  void (*append_values)(const KvLayer& kv, int page, int lane, int num_tokens, int kv_head, int begin, int end,
                        const float* v, size_t ldv);
  // out = x / by.
  void (*divide)(const float* x, float by, int n, float* out);
  // Partial softmax over one split, for the pairs whose rows have positions in it; others are left untouched.
  void (*attend_split)(const AttendArgs& args, int split, const Partial& out);
  // Folds `part` of one pair into the running (max, sum, acc[d_pad]).
  void (*attend_combine)(float part_max, float part_sum, const float* part_acc, int d_pad, float* run_max,
                         float* run_sum, float* run_acc);
  // The largest of x[0, n), n >= 1. Returns false when one is a NaN or an infinity.
  bool (*largest)(const float* x, int n, float* value);
  // exp of x[0, n), for tests.
  void (*exp_f32)(const float* x, int n, float* out);
};

// Tiles of narrow floats that are widened at once for a pass of many rows.
constexpr int kWidenedTiles = 2;
// Groups of a tile whose codes are unpacked at once: beside as many activations and their products they stay in L1.
constexpr int kUnpackedGroups = 18;
// What a kernel unpacks at once for such a pass: some codes of a tile as bytes, or a few tiles as float32.
inline size_t unpacked_bytes(const PackedMatrix& w) {
  if (!is_float(w.format)) return static_cast<size_t>(kTileRows) * kGroup * kUnpackedGroups;
  return w.format == Format::F32 ? 0 : kWidenedTiles * w.tile_bytes * sizeof(float) / float_bytes(w.format);
}

// Pages that the 64 slots of a tail may touch.
constexpr int kTailPages = 64 / kPageTokens + 1;
// Floats from one pair's scores to the next's: the positions of a split, then the scores of the tail's pages, and one
// vector more so that pairs don't share cache sets.
constexpr int kScoreStride = kSplit + (kTailPages + 1) * kPageTokens;
// Queries of a block lie as [ceil(d / kQueryChunk)][pairs][kQueryChunk], so that pairs are a constant apart.
constexpr int kQueryChunk = 64;

// Floats of scratch that attend_split needs: scores and queries of a block of pairs.
inline size_t attend_scratch_floats(int head_dim) {
  return static_cast<size_t>(kBlockPairs) * (kScoreStride + round_up(head_dim, kQueryChunk));
}

const KernelTable& scalar_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx512vnni_kernels();
const KernelTable& amx_kernels();

}  // namespace forerun
