// What an instruction must be like. A program comes from outside, so nothing about it is believed.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "program.h"

namespace forerun {
namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("bad instruction: ") + what);
}

void require_size(int value, int most, const char* what) {
  if (value < 1 || value > most)
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + ", but must be from 1 to " +
                                std::to_string(most));
}

}  // namespace

void check_geometry(const Geometry& g) {
  require_size(g.vocab_size, kMaxWidth, "the vocabulary");
  require_size(g.num_layers, 1 << 16, "the number of layers");
  require_size(g.num_heads, 1 << 16, "the number of heads");
  require_size(g.num_kv_heads, 1 << 16, "the number of KV heads");
  require_size(g.head_dim, 1 << 16, "the head size");
  require_size(g.num_pages, INT32_MAX / kPageTokens, "the number of pages");
  require_size(g.max_positions, INT32_MAX, "the number of positions");
  require_size(g.max_rows, 1 << 20, "the number of rows");
  if ((g.num_heads + 2 * int64_t{g.num_kv_heads}) * g.head_dim > kMaxWidth)
    throw std::invalid_argument("the heads together are wider than " + std::to_string(kMaxWidth));
}

void check_matrix_shape(int outputs, int inputs) {
  require_size(outputs, kMaxWidth, "the number of outputs of a matrix");
  require_size(inputs, kMaxWidth, "the number of inputs of a matrix");
}

void Program::check(const Instr& instr, const Variant& variant) const {
  require(!variant.has_run, "its list has run already");
  require(variant.instrs.empty() || variant.instrs.back().op != Op::Logits, "nothing may follow the logits");
  check_names(instr);
  check_matrices(instr);
  switch (instr.op) {
    case Op::Attention: return check_attention(instr);
    case Op::NormAdd:
      require(instr.norm >= 0, "no norm");
      require(width(instr.residual) == width(instr.in) && width(instr.out) == width(instr.in), "output width");
      return require(width(instr.in) <= max_inputs_, "a norm of more than any matrix reads");
    default:
      if (instr.op == Op::Linear && instr.layer >= 0) check_qkv(instr);
  }
}

// Everything an instruction refers to exists, and it refers to nothing that it would not use.
void Program::check_names(const Instr& instr) const {
  auto is_buffer = [&](int b) { return b >= 0 && b < static_cast<int>(buffers_.size()); };
  const bool is_embed = instr.op == Op::Embed, is_sum = instr.op == Op::LinearAdd || instr.op == Op::NormAdd;
  for (const int w : instr.weights) require(w >= 0 && w < static_cast<int>(matrices_.size()), "unknown matrix");
  for (const int v : {instr.norm, instr.bias, instr.q_norm, instr.k_norm})
    require(v >= -1 && v < static_cast<int>(vectors_.size()), "unknown vector");
  require(is_embed ? instr.in == -1 : is_buffer(instr.in), "unknown input");
  require(instr.op == Op::Logits ? instr.out == -1 : is_buffer(instr.out), "unknown output");
  require(is_sum ? is_buffer(instr.residual) : instr.residual == -1, "unknown residual");
  require(instr.out != instr.in, "output overwrites the input");
  require(instr.norm < 0 || (!is_embed && vector_size(instr.norm) == width(instr.in)),
          "norm and input differ in width");
  require(instr.order >= -1 && instr.order < static_cast<int>(orders_.size()), "unknown order");
  require(instr.order < 0 || (!is_embed && !instr.weights.empty()), "an order that nothing reads in");
  require(instr.order < 0 || static_cast<int>(orders_[static_cast<size_t>(instr.order)].size()) == width(instr.in),
          "order and input differ in width");
  require(instr.bias < 0 || instr.op == Op::Linear || instr.op == Op::LinearAdd, "a bias that nothing adds");
}

// Matrices read the input and make the output.
void Program::check_matrices(const Instr& instr) const {
  const bool is_embed = instr.op == Op::Embed, is_gated = instr.op == Op::Gated;
  const bool has_matrices = instr.op != Op::Attention && instr.op != Op::NormAdd;
  require(instr.weights.empty() != has_matrices && instr.weights.size() <= 3, "matrices");
  if (!has_matrices) return;
  int outputs = 0;
  for (const int w : instr.weights) {
    const PackedMatrix& m = matrices_[static_cast<size_t>(w)];
    outputs += m.outputs;
    require(m.inputs == width(is_embed ? instr.out : instr.in), "matrix and input differ in width");
    require(!is_gated || m.outputs == width(instr.out), "gate and up differ");
  }
  require(!is_gated || instr.weights.size() == 2, "gate and up differ");
  if (instr.op == Op::Linear || instr.op == Op::LinearAdd) require(outputs == width(instr.out), "output width");
  if (instr.op == Op::LinearAdd) require(outputs == width(instr.residual), "residual width");
  if (instr.op == Op::Logits || is_embed) require(outputs == geometry_.vocab_size, "vocabulary");
  require(instr.bias < 0 || vector_size(instr.bias) == outputs, "bias width");
}

void Program::check_attention(const Instr& instr) const {
  const Geometry& g = geometry_;
  require(instr.layer >= 0 && instr.layer < g.num_layers, "layer");
  require(width(instr.in) == (g.num_heads + 2 * g.num_kv_heads) * g.head_dim, "QKV width");
  require(width(instr.out) == g.num_heads * g.head_dim, "output width");
  require(instr.window >= 0, "window");
}

void Program::check_qkv(const Instr& instr) const {
  const Geometry& g = geometry_;
  require(instr.layer < g.num_layers, "layer");
  require(width(instr.out) == (g.num_heads + 2 * g.num_kv_heads) * g.head_dim, "QKV width");
  require(instr.rope >= -1 && instr.rope < static_cast<int>(ropes_.size()), "unknown RoPE table");
  for (const auto& [norm, heads] : {std::pair{instr.q_norm, g.num_heads}, std::pair{instr.k_norm, g.num_kv_heads}})
    require(norm < 0 || vector_size(norm) == g.head_dim || vector_size(norm) == heads * g.head_dim, "norm of heads");
}

}  // namespace forerun
