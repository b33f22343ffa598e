// A model as a list of instructions, replayed once per step by all threads of a pool. Further lists over the same
// weights and cache are its variants.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "memory.h"
#include "pack.h"
#include "pool.h"

namespace forerun {

// Up to this many rows every thread prepares a matrix's inputs for itself, which is cheaper than a barrier and than
// fetching what another core has written.
constexpr int kPrivateRows = 16;
// Passes of as many rows multiply them in blocks of kAmxRows where the machine has tiles. A block's products cost the same
// however few rows it has, so up to kMaxUntiledRows that are left over go without.
constexpr int kMinTiledRows = 16;
constexpr int kMaxUntiledRows = 4;
constexpr int kMaxTilesAtOnce = 12;  // a multiple of every number of tiles that a microkernel takes
constexpr size_t kOutputCacheBytes = 64 << 10;  // what a run of tiles makes waits for its epilogue in L2

enum class Op : int { Embed = 0, Linear = 1, Attention = 2, LinearAdd = 3, Gated = 4, Logits = 5, NormAdd = 6 };
constexpr int kNumOps = 7;
enum class Activation : int { Silu = 0, GeluTanh = 1 };

// One instruction. Buffers are indices; -1 is none. Set by the recorder, checked by Program::add.
struct Instr {
  Op op;
  int in = -1;            // [M][width] input
  int residual = -1;      // LinearAdd, NormAdd
  int out = -1;
  std::vector<int> weights;  // matrices whose outputs lie side by side; Gated: gate, up
  int norm = -1;          // RMSNorm weight before a linear map, or none; NormAdd: of its input
  float eps = 0.0f;
  int bias = -1;          // vector added to what the matrices give, or none
  Activation activation = Activation::Silu;  // Gated
  int layer = -1;         // Attention, and the Linear that feeds it
  float scale = 1.0f;     // Embed: of the rows; the Linear that feeds attention: of q . k
  int order = -1;         // number of the order in which the matrices read the input's columns, or none: as they lie
  int rope = -1;          // the Linear that feeds attention: number of its table, or none
  int q_norm = -1, k_norm = -1;  // likewise: RMSNorm weights of a head, or of all heads together, or none
  float qk_eps = 0.0f;
  int window = 0;         // Attention: see AttendArgs
};

struct Geometry {
  int vocab_size;
  int num_layers;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int num_pages;
  int max_rows;
  bool is_kv_f32;
  int max_positions = INT32_MAX;  // of one sequence; the cache may hold more, of several
  int num_positions() const { return std::min(max_positions, num_pages * kPageTokens); }
};

// Numbers of a row, and so of anything that a row is multiplied with; a few together fit into an int.
constexpr int kMaxWidth = 1 << 26;
// Sizes come from outside: throw std::invalid_argument for those that are not positive or that arithmetic could not
// hold.
void check_geometry(const Geometry& geometry);
void check_matrix_shape(int outputs, int inputs);

// The columns of QKV that are a thread's: whole query and key heads, which it rotates, and some of the values.
struct QkvShare {
  Range queries, keys, values;
};
// The shares of all threads cover every column once.
QkvShare qkv_share(const Geometry& geometry, int thread, int num_threads);

// The rows of one step; every array is the caller's and outlives the call.
struct StepArgs {
  int num_rows;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* visible_len;
  const int32_t* tail_base;
  const uint64_t* tail_mask;
  const int32_t* seq_ids;
  const int32_t* page_tables;  // [num_seqs][num_table_pages]
  int num_seqs;
  int num_table_pages;
  const int32_t* logit_rows;
  int num_logit_rows;
};

class Program {
 public:
  Program(const Geometry& geometry, int num_threads, const KernelTable& kernels);

  // Packs a matrix of `outputs` x `inputs`; output row n is source row rows[n] (null: n). Throws std::invalid_argument.
  int add_matrix(SourceFormat source, int outputs, int inputs, const uint8_t* data, const int32_t* rows);
  int add_vector(const float* data, int n);
  int add_buffer(int width);
  // An order of columns: the matrices that name it have as their input k column columns[k]. Throws unless each of
  // 0 to n - 1 is there once.
  int add_order(const int32_t* columns, int n);
  // A table of cosines and sines times `magnitude`, one pair of dimensions per frequency, at most half a head's.
  int add_rope(const std::vector<double>& inv_freq, double magnitude);
  // Starts a further list over the same matrices, buffers and cache, such as a model without some of its layers, and
  // returns its number; the model's own is 0. Passes may have run before.
  int add_variant();
  // Appends to a list that no pass has run yet.
  void add(const Instr& instr, int variant = 0);

