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

constexpr int kSuperGroups = 8;  // groups that share a K format's super-scales

// How the weights of a matrix are packed; x is a code as the file has it. K formats keep two fp16 for eight groups and
// small integers for each, whose products are exact in float32.
enum class Format : int {
  F32 = 0,
  Q8 = 1,   // w = scale * (x - 128)                            Q8_0, IQ4_NL
  Q4 = 2,   // w = scale * x + min                              Q4_0, Q4_1
  Q5 = 3,   // w = scale * (x - 16)                             Q5_0
  Q5M = 4,  // w = scale * x + min                              Q5_1
  Q4K = 5,  // w = (d * scale) * x - (dmin * min)               Q4_K
  Q5K = 6,  // w = (d * scale) * x - (dmin * min)               Q5_K
  Q6K = 7,  // w = (d * scale of its half group) * (x - 32)     Q6_K, Q3_K
  F16 = 8,
  BF16 = 9,
};

constexpr bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }
// Bytes of a weight of a float format.
constexpr size_t float_bytes(Format f) { return f == Format::F32 ? 4 : 2; }
// Where input k of one output row lies in a tile of floats, counted in weights.
constexpr size_t float_index(Format f, int k, int lane) {
  const size_t input = static_cast<size_t>(k), row = static_cast<size_t>(lane);
  return f == Format::BF16 ? input / 2 * 2 * kTileRows + 2 * row + input % 2 : input * kTileRows + row;
}

constexpr int code_bits(Format f) {
  return f == Format::Q4 || f == Format::Q4K ? 4 : f == Format::Q6K ? 6 : f == Format::Q8 ? 8 : 5;
}
constexpr bool is_super(Format f) { return f == Format::Q4K || f == Format::Q5K || f == Format::Q6K; }
constexpr bool has_min(Format f) {
  return f == Format::Q4 || f == Format::Q5M || f == Format::Q4K || f == Format::Q5K;
}
constexpr bool is_halved(Format f) { return f == Format::Q6K; }  // 16 inputs share a scale
// Codes reach the product as w + 128.
constexpr bool is_offset(Format f) { return f == Format::Q8 || f == Format::Q5; }

template <Format F>
struct FormatIs {
  static constexpr Format value = F;
};

// Calls f(FormatIs<format>{}) for a quantised format, so that it is a constant inside.
template <class Fn>
inline void with_format(Format format, Fn f) {
  switch (format) {
    case Format::Q4: return f(FormatIs<Format::Q4>{});
    case Format::Q5: return f(FormatIs<Format::Q5>{});
    case Format::Q5M: return f(FormatIs<Format::Q5M>{});
    case Format::Q4K: return f(FormatIs<Format::Q4K>{});
    case Format::Q5K: return f(FormatIs<Format::Q5K>{});
    case Format::Q6K: return f(FormatIs<Format::Q6K>{});
    default: return f(FormatIs<Format::Q8>{});
  }
}

// Bytes of a tile's group: codes, and scales.
constexpr size_t code_bytes(Format f) { return 64 * static_cast<size_t>(code_bits(f)); }
constexpr size_t scale_bytes(Format f) { return has_min(f) && !is_super(f) ? 64 : 32; }
constexpr size_t super_bytes(Format f) { return !is_super(f) ? 0 : has_min(f) ? 64 : 32; }
// Where the scales of group g lie in a tile; those of a super-group follow its super-scales.
constexpr size_t scales_at(Format f, size_t g) {
  const size_t before = is_super(f) ? (g / kSuperGroups + 1) * super_bytes(f) : 0;
  return before + g * scale_bytes(f);
}
// Where the fp16 that group g is scaled by lie in a tile: the super-scales of its super-group, or its own.
constexpr size_t supers_at(Format f, size_t g) {
  return is_super(f) ? scales_at(f, g / kSuperGroups * kSuperGroups) - super_bytes(f) : scales_at(f, g);
}

// One matrix in tiles of 16 output rows. Tail rows are zero codes with zero scales. A tile is all its scales, padded to
// 64 bytes, then all its codes. Per group:
//   scales  Q8, Q5: [16] fp16 scale     Q4, Q5M: [16] fp16 scale, [16] fp16 min
//           K: before each eighth group [16] fp16 d, with minima [16] fp16 dmin; then [16] scale, [16] min as bytes;
//           Q6K: [16] scale of inputs 0 to 15, [16] of 16 to 31, signed bytes
//   codes   low four bits: [4][64], low nibbles are quad 2j, high nibbles quad 2j + 1   (Q8: whole bytes, [8][64])
//           fifth bit: [8] words of 64 bits, one a quad
//           bits five and six: [2][64], two bits a quad from the lowest on
// A quad vector is [16 output rows][4 inputs] bytes.
// Float formats have no groups; an odd number of inputs is padded with zeros. F32, F16: [inputs][16 output rows]
// BF16: [inputs / 2][16 output rows][2 inputs], of which one load and one operation each make two vectors of floats.
struct PackedMatrix {
  Format format;
  int outputs;        // N, before padding to whole tiles
  int inputs;         // K, a multiple of kGroup, for K formats of 256, for float formats any number
  int tiles;          // ceil(N / 16)
  int groups;         // K / kGroup, 0 for float formats
  size_t codes_at;    // bytes from a tile's start to its codes
  size_t tile_bytes;  // a multiple of 64
  uint8_t* data;      // 64-byte aligned

  const uint8_t* tile(int t) const { return data + static_cast<size_t>(t) * tile_bytes; }
};

// Quantised activations of a pass (A8): symmetric int8 per row and group, scale = amax / 127.
// Rows lie in blocks; a block of mr rows starts at row0 = block * block_rows.
//   quads (block_rows 8):  codes [K / 4][mr][4]
//                          scale, scaled_sum, bias [groups][mr], half_bias [groups][2][mr]
//   AMX   (block_rows 16): codes [groups][16][32 bytes], the others with mr = 16
struct Acts {
  int8_t* codes;
  float* scale;
  float* scaled_sum;  // scale * sum of the group's codes, one rounding
  int32_t* bias;      // -128 * sum of the group's codes: turns a product with u8 codes w + 128 into one with w
  int32_t* half_bias;  // -32 * sum of each half's codes: the same for codes w + 32
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

// The keys of one split, page by page, that a thread reads next: what it may fetch into its cache meanwhile.
struct KeysAhead {
  const uint8_t* pages[kSplit / kPageTokens];
  int num_pages = 0;
  size_t page_bytes = 0;  // of the keys alone
};

// One attention work item: a few query rows of one sequence and all heads of one KV head, over a range of splits.
struct AttendArgs {
  const KvLayer* kv;
  const float* q;         // [M][q_stride], RoPE and scale applied; head h at h * head_dim
  size_t q_stride;
  const RowView* rows;    // [num_rows], of one sequence
  int num_rows;           // num_rows * group_heads <= kMaxPairs
  int group_heads;        // query heads per KV head
  int kv_head;
  int window;             // a row sees only its last so many logical positions; 0: all
  float* scratch;         // attend_scratch_floats()
  KeysAhead ahead;        // what comes after this split
};

// The first split in which a row sees anything.
inline int first_split(const RowView& row, int window) {
  const int hidden = row.total_len() - window;
  return window > 0 && hidden > 0 ? hidden / kSplit : 0;
}

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

}  // namespace forerun
