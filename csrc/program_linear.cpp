// The linear maps of a program: quantised inputs, tiles shared out over threads, epilogues.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace forerun {

constexpr size_t kTileCacheBytes = 24 << 10;  // tiles that are reused for several row blocks should stay in L1

bool Program::is_quantised(const Instr& instr) const {
  for (int w : instr.weights)
    if (!is_float(matrices_[static_cast<size_t>(w)].format)) return true;
  return false;
}

int Program::num_tiled_rows() const {
  if (!kernels_.has_amx || num_rows_ < kMinTiledRows) return 0;
  const int rest = num_rows_ % kAmxRows;
  return rest <= kMaxUntiledRows ? num_rows_ - rest : num_rows_;
}

Program::CodedRows Program::coded_rows(const Codes& codes, int inputs) const {
  const int num_tiled = num_tiled_rows(), groups = inputs / kGroup;
  const size_t at = static_cast<size_t>(num_tiled) * static_cast<size_t>(groups);
  return {{codes.codes.get(), codes.scale.get(), codes.scaled_sum.get(), codes.bias.get(), codes.half_bias.get(),
           num_tiled, inputs, groups, kAmxRows},
          {codes.codes.get() + at * kGroup, codes.scale.get() + at, codes.scaled_sum.get() + at, codes.bias.get() + at,
           codes.half_bias.get() + 2 * at, num_rows_ - num_tiled, inputs, groups, kBlockRows}};
}

// Quantises groups [group, group + num_groups) of rows [row, row + num_rows), at most kBlockRows of one block.
void Program::quantise(const Instr& instr, const CodedRows& to, const float* x, size_t ldx, int row, int num_rows,
                       int group, int num_groups) {
  const bool is_tiled = row < to.tiled.rows;
  uint32_t non_finite = kernels_.quantise_rows(x, ldx, num_rows, is_tiled ? to.tiled : to.rest,
                                               is_tiled ? row : row - to.tiled.rows, group, num_groups);
  for (; non_finite; non_finite &= non_finite - 1) flag_non_finite(instr, row + __builtin_ctz(non_finite));
}

Program::Inputs Program::prepare(const Instr& instr, int thread) {
  const Buffer& in = buffers_[static_cast<size_t>(instr.in)];
  Inputs inputs;
  if (in.is_coded) {
    inputs.codes = coded_rows(in.codes, in.width);
    return inputs;
  }
  const bool is_private = num_rows_ <= kPrivateRows;
  const ThreadScratch& t = is_private ? scratch_[static_cast<size_t>(thread)] : shared_;
  inputs.codes = coded_rows(t.codes, in.width);
  inputs.is_coded = is_quantised(instr);
  const bool is_direct = instr.norm < 0 && instr.order < 0;
  inputs.rows = is_direct ? in.data.get() : t.rows.get();
  inputs.stride = static_cast<size_t>(is_direct ? in.stride : max_inputs_);
  const int num_fills = (num_rows_ + kBlockRows - 1) / kBlockRows;
  const Range r = is_private ? Range{0, num_fills} : share(num_fills, thread, pool_.num_threads());
  for (int i = r.begin; i < r.end; i++)
    fill_inputs(instr, inputs, i * kBlockRows, std::min(kBlockRows, num_rows_ - i * kBlockRows), thread);
  if (!is_private) pool_.barrier();
  return inputs;
}

// Rows [row, row + num_rows), at most kBlockRows, of what a linear map reads.
void Program::fill_inputs(const Instr& instr, const Inputs& inputs, int row, int num_rows, int thread) {
  const Buffer& in = buffers_[static_cast<size_t>(instr.in)];
  const float* x[kBlockRows];
  for (int i = 0; i < num_rows; i++) x[i] = in.data.get() + static_cast<size_t>(row + i) * in.stride;
  float* mine = const_cast<float*>(inputs.rows) + static_cast<size_t>(row) * inputs.stride;
  float* normed = instr.order < 0 ? mine : scratch_[static_cast<size_t>(thread)].unordered.get();
  if (instr.norm >= 0) {
    kernels_.rms_norm(x, num_rows, vector(instr.norm), instr.eps, in.width, normed, inputs.stride);
    for (int i = 0; i < num_rows; i++) x[i] = normed + static_cast<size_t>(i) * inputs.stride;
  }
  if (instr.order >= 0) {
    const std::vector<int32_t>& order = orders_[static_cast<size_t>(instr.order)];
    const size_t padded = static_cast<size_t>(round_up(in.width, kTileRows));
    for (int i = 0; i < num_rows; i++) {
      float* out = mine + static_cast<size_t>(i) * inputs.stride;
      for (size_t k = 0; k < order.size(); k++) out[k] = x[i][order[k]];
      std::fill(out + order.size(), out + padded, 0.0f);
    }
  }
  if (inputs.is_coded)
    return quantise(instr, inputs.codes, mine, inputs.stride, row, num_rows, 0, inputs.codes.rest.groups);
  for (int i = 0; i < num_rows; i++)
    if (!kernels_.is_finite(mine + static_cast<size_t>(i) * inputs.stride, in.width)) flag_non_finite(instr, row + i);
}