  // One pass of a list. Throws std::invalid_argument for arrays that point outside, std::runtime_error for non-finite
  // activations.
  void forward(const StepArgs& step, int variant = 0);
  const Geometry& geometry() const { return geometry_; }
  // Floats from one row of logits to the next.
  int logit_stride() const { return round_up(geometry_.vocab_size, kTileRows) + kTileRows; }
  // Valid until logits_capacity grows, with the rows of the last pass in front.
  const float* logits() const { return logits_.get(); }
  int logits_capacity() const { return static_cast<int>(logits_capacity_ / static_cast<size_t>(logit_stride())); }
  const int32_t* argmax() const { return argmax_.data(); }  // [max_rows]

  // Copies slots src[i] to dst[i] of one sequence, in order, in every layer.
  void move_slots(const int32_t* page_table, int num_table_pages, const int32_t* src, const int32_t* dst, int count);

  // Bytes of the matrices that a pass of a list reads whole.
  size_t weight_bytes(int variant = 0) const { return variants_[checked_variant(variant)].weight_bytes; }
  size_t kv_bytes() const;
  size_t scratch_bytes() const;
  Pool& pool() { return pool_; }
  const KernelTable& kernels() const { return kernels_; }

  // Seconds spent per Op by thread 0 since profiling was switched on.
  void set_profiling(bool is_on);
  const std::vector<double>& profile_s() const { return profile_s_; }

 private:
  // Room for the codes of a pass.
  struct Codes {
    Array<int8_t> codes;
    Array<float> scale, scaled_sum;
    Array<int32_t> bias, half_bias;
    void allocate(int rows, int inputs);
    size_t num_bytes() const {
      return codes.num_bytes() + scale.num_bytes() + scaled_sum.num_bytes() + bias.num_bytes() + half_bias.num_bytes();
    }
  };
  struct Buffer {
    int width;   // as declared
    int stride;  // floats from one row to the next, above the width
    Array<float> data;
    // Whoever makes these rows quantises them at once, and nobody reads them as floats.
    bool is_coded = false;
    Codes codes;
  };
  // The largest of some logits, the lowest id among equals.
  struct Best {
    float value = 0.0f;
    int id = -1;
  };
  struct ThreadScratch {
    Array<float> rows;     // [kPrivateRows][max_inputs] normalised and reordered inputs
    Array<float> unordered;  // [kBlockRows][max_inputs] normalised inputs that are yet to be reordered
    Codes codes;
    Array<float> tiles;    // outputs that wait for their epilogue
    Array<uint8_t> unpacked;  // what the largest matrix needs of unpacked_bytes
    Array<float> attend;   // attend_scratch_floats, then a Partial and a running Partial
    std::vector<Best> best;   // per logit row, of the ids that are the thread's
    size_t num_bytes() const {
      return rows.num_bytes() + unordered.num_bytes() + codes.num_bytes() + tiles.num_bytes() + unpacked.num_bytes() +
             attend.num_bytes();
    }
  };
  // The codes of a pass: those of rows in tiles, then those of the rest in blocks of kBlockRows.
  struct CodedRows {
    Acts tiled{}, rest{};
  };
  // What a linear map reads: float rows and, when a matrix is quantised, their codes.
  struct Inputs {
    const float* rows = nullptr;
    size_t stride = 0;
    bool is_coded = true;
    CodedRows codes;
  };
  // Consecutive rows whose slots follow each other in one page.
  struct SlotRun {
    int row;
    int num_rows;
    int page;
    int lane;
  };
  struct RopeTable {
    int half;
    Array<float> cos, sin;  // [positions][half]
  };
  struct AttendItem {
    int row;
    int num_rows;
    int kv_head;
    int num_splits;
    int first_part;  // of all items' parts: where its partial sums lie
  };
  // One split of an item, when items are so few that their splits are shared out.
  struct AttendPart {
    int item;
    int split;
  };

  // One list of instructions.
  struct Variant {
    std::vector<Instr> instrs;
    size_t weight_bytes = 0;
    bool has_run = false;
    // From this instruction on only the rows whose logits are wanted go on: their keys and values are all that the
    // others leave behind. It is the last attention, or the LM head of a list without any.
    size_t narrow_at = 0;
    std::vector<int> narrowed_buffers;  // what the instructions from there on read and did not make
  };

