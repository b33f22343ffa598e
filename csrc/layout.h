// Plain structs that kernels and the program share. Knows no instruction set, no Python and no torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace forerun {

constexpr int kTileRows = 16;    // output rows of a packed tile, lanes of a vector
constexpr int kGroup = 32;       // inputs that share a weight scale and an activation scale
constexpr int kQuads = kGroup / 4;
constexpr int kBlockRows = 8;    // activation rows a microkernel takes at most
constexpr int kAmxRows = 16;     // activation rows of an AMX block
constexpr int kPageTokens = 16;  // tokens of a KV page, lanes of a score vector
constexpr int kSplit = 256;      // logical positions of one softmax split
constexpr int kMaxPairs = 36;    // (query row, head) pairs of an attention work item
constexpr int kBlockPairs = 12;  // pairs that share a pass over a page, at most

enum class Format : int { F32 = 0, Q8 = 1, Q4 = 2 };

// One matrix in tiles of 16 output rows. Tail rows are zero codes with zero scales.
//   Q4 tile:  [groups][16 fp16 scale | 16 fp16 min]  then codes [groups][4][64 bytes],
//             low nibbles are quad 2j, high nibbles quad 2j + 1; w = scale * code + min
//   Q8 tile:  [groups][16 fp16 scale], padded to 64 bytes, then codes [groups][8][64 bytes]; w = scale * (code - 128)
//   F32 tile: [inputs][16 float]
// A quad vector is [16 output rows][4 inputs] bytes.
struct PackedMatrix {
  Format format;
  int outputs;        // N, before padding to whole tiles
  int inputs;         // K, a multiple of kGroup unless F32
  int tiles;          // ceil(N / 16)
  int groups;         // K / kGroup, 0 for F32
  size_t codes_at;    // bytes from a tile's start to its codes
  size_t tile_bytes;  // a multiple of 64
  uint8_t* data;      // 64-byte aligned

  const uint8_t* tile(int t) const { return data + static_cast<size_t>(t) * tile_bytes; }
};

// Quantised activations of a pass (A8): symmetric int8 per row and group, scale = amax / 127.
// Rows lie in blocks; a block of mr rows starts at row0 = block * block_rows.
//   quads (block_rows 8):  codes [K / 4][mr][4]          scale, scaled_sum, bias [groups][mr]
//   AMX   (block_rows 16): codes [groups][16][32 bytes]  scale, scaled_sum, bias [groups][16]
struct Acts {
  int8_t* codes;
  float* scale;
  float* scaled_sum;  // scale * sum of the group's codes, one rounding
  int32_t* bias;      // -128 * sum of the group's codes: turns a product with u8 codes w + 128 into one with w
  int rows;
  int inputs;
  int groups;
  int block_rows;

  int block_size(int block) const {
    int left = rows - block * block_rows;
    return left < block_rows ? left : block_rows;
  }
  int num_blocks() const { return (rows + block_rows - 1) / block_rows; }
  const int8_t* block_codes(int block) const { return codes + static_cast<size_t>(block) * block_rows * inputs; }
  size_t group_at(int block) const { return static_cast<size_t>(block) * block_rows * groups; }
};

// Keys and values of one layer. A page of one KV head holds K as [D][16 tokens], then V as [16 tokens][d_pad].
struct KvLayer {
  void* data;
  bool is_f32;
  int num_kv_heads;
  int head_dim;
  int d_pad;  // head_dim rounded up to 16

  size_t page_elems() const { return static_cast<size_t>(kPageTokens) * (head_dim + d_pad); }
  size_t offset(int page, int kv_head) const {
    return (static_cast<size_t>(page) * num_kv_heads + kv_head) * page_elems();
  }
};

// Where a row stands and what it sees: the slots [0, visible_len) of its sequence, then tail_base + i for each set bit
// i of tail_mask, in that order. Its logical positions count along that list.
struct RowView {
  int32_t position;  // RoPE
  int32_t slot;      // where its own K and V go
  int32_t visible_len;
  int32_t tail_base;
  uint64_t tail_mask;
  const int32_t* page_table;

  int total_len() const { return visible_len + __builtin_popcountll(tail_mask); }
};

// Partial softmax of one (row, head) pair over one split.
struct Partial {
  float* max;      // [pairs]
  float* sum;      // [pairs]
  float* acc;      // [pairs][d_pad]
};

// Floats of one Partial.
inline size_t partial_floats(int d_pad) { return static_cast<size_t>(kMaxPairs) * (2 + static_cast<size_t>(d_pad)); }

inline Partial partial_at(float* data) { return {data, data + kMaxPairs, data + 2 * kMaxPairs}; }

// One attention work item: a few query rows of one sequence and all heads of one KV head, over a range of splits.
struct AttendArgs {
  const KvLayer* kv;
  const float* q;         // [M][q_stride], RoPE and scale applied; head h at h * head_dim
  size_t q_stride;
  const RowView* rows;    // [num_rows], of one sequence
  int num_rows;           // num_rows * group_heads <= kMaxPairs
  int group_heads;        // query heads per KV head
  int kv_head;
  float* scratch;         // attend_scratch_floats()
};

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

}  // namespace forerun