// Quantises columns [column, column + num_columns), whole groups, of rows [row, row + num_rows) of instr.out from x.
void Program::encode(const Instr& instr, const float* x, size_t ldx, int row, int num_rows, int column,
                     int num_columns) {
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const CodedRows to = coded_rows(out.codes, out.width);
  while (num_rows > 0) {
    const int n = std::min(num_rows, kBlockRows - row % kBlockRows);
    quantise(instr, to, x, ldx, row, n, column / kGroup, num_columns / kGroup);
    row += n;
    num_rows -= n;
    x += static_cast<size_t>(n) * ldx;
  }
}

int Program::tiles_at_once(const PackedMatrix& w, int num_rows) const {
  if (num_rows <= kBlockRows) return kMaxTilesAtOnce;  // no reuse: long runs stream best
  const size_t output_bytes = static_cast<size_t>(num_rows) * kTileRows * sizeof(float);
  const size_t fits = std::min(kTileCacheBytes / w.tile_bytes, kOutputCacheBytes / output_bytes);
  const int least = is_float(w.format) ? kWidenedTiles : 1;  // products of floats share what they load
  return std::clamp(static_cast<int>(fits), least, kMaxTilesAtOnce);
}

void Program::multiply(const PackedMatrix& w, int tile, int num_tiles, const Inputs& in, int thread, float* out,
                       size_t ldo) {
  uint8_t* scratch = scratch_[static_cast<size_t>(thread)].unpacked.get();
  if (is_float(w.format))
    return kernels_.gemm_float(w, tile, num_tiles, in.rows, in.stride, num_rows_, out, ldo, scratch);
  const auto& [tiled, rest] = in.codes;
  if (tiled.rows > 0) kernels_.gemm_quant(w, tile, num_tiles, tiled, out, ldo, scratch);
  if (rest.rows > 0)
    kernels_.gemm_quant(w, tile, num_tiles, rest, out + static_cast<size_t>(tiled.rows) * ldo, ldo, scratch);
}

// out = residual + x, or x without a residual.
void Program::store_sum(const float* residual, const float* x, int n, float* out) {
  if (residual && n % kTileRows == 0) {
    kernels_.add(residual, x, n, out);
    return;
  }
  for (int i = 0; i < n; i++) out[i] = residual ? residual[i] + x[i] : x[i];
}

// row[i] += bias[column + i] for n outputs.
void Program::add_bias(const Instr& instr, int column, int n, float* row) {
  const float* bias = vector(instr.bias) + column;
  if (n % kTileRows == 0) return kernels_.add(row, bias, n, row);
  for (int i = 0; i < n; i++) row[i] = row[i] + bias[i];
}

// Some tiles of a matrix whose first output is column `column` of instr.out, and their epilogue.
void Program::multiply_tiles(const Instr& instr, const PackedMatrix& w, int column, Range tiles, const Inputs& in,
                             int thread) {
  const int num_rows = num_rows_;
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const size_t ldo = static_cast<size_t>(out.stride);
  const float* residual = instr.residual < 0 ? nullptr : buffers_[static_cast<size_t>(instr.residual)].data.get();
  float* scratch = scratch_[static_cast<size_t>(thread)].tiles.get();
  const int step = tiles_at_once(w, num_rows);
  for (int tile = tiles.begin; tile < tiles.end; tile += step) {
    const int n = std::min(step, tiles.end - tile);
    const int valid = std::min(n * kTileRows, w.outputs - tile * kTileRows);
    const size_t at = static_cast<size_t>(column) + static_cast<size_t>(tile) * kTileRows;
    if (!residual && valid == n * kTileRows) {
      multiply(w, tile, n, in, thread, out.data.get() + at, ldo);
      for (int r = 0; r < num_rows && instr.bias >= 0; r++)
        add_bias(instr, static_cast<int>(at), valid, out.data.get() + at + static_cast<size_t>(r) * ldo);
      continue;
    }
    const size_t lds = static_cast<size_t>(n) * kTileRows;
    multiply(w, tile, n, in, thread, scratch, lds);
    for (int r = 0; r < num_rows; r++) {
      const size_t row = at + static_cast<size_t>(r) * ldo;
      float* x = scratch + static_cast<size_t>(r) * lds;
      if (instr.bias >= 0) add_bias(instr, static_cast<int>(at), valid, x);
      store_sum(residual ? residual + row : nullptr, x, valid, out.data.get() + row);
    }
  }
}

void Program::run_linear(const Instr& instr, int thread) {
  const Inputs in = prepare(instr, thread);
  const bool is_qkv = instr.layer >= 0;
  const QkvShare mine = is_qkv ? qkv_share(geometry_, thread, pool_.num_threads()) : QkvShare{};
  int column = 0;
  for (int index : instr.weights) {
    const PackedMatrix& w = matrices_[static_cast<size_t>(index)];
    if (is_qkv && is_by_head()) {
      for (const Range& r : {mine.queries, mine.keys, mine.values})
        multiply_tiles(instr, w, column,
                       {std::clamp((r.begin - column) / kTileRows, 0, w.tiles),
                        std::clamp((r.end - column) / kTileRows, 0, w.tiles)},
                       in, thread);
    } else {
      multiply_tiles(instr, w, column, share(w.tiles, thread, pool_.num_threads()), in, thread);
    }
    column += w.outputs;
  }
  if (!is_qkv) return;
  if (!is_by_head() || has_wide_norm(instr)) pool_.barrier();
  if (has_wide_norm(instr)) norm_wide(instr, thread);
  rotate_and_append(instr, mine, thread);
  fetch_first_keys(instr.layer, thread);
}

