// One step: checks, plan, and the loop over instructions.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "program.h"

namespace forerun {

using Clock = std::chrono::steady_clock;

void Program::validate(const StepArgs& s) const {
  auto check = [](bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
  };
  check(s.num_rows >= 1 && s.num_rows <= geometry_.max_rows, "a step needs between 1 and max_rows rows");
  const int capacity = s.num_table_pages * kPageTokens;
  for (int i = 0; i < s.num_seqs * s.num_table_pages; i++)
    check(s.page_tables[i] >= 0 && s.page_tables[i] < geometry_.num_pages, "a page id is outside the pool");
  const int max_position = geometry_.num_positions();
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
  check(s.num_logit_rows <= s.num_rows, "there are more logit rows than rows");
  for (int r = 0; r < s.num_logit_rows; r++) {
    check(s.logit_rows[r] >= 0 && s.logit_rows[r] < s.num_rows, "a logit row is outside the step");
    check(r == 0 || s.logit_rows[r] > s.logit_rows[r - 1], "logit rows are not ascending");
  }
}

void Program::Codes::allocate(int rows, int inputs) {
  const size_t n = static_cast<size_t>(rows) * static_cast<size_t>(inputs);
  codes = Array<int8_t>(n);
  scale = Array<float>(n / kGroup);
  scaled_sum = Array<float>(n / kGroup);
  bias = Array<int32_t>(n / kGroup);
  half_bias = Array<int32_t>(2 * n / kGroup);
}

// Whether a gated activation makes the buffer and nothing but quantised matrices read it, in every variant.
bool Program::is_coded(int buffer) const {
  bool is_made = false;
  for (const Variant& variant : variants_) {
    if (narrows(variant, buffer)) return false;  // its rows move as floats
    for (const Instr& instr : variant.instrs) {
      if (instr.residual == buffer || (instr.out == buffer && instr.op != Op::Gated)) return false;
      is_made |= instr.out == buffer;
      if (instr.in != buffer) continue;
      if (instr.norm >= 0 || instr.order >= 0 || (instr.op != Op::Linear && instr.op != Op::LinearAdd)) return false;
      for (int w : instr.weights)
        if (is_float(matrices_[static_cast<size_t>(w)].format)) return false;
    }
  }
  return is_made;
}

bool Program::narrows(const Variant& variant, int buffer) {
  const std::vector<int>& narrowed = variant.narrowed_buffers;
  return std::find(narrowed.begin(), narrowed.end(), buffer) != narrowed.end();
}

void Program::allocate_scratch() {
  if (has_scratch_) return;
  for (Variant& variant : variants_) plan_narrowing(variant);
  int widest = max_inputs_;  // of the slices of a row that a thread norms
  for (const Vector& v : vectors_) widest = std::max(widest, round_up(v.size, kTileRows));
  auto fill = [&](ThreadScratch& t, int rows) {
    t.rows = Array<float>(static_cast<size_t>(rows) * static_cast<size_t>(widest));
    t.codes.allocate(rows, max_inputs_);
  };
  const int most_rows = round_up(geometry_.max_rows, kAmxRows);
  fill(shared_, most_rows);
  for (size_t i = 0; i < buffers_.size(); i++) {
    Buffer& buffer = buffers_[i];
    buffer.is_coded = is_coded(static_cast<int>(i));
    buffer.codes = {};
    buffer.data = {};
    if (buffer.is_coded)
      buffer.codes.allocate(most_rows, buffer.width);
    else
      buffer.data = Array<float>(static_cast<size_t>(geometry_.max_rows) * buffer.stride);
  }
  const int d_pad = round_up(geometry_.head_dim, 16);
  size_t most_unpacked = 0;
  for (const PackedMatrix& m : matrices_) most_unpacked = std::max(most_unpacked, unpacked_bytes(m));
  for (ThreadScratch& t : scratch_) {
    fill(t, kPrivateRows);
    const size_t inputs = static_cast<size_t>(max_inputs_);
    if (!orders_.empty()) t.unordered = Array<float>(kBlockRows * inputs);
    // Two outputs, gate and up, of a whole group, or of as many tiles as tiles_at_once allows.
    constexpr size_t kCached = kOutputCacheBytes / sizeof(float);
    static_assert(kCached >= kBlockRows * kMaxTilesAtOnce * kTileRows, "few rows, many tiles");
    static_assert(kGroup >= kWidenedTiles * kTileRows, "many rows, tiles of floats");
    const size_t outputs = std::max(static_cast<size_t>(geometry_.max_rows) * kGroup, kCached);
    t.tiles = Array<float>(2 * outputs);
    t.unpacked = Array<uint8_t>(most_unpacked);
    t.attend = Array<float>(attend_scratch_floats(geometry_.head_dim) + 2 * partial_floats(d_pad));
  }
  num_counters_ = 0;
  for (const Variant& variant : variants_) num_counters_ = std::max(num_counters_, variant.instrs.size());
  next_item_ = std::make_unique<std::atomic<int>[]>(num_counters_);
  pending_ = std::make_unique<std::atomic<int>[]>(most_split_items());
  has_scratch_ = true;
}

void Program::plan_narrowing(Variant& variant) const {
  const std::vector<Instr>& instrs = variant.instrs;
  variant.narrow_at = instrs.size();
  variant.narrowed_buffers.clear();
  for (size_t i = 0; i < instrs.size(); i++)
    if (instrs[i].op == Op::Attention || (instrs[i].op == Op::Logits && variant.narrow_at == instrs.size()))
      variant.narrow_at = i;
  std::vector<bool> is_made(buffers_.size(), false);
  for (size_t i = variant.narrow_at; i < instrs.size(); i++) {
    for (const int b : {instrs[i].in, instrs[i].residual}) {
      if (b < 0 || is_made[static_cast<size_t>(b)]) continue;
      is_made[static_cast<size_t>(b)] = true;
      variant.narrowed_buffers.push_back(b);
    }
    if (instrs[i].out >= 0) is_made[static_cast<size_t>(instrs[i].out)] = true;
  }
}

// Keeps the rows whose logits are wanted. Returns false when there are none.
bool Program::narrow(int thread) {
  const StepArgs& s = *step_;
  if (s.num_logit_rows == 0) return false;
  if (s.num_logit_rows == s.num_rows) return true;
  if (thread == 0) {
    for (int r = 0; r < s.num_logit_rows; r++) {  // ascending: no row is overwritten before it is read
      const size_t to = static_cast<size_t>(r), from = static_cast<size_t>(s.logit_rows[r]);
      views_[to] = views_[from];
      for (const int b : running_->narrowed_buffers) {
        const Buffer& buffer = buffers_[static_cast<size_t>(b)];
        const size_t stride = static_cast<size_t>(buffer.stride);
        std::memmove(buffer.data.get() + to * stride, buffer.data.get() + from * stride, stride * sizeof(float));
      }
    }
    num_rows_ = s.num_logit_rows;
    is_narrow_ = true;
    plan_attention();
  }
  pool_.barrier();
  return true;
}

void Program::plan(const StepArgs& s) {
  views_.clear();
  for (int r = 0; r < s.num_rows; r++)
    views_.push_back({s.positions[r], s.slots[r], s.visible_len[r], s.tail_base[r], s.tail_mask[r],
                      s.page_tables + static_cast<size_t>(s.seq_ids[r]) * s.num_table_pages});
  runs_.clear();
  for (int r = 0; r < s.num_rows; r++) {
    const RowView& view = views_[static_cast<size_t>(r)];
    const int page = view.page_table[view.slot / kPageTokens], lane = view.slot % kPageTokens;
    const SlotRun* last = runs_.empty() ? nullptr : &runs_.back();
    if (last && last->page == page && last->lane + last->num_rows == lane)
      runs_.back().num_rows++;
    else
      runs_.push_back({r, 1, page, lane});
  }
  num_rows_ = s.num_rows;
  is_narrow_ = false;
  reserve_partials();
  plan_attention();
  for (size_t i = 0; i < num_counters_; i++) next_item_[i].store(0, std::memory_order_relaxed);
  const size_t need = static_cast<size_t>(s.num_logit_rows) * static_cast<size_t>(logit_stride());
  if (need > logits_capacity_) {
    // Twice as many at least, so that what is outgrown stays less than what is in use.
    logits_capacity_ = std::max(need, 2 * logits_capacity_);
    if (logits_) outgrown_logits_.push_back(std::move(logits_));
    logits_ = Array<float>(logits_capacity_);
  }
  for (ThreadScratch& t : scratch_) t.best.resize(static_cast<size_t>(s.num_logit_rows));
  non_finite_.store(kAllFinite);
}

int Program::longest_context(int row, int num_rows) const {
  int longest = 0;
  for (int r = row; r < row + num_rows; r++) longest = std::max(longest, views_[static_cast<size_t>(r)].total_len());
  return longest;
}

void Program::forward(const StepArgs& step, int variant) {
  Variant& list = variants_[checked_variant(variant)];
  validate(step);
  allocate_scratch();
  plan(step);
  step_ = &step;
  running_ = &list;
  list.has_run = true;
  pool_.run([this](int thread) { execute(thread); });
  step_ = nullptr;
  const int64_t bad = non_finite_.load();
  if (bad != kAllFinite) {
    const Instr& instr = list.instrs[static_cast<size_t>(bad >> 32)];
    int layer = 0;  // linear maps between two attentions belong to the layer of the later Linear that names one
    for (size_t i = 0; i <= static_cast<size_t>(bad >> 32); i++) layer = std::max(layer, list.instrs[i].layer);
    throw std::runtime_error("non-finite activations in layer " + std::to_string(layer) + ", row " +
                             std::to_string(bad & 0xffffffff) + (instr.op == Op::Logits ? ", at the LM head" : ""));
  }
}

void Program::execute(int thread) {
  const std::vector<Instr>& instrs = running_->instrs;
  for (size_t i = 0; i < instrs.size(); i++) {
    const Instr& instr = instrs[i];
    if (i == running_->narrow_at && !narrow(thread)) return;
    const Clock::time_point begin = is_profiling_ && thread == 0 ? Clock::now() : Clock::time_point{};
    switch (instr.op) {
      case Op::Embed: run_embed(instr, thread); break;
      case Op::Linear:
      case Op::LinearAdd: run_linear(instr, thread); break;
      case Op::Gated: run_gated(instr, thread); break;
      case Op::Attention: run_attention(instr, static_cast<int>(i), thread); break;
      case Op::Logits: run_logits(instr, thread); break;
      case Op::NormAdd: run_norm_add(instr, thread); break;
    }
    pool_.barrier();
    if (is_profiling_ && thread == 0)
      profile_s_[static_cast<size_t>(instr.op)] += std::chrono::duration<double>(Clock::now() - begin).count();
  }
}

void Program::flag_non_finite(const Instr& instr, int row) {
  if (is_narrow_) row = step_->logit_rows[row];
  const int64_t mine = (static_cast<int64_t>(&instr - running_->instrs.data()) << 32) | row;
  int64_t least = non_finite_.load();
  while (mine < least && !non_finite_.compare_exchange_weak(least, mine)) {
  }
}

void Program::run_embed(const Instr& instr, int thread) {
  const PackedMatrix& table = matrices_[static_cast<size_t>(instr.weights[0])];
  Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const Range r = share(num_rows_, thread, pool_.num_threads());
  for (int row = r.begin; row < r.end; row++) {
    float* x = out.data.get() + static_cast<size_t>(row) * out.stride;
    kernels_.dequantise_row(table, step_->token_ids[row], x);
    for (int i = 0; i < table.inputs && instr.scale != 1.0f; i++) x[i] *= instr.scale;
  }
}

void Program::run_norm_add(const Instr& instr, int thread) {
  const Buffer& in = buffers_[static_cast<size_t>(instr.in)];
  const Buffer& residual = buffers_[static_cast<size_t>(instr.residual)];
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  float* normed = scratch_[static_cast<size_t>(thread)].rows.get();
  const Range r = share(num_rows_, thread, pool_.num_threads());
  for (size_t row = static_cast<size_t>(r.begin); row < static_cast<size_t>(r.end); row++) {
    const float* x = in.data.get() + row * static_cast<size_t>(in.stride);
    kernels_.rms_norm(&x, 1, vector(instr.norm), instr.eps, in.width, normed, 0);
    store_sum(residual.data.get() + row * static_cast<size_t>(residual.stride), normed, in.width,
              out.data.get() + row * static_cast<size_t>(out.stride));
  }
}

}  // namespace forerun