  size_t checked_variant(int variant) const;
  void check(const Instr& instr, const Variant& variant) const;
  void check_names(const Instr& instr) const;
  void check_matrices(const Instr& instr) const;
  void check_attention(const Instr& instr) const;
  void check_qkv(const Instr& instr) const;
  void validate(const StepArgs& step) const;
  void plan(const StepArgs& step);
  void reserve_partials();
  size_t most_split_items() const;
  void plan_attention();
  void plan_narrowing(Variant& variant) const;
  bool narrow(int thread);
  int longest_context(int row, int num_rows) const;
  void allocate_scratch();
  bool is_coded(int buffer) const;
  static bool narrows(const Variant& variant, int buffer);
  bool is_quantised(const Instr& instr) const;
  int num_tiled_rows() const;
  CodedRows coded_rows(const Codes& codes, int inputs) const;
  void quantise(const Instr& instr, const CodedRows& to, const float* x, size_t ldx, int row, int num_rows, int group,
                int num_groups);
  void encode(const Instr& instr, const float* x, size_t ldx, int row, int num_rows, int column, int num_columns);
  void execute(int thread);
  Inputs prepare(const Instr& instr, int thread);
  void fill_inputs(const Instr& instr, const Inputs& inputs, int row, int num_rows, int thread);
  void multiply(const PackedMatrix& w, int tile, int num_tiles, const Inputs& in, int thread, float* out, size_t ldo);
  void store_sum(const float* residual, const float* x, int n, float* out);
  int tiles_at_once(const PackedMatrix& w, int num_rows) const;
  void run_embed(const Instr& instr, int thread);
  void run_norm_add(const Instr& instr, int thread);
  void run_linear(const Instr& instr, int thread);
  void run_gated(const Instr& instr, int thread);
  void run_logits(const Instr& instr, int thread);
  void keep_best(const Instr& instr, int row, int id, int n, Best* best);
  void multiply_tiles(const Instr& instr, const PackedMatrix& w, int column, Range tiles, const Inputs& in, int thread);
  bool is_by_head() const { return geometry_.head_dim % kTileRows == 0; }
  void add_bias(const Instr& instr, int column, int n, float* row);
  bool has_wide_norm(const Instr& instr) const;
  void norm_wide(const Instr& instr, int thread);
  void norm_slice(int norm, float eps, int n, int thread, float* x);
  void rotate(const Instr& instr, const SlotRun& run, const Range& columns, int norm, float scale, int thread);
  void rotate_and_append(const Instr& instr, const QkvShare& share, int thread);
  void run_attention(const Instr& instr, int index, int thread);
  void attend_item(const Instr& instr, int item, int next, int thread);
  void attend_part(const Instr& instr, const AttendPart& part, int next, int thread);
  int num_parts() const { return static_cast<int>(parts_.empty() ? items_.size() : parts_.size()); }
  AttendPart part_at(int index) const;
  KeysAhead keys_of(int layer, const AttendPart& part) const;
  void fetch_first_keys(int layer, int thread) const;
  void combine(const AttendArgs& args, int split, const Partial& part, const Partial& run);
  AttendArgs attend_args(const Instr& instr, int row, int num_rows, int kv_head, int thread);
  void store_heads(const Instr& instr, int row, int num_rows, int kv_head, const float* sum, const float* acc);
  void flag_non_finite(const Instr& instr, int row);

  Geometry geometry_;
  const KernelTable& kernels_;
  Pool pool_;
  std::vector<PackedMatrix> matrices_;
  Arena weights_;  // what matrices_ and vectors_ point into
  struct Vector {
    const float* data;  // readable and zero up to a multiple of kGroup
    int size;
  };
  const float* vector(int index) const { return vectors_[static_cast<size_t>(index)].data; }
  int vector_size(int index) const { return vectors_[static_cast<size_t>(index)].size; }
  int width(int buffer) const { return buffers_[static_cast<size_t>(buffer)].width; }
  std::vector<Vector> vectors_;
  std::vector<std::vector<int32_t>> orders_;
  std::vector<Buffer> buffers_;
  std::vector<Variant> variants_{1};
  std::vector<KvLayer> kv_;
  Array<uint8_t> kv_data_;  // what kv_ points into
  std::vector<RopeTable> ropes_;

  int max_inputs_ = 0;
  bool has_scratch_ = false;  // that fits what was added so far
  std::vector<ThreadScratch> scratch_;
  ThreadScratch shared_;  // inputs of a pass with many rows
  Array<float> logits_;
  size_t logits_capacity_ = 0;
  std::vector<Array<float>> outgrown_logits_;  // callers may still hold views of them
  std::vector<int32_t> argmax_;

  // The step that is running.
  const StepArgs* step_ = nullptr;
  const Variant* running_ = nullptr;
  int num_rows_ = 0;  // in flight
  bool is_narrow_ = false;
  std::vector<RowView> views_;
  std::vector<SlotRun> runs_;
  std::vector<AttendItem> items_;
  std::vector<AttendPart> parts_;  // empty: whoever takes an item does all its splits
  std::unique_ptr<std::atomic<int>[]> pending_;  // per item, its parts that are not done
  Array<float> partials_;
  size_t partials_capacity_ = 0;
  std::unique_ptr<std::atomic<int>[]> next_item_;
  size_t num_counters_ = 0;
  static constexpr int64_t kAllFinite = INT64_MAX;
  std::atomic<int64_t> non_finite_{kAllFinite};  // least instruction * 2^32 + row that was seen

  bool is_profiling_ = false;
  std::vector<double> profile_s_;
};

}  // namespace forerun