void Program::run_gated(const Instr& instr, int thread) {
  const int num_rows = num_rows_;
  const Inputs in = prepare(instr, thread);
  const Buffer& out = buffers_[static_cast<size_t>(instr.out)];
  const PackedMatrix& gate = matrices_[static_cast<size_t>(instr.weights[0])];
  const PackedMatrix& up = matrices_[static_cast<size_t>(instr.weights[1])];
  float* a = scratch_[static_cast<size_t>(thread)].tiles.get();
  const auto act = instr.activation == Activation::Silu ? kernels_.silu_mul : kernels_.gelu_mul;
  // Codes are made of whole groups.
  const int unit = out.is_coded ? kGroup / kTileRows : 1;
  Range tiles = share(gate.tiles / unit, thread, pool_.num_threads());
  tiles = {tiles.begin * unit, tiles.end * unit};
  const int at_once = std::min(tiles_at_once(gate, num_rows), tiles_at_once(up, num_rows));
  const int step = std::max(unit, at_once / unit * unit);
  float* b = a + static_cast<size_t>(num_rows) * static_cast<size_t>(step) * kTileRows;
  for (int tile = tiles.begin; tile < tiles.end; tile += step) {
    const int n = std::min(step, tiles.end - tile);
    const int valid = std::min(n * kTileRows, gate.outputs - tile * kTileRows);
    const size_t lds = static_cast<size_t>(n) * kTileRows;
    multiply(gate, tile, n, in, thread, a, lds);
    multiply(up, tile, n, in, thread, b, lds);
    for (int r = 0; r < num_rows; r++) {
      float* x = a + static_cast<size_t>(r) * lds;
      act(x, b + static_cast<size_t>(r) * lds, n * kTileRows, x);
      if (!out.is_coded)
        std::memcpy(out.data.get() + static_cast<size_t>(r) * out.stride + static_cast<size_t>(tile) * kTileRows, x,
                    sizeof(float) * static_cast<size_t>(valid));
      else if ((r + 1) % kBlockRows == 0 || r + 1 == num_rows)
        encode(instr, a + static_cast<size_t>(r / kBlockRows * kBlockRows) * lds, lds, r / kBlockRows * kBlockRows,
               r % kBlockRows + 1, tile * kTileRows, valid);
    }
  }
}

void Program::run_logits(const Instr& instr, int thread) {
  const int num_rows = num_rows_;
  const Inputs in = prepare(instr, thread);
  const PackedMatrix& w = matrices_[static_cast<size_t>(instr.weights[0])];
  const size_t ldo = static_cast<size_t>(logit_stride());
  const Range tiles = share(w.tiles, thread, pool_.num_threads());
  const int step = tiles_at_once(w, num_rows);
  ThreadScratch& mine = scratch_[static_cast<size_t>(thread)];
  std::fill_n(mine.best.begin(), num_rows, Best{});
  for (int tile = tiles.begin; tile < tiles.end; tile += step) {
    const int n = std::min(step, tiles.end - tile), id = tile * kTileRows;
    multiply(w, tile, n, in, thread, logits_.get() + id, ldo);
    for (int r = 0; r < num_rows; r++)
      keep_best(instr, r, id, std::min(n * kTileRows, geometry_.vocab_size - id), &mine.best[static_cast<size_t>(r)]);
  }
  // Each thread its own ids, then one thread the best of all: the first of equal maxima is the lowest id.
  for (size_t r = 0; r < static_cast<size_t>(num_rows); r++) {
    Best& best = mine.best[r];
    if (best.id < 0) continue;
    const float* x = logits_.get() + r * ldo;
    while (x[best.id] != best.value) best.id++;
  }
  pool_.barrier();
  if (thread != 0) return;
  for (size_t r = 0; r < static_cast<size_t>(num_rows); r++) {
    Best best;
    for (const ThreadScratch& t : scratch_)
      if (t.best[r].id >= 0 && (best.id < 0 || t.best[r].value > best.value)) best = t.best[r];
    argmax_[r] = best.id;
  }
}

// Takes the logits [id, id + n) of a row into account while they are in cache; best.id is then the first of them.
void Program::keep_best(const Instr& instr, int row, int id, int n, Best* best) {
  const float* x = logits_.get() + static_cast<size_t>(row) * static_cast<size_t>(logit_stride()) + id;
  float value;
  if (!kernels_.largest(x, n, &value)) return flag_non_finite(instr, row);
  if (best->id < 0 || value > best->value) *best = {value, id};
}

}  // namespace forerun
