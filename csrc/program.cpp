#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "rope_table.h"

namespace forerun {
namespace {

// Up to this many rows every thread prepares the inputs for itself, which is cheaper than a barrier.
constexpr int kPrivateRows = 16;
constexpr int kMaxTilesAtOnce = 8;
constexpr size_t kTileCacheBytes = 24 << 10;  // tiles that are reused for several row blocks should stay in L1
constexpr size_t kOutputCacheBytes = 64 << 10;  // what a run of tiles makes waits for its epilogue in L2
constexpr int kItemsPerThread = 3;  // attention items a thread should find, so that all end at about the same time

using Clock = std::chrono::steady_clock;

struct Range {
  int begin;
  int end;
};

Range share(int total, int thread, int num_threads) {
  return {static_cast<int>(static_cast<int64_t>(total) * thread / num_threads),
          static_cast<int>(static_cast<int64_t>(total) * (thread + 1) / num_threads)};
}

// Floats of one Partial: max and sum per pair, then the accumulators.
size_t partial_floats(int d_pad) { return static_cast<size_t>(kMaxPairs) * (2 + d_pad); }

Partial partial_at(float* data) { return {data, data + kMaxPairs, data + 2 * kMaxPairs}; }

}  // namespace

Program::Program(const Geometry& geometry, const std::vector<double>& inv_freq, int num_threads,
                 const KernelTable& kernels)
    : geometry_(geometry), kernels_(kernels), pool_(num_threads), scratch_(static_cast<size_t>(pool_.num_threads())) {
  const Geometry& g = geometry_;
  if (g.num_heads % g.num_kv_heads != 0 || g.num_heads / g.num_kv_heads > kMaxPairs || g.head_dim % 2 != 0)
    throw std::invalid_argument("heads must be a multiple of KV heads, at most 36 times, and the head size even");
  if (static_cast<int>(inv_freq.size()) != g.head_dim / 2)
    throw std::invalid_argument("there must be one RoPE frequency per pair of a head");
  KvLayer kv{nullptr, g.is_kv_f32, g.num_kv_heads, g.head_dim, round_up(g.head_dim, 16)};
  // All layers in one array, which huge pages hold: a pass reads a little of every KV page.
  const size_t layer_elems = static_cast<size_t>(g.num_pages) * g.num_kv_heads * kv.page_elems();
  const size_t layer_bytes = layer_elems * (g.is_kv_f32 ? 4 : 2);
  kv_data_ = Array<uint8_t>(layer_bytes * static_cast<size_t>(g.num_layers));
  for (int layer = 0; layer < g.num_layers; layer++) {
    kv.data = kv_data_.get() + static_cast<size_t>(layer) * layer_bytes;
    kv_.push_back(kv);
  }
  const int half = g.head_dim / 2, num_positions = g.num_pages * kPageTokens;
  rope_cos_ = Array<float>(static_cast<size_t>(num_positions) * half);
  rope_sin_ = Array<float>(static_cast<size_t>(num_positions) * half);
  for (int position = 0; position < num_positions; position++) {
    for (int i = 0; i < half; i++) {
      double s, c;
      sin_cos(static_cast<double>(position) * inv_freq[static_cast<size_t>(i)], &s, &c);
      rope_cos_[static_cast<size_t>(position) * half + i] = static_cast<float>(c);
      rope_sin_[static_cast<size_t>(position) * half + i] = static_cast<float>(s);
    }
  }
  profile_s_.assign(kNumOps, 0.0);
}

int Program::add_matrix(SourceFormat source, int outputs, int inputs, const uint8_t* data, const int32_t* rows) {
  source_row_bytes(source, inputs);  // refuses ragged blocks
  PackedMatrix m = packed_shape(packed_format(source), outputs, inputs);
  m.data = weights_.allocate(m.tile_bytes * static_cast<size_t>(m.tiles));
  std::atomic<bool> is_exact{true};
  pool_.run([&](int thread) {
    const Range r = share(m.tiles, thread, pool_.num_threads());
    if (!pack_tiles(m, r.begin, r.end, source, data, rows)) is_exact = false;
  });
  if (!is_exact) throw std::invalid_argument("a Q4_0 scale is above 8188, which has no lossless minimum in fp16");
  matrices_.push_back(m);
  max_inputs_ = std::max(max_inputs_, round_up(inputs, kGroup));
  return static_cast<int>(matrices_.size()) - 1;
}

int Program::add_vector(const float* data, int n) {
  float* values = reinterpret_cast<float*>(weights_.allocate(sizeof(float) * static_cast<size_t>(round_up(n, kGroup))));
  std::memcpy(values, data, sizeof(float) * static_cast<size_t>(n));
  vectors_.push_back(values);
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_buffer(int width) {
  // Rows a multiple of 4 KB apart would share cache sets.
  const int stride = round_up(width, kGroup) + kTileRows;
  buffers_.push_back({width, stride, Array<float>(static_cast<size_t>(geometry_.max_rows) * stride)});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::add(const Instr& instr) {
  auto check = [](bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(std::string("bad instruction: ") + what);
  };
  auto is_buffer = [&](int b) { return b >= 0 && b < static_cast<int>(buffers_.size()); };
  auto width = [&](int b) { return buffers_[static_cast<size_t>(b)].width; };
  for (int w : instr.weights) check(w >= 0 && w < static_cast<int>(matrices_.size()), "unknown matrix");
  check(instr.norm >= -1 && instr.norm < static_cast<int>(vectors_.size()), "unknown vector");
  check(instr.op == Op::Embed || is_buffer(instr.in), "unknown input");
  check(instr.op == Op::Logits || is_buffer(instr.out), "unknown output");
  check(instr.op == Op::Attention || !instr.weights.empty(), "no matrix");
  check(instr.out != instr.in || instr.op == Op::Logits, "output overwrites the input");
  int outputs = 0;
  for (int w : instr.weights) {
    const PackedMatrix& m = matrices_[static_cast<size_t>(w)];
    outputs += m.outputs;
    if (instr.op != Op::Embed) check(m.inputs == width(instr.in), "matrix and input differ in width");
    weight_bytes_ += instr.op == Op::Embed ? 0 : m.tile_bytes * static_cast<size_t>(m.tiles);
  }
  const Geometry& g = geometry_;
  switch (instr.op) {
    case Op::Embed: check(matrices_[static_cast<size_t>(instr.weights[0])].inputs == width(instr.out), "embedding width");
      break;
    case Op::Linear: check(outputs == width(instr.out), "output width"); break;
    case Op::LinearAdd:
      check(outputs == width(instr.out) && is_buffer(instr.residual) && width(instr.residual) == outputs, "output width");
      break;
    case Op::Gated:
      check(instr.weights.size() == 2 && outputs == 2 * width(instr.out), "gate and up differ");
      break;
    case Op::Logits: check(outputs == g.vocab_size, "vocabulary"); break;
    case Op::Attention:
      check(instr.layer >= 0 && instr.layer < g.num_layers, "layer");
      check(width(instr.in) == (g.num_heads + 2 * g.num_kv_heads) * g.head_dim, "QKV width");
      check(width(instr.out) == g.num_heads * g.head_dim, "output width");
      break;
  }
  if (instr.op == Op::Linear && instr.layer >= 0)
    check(outputs == (g.num_heads + 2 * g.num_kv_heads) * g.head_dim && instr.layer < g.num_layers, "QKV width");
  instrs_.push_back(instr);
}

size_t Program::kv_bytes() const {
  const size_t elem = geometry_.is_kv_f32 ? 4 : 2;
  return kv_.size() * kv_[0].page_elems() * elem * static_cast<size_t>(geometry_.num_pages) * geometry_.num_kv_heads;
}

size_t Program::scratch_bytes() const {
  size_t floats = logits_capacity_ + partials_capacity_;
  for (const Buffer& b : buffers_) floats += static_cast<size_t>(b.stride) * geometry_.max_rows;
  const size_t rows = static_cast<size_t>(round_up(geometry_.max_rows, kAmxRows)) +
                      scratch_.size() * static_cast<size_t>(kPrivateRows);
  return floats * 4 + rows * static_cast<size_t>(max_inputs_) * 6;
}

void Program::set_profiling(bool is_on) {
  is_profiling_ = is_on;
  profile_s_.assign(kNumOps, 0.0);
}

void Program::move_slots(const int32_t* page_table, int num_table_pages, const int32_t* src, const int32_t* dst,
                         int count) {
  const int capacity = num_table_pages * kPageTokens;
  for (int i = 0; i < count; i++) {
    if (src[i] < 0 || dst[i] < 0 || src[i] >= capacity || dst[i] >= capacity)
      throw std::invalid_argument("a slot to move lies outside the page table");
    const int32_t from = page_table[src[i] / kPageTokens], to = page_table[dst[i] / kPageTokens];
    if (from < 0 || to < 0 || from >= geometry_.num_pages || to >= geometry_.num_pages)
      throw std::invalid_argument("a page of a slot to move does not exist");
    const int from_lane = src[i] % kPageTokens, to_lane = dst[i] % kPageTokens;
    const size_t elem = geometry_.is_kv_f32 ? 4 : 2;
    for (const KvLayer& kv : kv_) {
      uint8_t* data = static_cast<uint8_t*>(kv.data);
      for (int head = 0; head < kv.num_kv_heads; head++) {
        const uint8_t* a = data + kv.offset(from, head) * elem;
        uint8_t* b = data + kv.offset(to, head) * elem;
        for (int d = 0; d < kv.head_dim; d++)
          std::memcpy(b + (static_cast<size_t>(d) * kPageTokens + to_lane) * elem,
                      a + (static_cast<size_t>(d) * kPageTokens + from_lane) * elem, elem);
        const size_t values = static_cast<size_t>(kPageTokens) * kv.head_dim;
        std::memmove(b + (values + static_cast<size_t>(to_lane) * kv.d_pad) * elem,
                     a + (values + static_cast<size_t>(from_lane) * kv.d_pad) * elem, kv.d_pad * elem);
      }
    }
  }
}

// ---- one step --------------------------------------------------------------------------------------------------------

void Program::validate(const StepArgs& s) const {
  auto check = [](bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
  };
  check(s.num_rows >= 1 && s.num_rows <= geometry_.max_rows, "a step needs between 1 and max_rows rows");
  const int capacity = s.num_table_pages * kPageTokens;
  for (int i = 0; i < s.num_seqs * s.num_table_pages; i++)
    check(s.page_tables[i] >= 0 && s.page_tables[i] < geometry_.num_pages, "a page id is outside the pool");
  const int max_position = geometry_.num_pages * kPageTokens;
  for (int r = 0; r < s.num_rows; r++) {
    check(s.token_ids[r] >= 0 && s.token_ids[r] < geometry_.vocab_size, "a token id is outside the vocabulary");
    check(s.positions[r] >= 0 && s.positions[r] < max_position, "a position is outside the cache");
    check(s.seq_ids[r] >= 0 && s.seq_ids[r] < s.num_seqs, "a row names no sequence");
    check(s.slots[r] >= 0 && s.slots[r] < capacity, "a slot is outside the page table");
    check(s.visible_len[r] >= 0 && s.visible_len[r] <= capacity, "a visible length is outside the page table");
    const uint64_t mask = s.tail_mask[r];
    check(s.visible_len[r] > 0 || mask != 0, "a row sees nothing");
    if (mask)
      check(s.tail_base[r] >= 0 && s.tail_base[r] <= capacity - 64 + __builtin_clzll(mask),
            "an ancestor's slot is outside the page table");
  }
  for (int r = 0; r < s.num_logit_rows; r++)
    check(s.logit_rows[r] >= 0 && s.logit_rows[r] < s.num_rows, "a logit row is outside the step");
}

void Program::allocate_scratch() {
  if (shared_.rows) return;
  auto fill = [&](ThreadScratch& t, int rows) {
    const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(max_inputs_);
    t.rows = Array<float>(n);
    t.codes = Array<int8_t>(n);
    t.scale = Array<float>(n / kGroup);
    t.scaled_sum = Array<float>(n / kGroup);
    t.bias = Array<int32_t>(n / kGroup);
  };
  fill(shared_, round_up(geometry_.max_rows, kAmxRows));
  const int d_pad = round_up(geometry_.head_dim, 16);
  for (ThreadScratch& t : scratch_) {
    fill(t, kPrivateRows);
    // Two outputs (gate and up) of as many tiles as tiles_at_once allows.
    const size_t few_rows = static_cast<size_t>(kBlockRows) * kMaxTilesAtOnce;
    const size_t many_rows = std::max(static_cast<size_t>(geometry_.max_rows), kOutputCacheBytes / sizeof(float) / kTileRows);
    t.tiles = Array<float>(2 * kTileRows * std::max(few_rows, many_rows));
    t.unpacked = Array<uint8_t>(static_cast<size_t>(kTileRows) * static_cast<size_t>(max_inputs_));
    t.attend = Array<float>(attend_scratch_floats(geometry_.head_dim) + 2 * partial_floats(d_pad));
  }
  num_counters_ = instrs_.size();
  next_item_ = std::make_unique<std::atomic<int>[]>(num_counters_);
}

void Program::plan(const StepArgs& s) {
  views_.clear();
  for (int r = 0; r < s.num_rows; r++)
    views_.push_back({s.positions[r], s.slots[r], s.visible_len[r], s.tail_base[r], s.tail_mask[r],
                      s.page_tables + static_cast<size_t>(s.seq_ids[r]) * s.num_table_pages});
  plan_attention(s);
  for (size_t i = 0; i < num_counters_; i++) next_item_[i].store(0, std::memory_order_relaxed);
  const size_t need = static_cast<size_t>(s.num_logit_rows) * static_cast<size_t>(logit_stride());
  if (need > logits_capacity_) {
    logits_ = Array<float>(need);
    logits_capacity_ = need;
  }
  argmax_.resize(static_cast<size_t>(s.num_logit_rows));
  for (ThreadScratch& t : scratch_) {
    t.best_value.resize(static_cast<size_t>(s.num_logit_rows));
    t.best_id.resize(static_cast<size_t>(s.num_logit_rows));
  }
  non_finite_.store(-1);
}

int Program::longest_context(int row, int num_rows) const {
  int longest = 0;
  for (int r = row; r < row + num_rows; r++) longest = std::max(longest, views_[static_cast<size_t>(r)].total_len());
  return longest;
}

void Program::plan_attention(const StepArgs& s) {
  const int kv_heads = geometry_.num_kv_heads, longest = longest_context(0, s.num_rows);
  // As many rows as share their reads of the cache, but enough items to keep all threads busy until the end.
  const int64_t work = static_cast<int64_t>(s.num_rows) * kv_heads * std::max(1, longest / kSplit);
  const int64_t wanted = int64_t{kItemsPerThread} * pool_.num_threads();
  const int most_rows = kMaxPairs / (geometry_.num_heads / kv_heads);
  const int rows_at_once = static_cast<int>(std::clamp<int64_t>((work + wanted - 1) / wanted, 1, most_rows));
  items_.clear();
  parts_.clear();
  int num_parts = 0;
  for (int r = 0; r < s.num_rows;) {
    int n = 1;
    while (r + n < s.num_rows && n < rows_at_once && s.seq_ids[r + n] == s.seq_ids[r]) n++;
    const int num_splits = (longest_context(r, n) + kSplit - 1) / kSplit;
    for (int h = 0; h < kv_heads; h++) {
      items_.push_back({r, n, h, num_splits, num_parts});
      num_parts += num_splits;
    }
    r += n;
  }
  if (longest <= kSplit || items_.size() >= size_t{4} * static_cast<size_t>(pool_.num_threads())) {
    std::reverse(items_.begin(), items_.end());  // the longest contexts first
    return;
  }
  // The last splits, which are short, come last.
  for (int split = 0; split * kSplit < longest; split++)
    for (size_t i = 0; i < items_.size(); i++)
      if (split < items_[i].num_splits) parts_.push_back({static_cast<int>(i), split});
  const size_t need = static_cast<size_t>(num_parts) * partial_floats(round_up(geometry_.head_dim, 16));
  if (need > partials_capacity_) {
    partials_ = Array<float>(need);
    partials_capacity_ = need;
  }
  if (items_.size() > num_pending_) {
    pending_ = std::make_unique<std::atomic<int>[]>(items_.size());
    num_pending_ = items_.size();
  }
  for (size_t i = 0; i < items_.size(); i++) pending_[i].store(items_[i].num_splits, std::memory_order_relaxed);
}

void Program::forward(const StepArgs& step) {
  validate(step);
  allocate_scratch();
  plan(step);
  step_ = &step;
  pool_.run([this](int thread) { execute(thread); });
  step_ = nullptr;
  const int64_t bad = non_finite_.load();
  if (bad >= 0) {
    const Instr& instr = instrs_[static_cast<size_t>(bad >> 32)];
    int layer = 0;  // linear maps between two attentions belong to the layer of the later Linear that names one
    for (size_t i = 0; i <= static_cast<size_t>(bad >> 32); i++) layer = std::max(layer, instrs_[i].layer);
    throw std::runtime_error("non-finite activations in layer " + std::to_string(layer) + ", row " +
                             std::to_string(bad & 0xffffffff) + (instr.op == Op::Logits ? ", before the LM head" : ""));
  }
}

void Program::execute(int thread) {
  for (size_t i = 0; i < instrs_.size(); i++) {
    const Instr& instr = instrs_[i];
    const Clock::time_point begin = is_profiling_ && thread == 0 ? Clock::now() : Clock::time_point{};
    switch (instr.op) {
      case Op::Embed: run_embed(instr, thread); break;
      case Op::Linear:
      case Op::LinearAdd: run_linear(instr, thread); break;
      case Op::Gated: run_gated(instr, thread); break;
      case Op::Attention: run_attention(instr, static_cast<int>(i), thread); break;
      case Op::Logits: run_logits(instr, thread); break;
    }
    pool_.barrier();
    if (is_profiling_ && thread == 0)
      profile_s_[static_cast<size_t>(instr.op)] += std::chrono::duration<double>(Clock::now() - begin).count();
  }
}

void Program::flag_non_finite(const Instr& instr, int row) {
  int64_t none = -1;
  non_finite_.compare_exchange_strong(none, (static_cast<int64_t>(&instr - instrs_.data()) << 32) | row);
}

void Program::run_embed(const Instr& instr, int thread) {
  const PackedMatrix& table = matrices_[static_cast<size_t>(instr.weights[0])];
  Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const Range r = share(step_->num_rows, thread, pool_.num_threads());
  for (int row = r.begin; row < r.end; row++)
    kernels_.dequantise_row(table, step_->token_ids[row], out.data.get() + static_cast<size_t>(row) * out.stride);
}

// ---- linear maps -----------------------------------------------------------------------------------------------------

Program::Inputs Program::prepare(const Instr& instr, int thread, int num_rows, bool is_gathered) {
  const bool is_private = num_rows <= kPrivateRows;
  ThreadScratch& t = is_private ? scratch_[static_cast<size_t>(thread)] : shared_;
  const Buffer& in = buffers_[static_cast<size_t>(instr.in)];
  bool is_quantised = false;
  for (int w : instr.weights) is_quantised |= matrices_[static_cast<size_t>(w)].format != Format::F32;
  const bool is_amx = kernels_.has_amx && !is_private && is_quantised;
  Inputs inputs;
  inputs.acts = {t.codes.get(), t.scale.get(), t.scaled_sum.get(), t.bias.get(), num_rows, in.width,
                 is_quantised ? in.width / kGroup : 0, is_amx ? kAmxRows : kBlockRows};
  const bool is_direct = instr.norm < 0 && !is_gathered;
  inputs.rows = is_direct ? in.data.get() : t.rows.get();
  inputs.stride = static_cast<size_t>(is_direct ? in.stride : max_inputs_);
  if (is_private) {
    for (int row = 0; row < num_rows; row++) fill_inputs(instr, inputs, row, is_gathered);
    return inputs;
  }
  const Range r = share(num_rows, thread, pool_.num_threads());
  for (int row = r.begin; row < r.end; row++) fill_inputs(instr, inputs, row, is_gathered);
  if (is_amx && r.end == num_rows) {  // rows that pad the last block
    const int block = inputs.acts.num_blocks() - 1;
    int8_t* codes = t.codes.get() + static_cast<size_t>(block) * kAmxRows * in.width;
    for (int g = 0; g < inputs.acts.groups; g++)
      for (int row = inputs.acts.block_size(block); row < kAmxRows; row++)
        std::memset(codes + (static_cast<size_t>(g) * kAmxRows + row) * kGroup, 0, kGroup);
  }
  pool_.barrier();
  return inputs;
}

void Program::fill_inputs(const Instr& instr, const Inputs& inputs, int row, bool is_gathered) {
  const Buffer& in = buffers_[static_cast<size_t>(instr.in)];
  const int source = is_gathered ? step_->logit_rows[row] : row;
  const float* x = in.data.get() + static_cast<size_t>(source) * in.stride;
  float* mine = const_cast<float*>(inputs.rows) + static_cast<size_t>(row) * inputs.stride;
  if (instr.norm >= 0)
    kernels_.rms_norm(x, vectors_[static_cast<size_t>(instr.norm)], instr.eps, in.width, mine);
  else if (is_gathered)
    std::memcpy(mine, x, sizeof(float) * static_cast<size_t>(in.stride));
  if (inputs.acts.groups > 0 && !kernels_.quantise_row(mine, inputs.acts, row)) flag_non_finite(instr, source);
}

int Program::tiles_at_once(const PackedMatrix& w, int num_rows) const {
  if (num_rows <= kBlockRows) return kMaxTilesAtOnce;  // no reuse: long runs stream best
  const size_t output_bytes = static_cast<size_t>(num_rows) * kTileRows * sizeof(float);
  const size_t fits = std::min(kTileCacheBytes / w.tile_bytes, kOutputCacheBytes / output_bytes);
  return std::clamp(static_cast<int>(fits), 1, kMaxTilesAtOnce);
}

void Program::multiply(const PackedMatrix& w, int tile, int num_tiles, const Inputs& in, int thread, float* out,
                       size_t ldo) {
  if (w.format != Format::F32) {
    kernels_.gemm_quant(w, tile, num_tiles, in.acts, out, ldo, scratch_[static_cast<size_t>(thread)].unpacked.get());
    return;
  }
  for (int r = 0; r < in.acts.rows; r += kBlockRows)
    kernels_.gemm_f32(w, tile, num_tiles, in.rows + static_cast<size_t>(r) * in.stride, in.stride,
                      std::min(kBlockRows, in.acts.rows - r), out + static_cast<size_t>(r) * ldo, ldo);
}

// out = residual + x, or x without a residual.
void Program::store_sum(const float* residual, const float* x, int n, float* out) {
  if (residual && n % kTileRows == 0) {
    kernels_.add(residual, x, n, out);
    return;
  }
  for (int i = 0; i < n; i++) out[i] = residual ? residual[i] + x[i] : x[i];
}

void Program::run_linear(const Instr& instr, int thread) {
  const int num_rows = step_->num_rows, num_threads = pool_.num_threads();
  const Inputs in = prepare(instr, thread, num_rows, false);
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const size_t ldo = static_cast<size_t>(out.stride);
  const float* residual = instr.residual < 0 ? nullptr : buffers_[static_cast<size_t>(instr.residual)].data.get();
  float* scratch = scratch_[static_cast<size_t>(thread)].tiles.get();

  // QKV whose heads are whole tiles is split by heads, so that a thread rotates and stores what it just made.
  const bool is_qkv = instr.layer >= 0;
  const int num_heads = geometry_.num_heads + 2 * geometry_.num_kv_heads;
  const Range heads = share(num_heads, thread, num_threads);
  const bool is_by_head = is_qkv && geometry_.head_dim % kTileRows == 0;
  const int tiles_per_head = geometry_.head_dim / kTileRows;

  int column = 0;
  for (int index : instr.weights) {
    const PackedMatrix& w = matrices_[static_cast<size_t>(index)];
    Range tiles = share(w.tiles, thread, num_threads);
    if (is_by_head) {
      const int first = column / kTileRows;
      tiles = {std::clamp(heads.begin * tiles_per_head - first, 0, w.tiles),
               std::clamp(heads.end * tiles_per_head - first, 0, w.tiles)};
    }
    const int step = tiles_at_once(w, num_rows);
    for (int tile = tiles.begin; tile < tiles.end; tile += step) {
      const int n = std::min(step, tiles.end - tile);
      const int valid = std::min(n * kTileRows, w.outputs - tile * kTileRows);
      const size_t at = static_cast<size_t>(column) + static_cast<size_t>(tile) * kTileRows;
      if (!residual && valid == n * kTileRows) {
        multiply(w, tile, n, in, thread, out.data.get() + at, ldo);
        continue;
      }
      const size_t lds = static_cast<size_t>(n) * kTileRows;
      multiply(w, tile, n, in, thread, scratch, lds);
      for (int r = 0; r < num_rows; r++) {
        const size_t row = at + static_cast<size_t>(r) * ldo;
        store_sum(residual ? residual + row : nullptr, scratch + static_cast<size_t>(r) * lds, valid,
                  out.data.get() + row);
      }
    }
    column += w.outputs;
  }
  if (is_qkv) {
    if (!is_by_head) pool_.barrier();
    rotate_and_append(instr, heads.begin, heads.end);
  }
}

void Program::run_gated(const Instr& instr, int thread) {
  const int num_rows = step_->num_rows;
  const Inputs in = prepare(instr, thread, num_rows, false);
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const PackedMatrix& gate = matrices_[static_cast<size_t>(instr.weights[0])];
  const PackedMatrix& up = matrices_[static_cast<size_t>(instr.weights[1])];
  float* a = scratch_[static_cast<size_t>(thread)].tiles.get();
  const Range tiles = share(gate.tiles, thread, pool_.num_threads());
  const int step = std::min(tiles_at_once(gate, num_rows), tiles_at_once(up, num_rows));
  float* b = a + static_cast<size_t>(num_rows) * static_cast<size_t>(step) * kTileRows;
  for (int tile = tiles.begin; tile < tiles.end; tile += step) {
    const int n = std::min(step, tiles.end - tile);
    const int valid = std::min(n * kTileRows, gate.outputs - tile * kTileRows);
    const size_t lds = static_cast<size_t>(n) * kTileRows;
    multiply(gate, tile, n, in, thread, a, lds);
    multiply(up, tile, n, in, thread, b, lds);
    for (int r = 0; r < num_rows; r++) {
      float* row = out.data.get() + static_cast<size_t>(r) * out.stride + static_cast<size_t>(tile) * kTileRows;
      float* from = a + static_cast<size_t>(r) * lds;
      const bool is_whole = valid % kTileRows == 0;
      kernels_.silu_mul(from, b + static_cast<size_t>(r) * lds, n * kTileRows, is_whole ? row : from);
      if (!is_whole) std::memcpy(row, from, sizeof(float) * static_cast<size_t>(valid));
    }
  }
}

void Program::run_logits(const Instr& instr, int thread) {
  const int num_rows = step_->num_logit_rows;
  if (num_rows == 0) return;
  const Inputs in = prepare(instr, thread, num_rows, true);
  const PackedMatrix& w = matrices_[static_cast<size_t>(instr.weights[0])];
  const size_t ldo = static_cast<size_t>(logit_stride());
  const Range tiles = share(w.tiles, thread, pool_.num_threads());
  const int step = tiles_at_once(w, num_rows);
  for (int tile = tiles.begin; tile < tiles.end; tile += step)
    multiply(w, tile, std::min(step, tiles.end - tile), in, thread,
             logits_.get() + static_cast<size_t>(tile) * kTileRows, ldo);
  // Each thread its own ids, then one thread the best of all: the first of equal maxima is the lowest id.
  ThreadScratch& mine = scratch_[static_cast<size_t>(thread)];
  const int first = tiles.begin * kTileRows, last = std::min(tiles.end * kTileRows, geometry_.vocab_size);
  for (int r = 0; r < num_rows; r++) {
    mine.best_id[static_cast<size_t>(r)] = -1;
    if (first < last)
      mine.best_id[static_cast<size_t>(r)] =
          first + kernels_.argmax(logits_.get() + static_cast<size_t>(r) * ldo + first, last - first,
                                  &mine.best_value[static_cast<size_t>(r)]);
  }
  pool_.barrier();
  if (thread != 0) return;
  for (size_t r = 0; r < static_cast<size_t>(num_rows); r++) {
    argmax_[r] = -1;
    float best = 0.0f;
    for (const ThreadScratch& t : scratch_) {
      if (t.best_id[r] < 0 || (argmax_[r] >= 0 && !(t.best_value[r] > best))) continue;
      argmax_[r] = t.best_id[r];
      best = t.best_value[r];
    }
  }
}

// ---- attention -------------------------------------------------------------------------------------------------------

void Program::rotate_and_append(const Instr& instr, int head_begin, int head_end) {
  const Geometry& g = geometry_;
  const Buffer& qkv = buffers_[static_cast<size_t>(instr.out)];
  const KvLayer& kv = kv_[static_cast<size_t>(instr.layer)];
  const int half = g.head_dim / 2;
  for (int row = 0; row < step_->num_rows; row++) {
    const RowView& view = views_[static_cast<size_t>(row)];
    const float* cos = rope_cos_.get() + static_cast<size_t>(view.position) * half;
    const float* sin = rope_sin_.get() + static_cast<size_t>(view.position) * half;
    const int page = view.page_table[view.slot / kPageTokens], lane = view.slot % kPageTokens;
    for (int head = head_begin; head < head_end; head++) {
      float* x = qkv.data.get() + static_cast<size_t>(row) * qkv.stride + static_cast<size_t>(head) * g.head_dim;
      if (head < g.num_heads) {
        kernels_.rope(x, cos, sin, half, g.attention_scale);
      } else if (head < g.num_heads + g.num_kv_heads) {
        kernels_.rope(x, cos, sin, half, 1.0f);
        kernels_.append_key(kv, page, lane, head - g.num_heads, x);
      } else {
        kernels_.append_value(kv, page, lane, head - g.num_heads - g.num_kv_heads, x);
      }
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
          scratch_[static_cast<size_t>(thread)].attend.get()};
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
  const bool is_split = !parts_.empty();
  const int num = static_cast<int>(is_split ? parts_.size() : items_.size());
  std::atomic<int>& next = next_item_[static_cast<size_t>(index)];
  for (int i = next.fetch_add(1); i < num; i = next.fetch_add(1)) {
    if (is_split)
      attend_part(instr, parts_[static_cast<size_t>(i)], thread);
    else
      attend_item(instr, items_[static_cast<size_t>(i)], thread);
  }
}

void Program::combine(const AttendArgs& args, int split, const Partial& part, const Partial& run) {
  const size_t d_pad = static_cast<size_t>(args.kv->d_pad);
  for (int p = 0; p < args.num_rows * args.group_heads; p++)
    if (args.rows[p / args.group_heads].total_len() > split * kSplit)
      kernels_.attend_combine(part.max[p], part.sum[p], part.acc + static_cast<size_t>(p) * d_pad, args.kv->d_pad,
                              run.max + p, run.sum + p, run.acc + static_cast<size_t>(p) * d_pad);
}

void Program::attend_item(const Instr& instr, const AttendItem& item, int thread) {
  const AttendArgs args = attend_args(instr, item.row, item.num_rows, item.kv_head, thread);
  const Partial run = partial_at(args.scratch + attend_scratch_floats(geometry_.head_dim));
  const Partial part = partial_at(run.max + partial_floats(args.kv->d_pad));
  kernels_.attend_split(args, 0, run);
  for (int split = 1; split < item.num_splits; split++) {
    kernels_.attend_split(args, split, part);
    combine(args, split, part, run);
  }
  store_heads(instr, item.row, item.num_rows, item.kv_head, run.sum, run.acc);
}

void Program::attend_part(const Instr& instr, const AttendPart& part, int thread) {
  const AttendItem& item = items_[static_cast<size_t>(part.item)];
  const AttendArgs args = attend_args(instr, item.row, item.num_rows, item.kv_head, thread);
  const size_t stride = partial_floats(args.kv->d_pad);
  float* partials = partials_.get() + static_cast<size_t>(item.first_part) * stride;
  kernels_.attend_split(args, part.split, partial_at(partials + static_cast<size_t>(part.split) * stride));
  // Whoever finishes an item's last part folds all of them, in order.
  std::atomic<int>& pending = pending_[static_cast<size_t>(part.item)];
  if (pending.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  pending.store(item.num_splits, std::memory_order_relaxed);  // for the next layer
  const Partial run = partial_at(partials);
  for (int split = 1; split < item.num_splits; split++)
    combine(args, split, partial_at(partials + static_cast<size_t>(split) * stride), run);
  store_heads(instr, item.row, item.num_rows, item.kv_head, run.sum, run.acc);
}

}  // namespace forerun
