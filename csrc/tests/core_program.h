// The pool, and whole programs, of test_core.cpp.
#pragma once
#include <atomic>
#include <stdexcept>

#include "core_support.h"

namespace forerun {
namespace test {

inline void check_pool(int num_threads, int num_runs) {
  constexpr int kBarriers = 5;
  Pool pool(num_threads);
  std::vector<int> written(static_cast<size_t>(num_threads));  // plain ints: the barrier alone orders them
  std::atomic<int> num_wrong{0}, num_calls{0};
  for (int run = 0; run < num_runs; run++) {
    pool.run([&](int thread) {
      num_calls++;
      for (int i = 0; i < kBarriers; i++) {
        written[static_cast<size_t>(thread)] = run * kBarriers + i;
        pool.barrier();
        for (const int value : written) num_wrong += value != run * kBarriers + i;
        pool.barrier();
      }
    });
  }
  CHECK(num_calls == num_threads * num_runs, "%d threads made %d calls", num_threads, num_calls.load());
  CHECK(num_wrong == 0, "%d threads saw %d stale values", num_threads, num_wrong.load());
}

// Denormals are flushed on every thread while a run lasts, and the caller's mode comes back.
inline void check_float_mode() {
  const volatile float small = 1e-38f, factor = 0.01f;
  Pool pool(3);
  CHECK(small * factor > 0, "denormals are kept here");
  std::atomic<int> num_kept{0};
  pool.run([&](int) { num_kept += small * factor != 0; });
  CHECK(num_kept == 0, "denormals are kept on %d threads", num_kept.load());
  CHECK(small * factor > 0, "the mode was left behind");
}

inline void test_pool() {
  check_float_mode();
  for (int num_threads = 1; num_threads <= 4; num_threads++) check_pool(num_threads, 300);
  check_pool(2 * num_available_cpus() + 3, 40);
  for (int i = 0; i < 100; i++) Pool(1 + i % 4).run([](int) {});  // starting and stopping
  for (int i = 0; i < 20; i++) Pool idle(1 + i % 4);
}

// A llama of two layers with random weights of one format.
struct Model {
  static constexpr int kHidden = 64, kInner = 96, kVocab = 407, kPages = 40, kMaxRows = 40;
  SourceFormat source;
  int num_heads, num_kv_heads, head_dim;
  bool is_kv_f32;
  SourceFormat down = source;  // of the matrix that reads what the gate lets through

  int qkv() const { return (num_heads + 2 * num_kv_heads) * head_dim; }

  std::unique_ptr<Program> bind(const KernelTable& table, int num_threads) const {
    auto program = bind_without_logits(table, num_threads);
    add_logits(*program, 0);
    return program;
  }
  // The same weights with one of the layers alone as the program.
  std::unique_ptr<Program> bind_layer(const KernelTable& table, int num_threads, int layer) const {
    auto program = bind_parts(table, num_threads, {layer});
    add_logits(*program, 0);
    return program;
  }
  // Another matrix, of floats, that could read what a gate lets through.
  static int add_float_down(Program& program) {
    Rng rng(5);
    const std::vector<uint8_t> bytes = random_source(rng, SourceFormat::F32, kHidden, kInner);
    return program.add_matrix(SourceFormat::F32, kHidden, kInner, bytes.data(), nullptr);
  }
  // One of the layers as a variant of a program that `bind` made; returns its number. `down` is the matrix that reads
  // what the gate lets through, -1 the layer's own.
  int add_layer(Program& program, int layer, int down = -1) const {
    const int variant = program.add_variant();
    add_embed(program, variant);
    add_layer_instrs(program, variant, layer, down);
    add_logits(program, variant);
    return variant;
  }
  std::unique_ptr<Program> bind_without_logits(const KernelTable& table, int num_threads) const {
    return bind_parts(table, num_threads, {0, 1});
  }

 private:
  // Matrices: the embedding, then of each layer q, k, v, o, gate, up and down. Vectors: of each layer the norms before
  // QKV and before the gate, then that of the logits. Buffers: hidden state, QKV, attended, inner.
  static void add_embed(Program& program, int variant) {
    program.add(instr(Op::Embed, -1, -1, 0, {0}, -1, -1), variant);
  }
  static void add_layer_instrs(Program& program, int variant, int layer, int down = -1) {
    const int m = 1 + 7 * layer, v = 2 * layer;
    program.add(instr(Op::Linear, 0, -1, 1, {m, m + 1, m + 2}, v, layer), variant);
    program.add(instr(Op::Attention, 1, -1, 2, {}, -1, layer), variant);
    program.add(instr(Op::LinearAdd, 2, 0, 0, {m + 3}, -1, -1), variant);
    program.add(instr(Op::Gated, 0, -1, 3, {m + 4, m + 5}, v + 1, -1), variant);
    program.add(instr(Op::LinearAdd, 3, 0, 0, {down < 0 ? m + 6 : down}, -1, -1), variant);
  }
  static void add_logits(Program& program, int variant) {
    program.add(instr(Op::Logits, 0, -1, -1, {0}, 4, -1), variant);
  }
  std::unique_ptr<Program> bind_parts(const KernelTable& table, int num_threads, const std::vector<int>& layers) const {
    const Geometry g{kVocab, 2, num_heads, num_kv_heads, head_dim, kPages, kMaxRows, is_kv_f32};
    std::vector<double> inv_freq;
    for (int i = 0; i < head_dim / 2; i++) inv_freq.push_back(std::pow(10000.0, -2.0 * i / head_dim));
    auto program = std::make_unique<Program>(g, num_threads, table);
    program->add_rope(inv_freq, 1.0);
    Rng rng(77);
    auto matrix_as = [&](SourceFormat format, int outputs, int inputs) {
      const std::vector<uint8_t> bytes = tame_source(rng, format, outputs, inputs);
      return program->add_matrix(format, outputs, inputs, bytes.data(), nullptr);
    };
    auto matrix = [&](int outputs, int inputs) { return matrix_as(source, outputs, inputs); };
    auto norm = [&](int n) {
      std::vector<float> w(static_cast<size_t>(n));
      for (float& x : w) x = rng.uniform(0.5f, 1.5f);
      return program->add_vector(w.data(), n);
    };
    for (const int width : {kHidden, qkv(), num_heads * head_dim, kInner}) program->add_buffer(width);
    // The last tokens are the first ones again: the largest logit is often there twice, further apart than a thread's
    // tiles.
    std::vector<int32_t> rows;
    for (int n = 0; n < kVocab; n++) rows.push_back(n % 300);
    const std::vector<uint8_t> table_bytes = tame_source(rng, source, kVocab, kHidden);
    program->add_matrix(source, kVocab, kHidden, table_bytes.data(), rows.data());
    for (int layer = 0; layer < 2; layer++) {
      matrix(num_heads * head_dim, kHidden);
      for (int i = 0; i < 2; i++) matrix(num_kv_heads * head_dim, kHidden);
      norm(kHidden);
      matrix(kHidden, num_heads * head_dim);
      for (int i = 0; i < 2; i++) matrix(kInner, kHidden);
      norm(kHidden);
      matrix_as(down, kHidden, kInner);
    }
    const std::vector<float> last_norm(kHidden, 1.1f);
    program->add_vector(last_norm.data(), kHidden);
    add_embed(*program, 0);
    for (const int layer : layers) add_layer_instrs(*program, 0, layer);
    return program;
  }

  static Instr instr(Op op, int in, int residual, int out, std::vector<int> weights, int norm, int layer) {
    Instr i{};
    i.op = op;
    i.in = in;
    i.residual = residual;
    i.out = out;
    i.weights = std::move(weights);
    i.norm = norm;
    i.eps = 1e-5f;
    i.layer = layer;
    if (op == Op::Linear) {
      i.rope = 0;
      i.scale = 0.2f;
    }
    return i;
  }
  // Weights of order a tenth, so that activations stay of order one.
  static std::vector<uint8_t> tame_source(Rng& rng, SourceFormat source, int outputs, int inputs) {
    std::vector<uint8_t> data = random_source(rng, source, outputs, inputs);
    if (is_float(source)) return data;
    const size_t block_bytes = source_row_bytes(source, block_len(source));
    const HalfsAt at = halfs_at(source);
    for (uint8_t* p = data.data(); p < data.data() + data.size(); p += block_bytes) {
      const float largest = source == SourceFormat::Q8_0 || source == SourceFormat::IQ4_NL     ? 127.0f
                            : source == SourceFormat::Q5_0 || source == SourceFormat::Q5_1 ? 16.0f
                                                                                           : 8.0f;
      const float scale = rng.uniform(0.5f, 1.5f) * 0.25f / largest;
      const uint16_t d = float_to_half(scale), min = float_to_half(-0.93f * largest * scale);
      std::memcpy(p + at.d, &d, 2);
      if (at.min >= 0) std::memcpy(p + at.min, &min, 2);
    }
    return data;
  }
};

// Rows of sequences and what they see; owns the arrays of a step.
struct Rows {
  std::vector<int32_t> token_ids, positions, slots, visible_len, tail_base, seq_ids, page_table, logit_rows;
  std::vector<uint64_t> tail_mask;

  int num_seqs = 1;

  explicit Rows(std::vector<int32_t> table) : page_table(std::move(table)) {}
  // What is added from here on belongs to another sequence; its table is as long as the first.
  void next_sequence(const std::vector<int32_t>& table) {
    page_table.insert(page_table.end(), table.begin(), table.end());
    num_seqs++;
  }
  void add(int token_id, int position, int slot, int visible, int base = 0, uint64_t mask = 0) {
    logit_rows.push_back(static_cast<int32_t>(token_ids.size()));
    token_ids.push_back(token_id);
    positions.push_back(position);
    slots.push_back(slot);
    visible_len.push_back(visible);
    tail_base.push_back(base);
    tail_mask.push_back(mask);
    seq_ids.push_back(num_seqs - 1);
  }
  // Logits [logit rows][vocabulary] of one pass.
  std::vector<float> forward(Program& program, int variant = 0) const {
    const StepArgs step{static_cast<int>(token_ids.size()),
                        token_ids.data(),
                        positions.data(),
                        slots.data(),
                        visible_len.data(),
                        tail_base.data(),
                        tail_mask.data(),
                        seq_ids.data(),
                        page_table.data(),
                        num_seqs,
                        static_cast<int>(page_table.size()) / num_seqs,
                        logit_rows.data(),
                        static_cast<int>(logit_rows.size())};
    program.forward(step, variant);
    std::vector<float> out;
    const size_t stride = static_cast<size_t>(program.logit_stride());
    for (size_t r = 0; r < logit_rows.size(); r++) {
      const float* row = program.logits() + r * stride;
      out.insert(out.end(), row, row + Model::kVocab);
      const long best = std::max_element(row, row + Model::kVocab) - row;
      CHECK(program.argmax()[r] == best, "argmax of row %zu", r);
    }
    return out;
  }
};

inline std::vector<int32_t> page_order(int stride) {
  std::vector<int32_t> table;
  for (int page = 0; page < Model::kPages; page++) table.push_back(page * stride % Model::kPages);
  return table;
}

// Logits of the positions from `start` on, in passes of the given sizes over and over.
inline std::vector<float> run_text(Program& program, const std::vector<int>& text, const std::vector<int>& passes,
                                   int page_stride, size_t start = 0, int variant = 0) {
  std::vector<float> out;
  size_t at = start;
  for (size_t i = 0; at < text.size(); i++) {
    Rows rows(page_order(page_stride));
    for (int r = 0; r < passes[i % passes.size()] && at < text.size(); r++, at++) {
      const int slot = static_cast<int>(at);
      rows.add(text[at], slot, slot, slot + 1);
    }
    const std::vector<float> logits = rows.forward(program, variant);
    out.insert(out.end(), logits.begin(), logits.end());
  }
  return out;
}

// Passes that want the logits of some of their rows, or of none.
inline void check_wanted_rows(Program& program, const std::vector<int>& text, const std::vector<float>& want, Rng& rng,
                              int variant = 0) {
  for (size_t at = 0; at < text.size();) {
    Rows rows(page_order(1));
    const size_t begin = at, num = static_cast<size_t>(rng.between(1, Model::kMaxRows));
    for (; at < text.size() && at < begin + num; at++) {
      const int slot = static_cast<int>(at);
      rows.add(text[at], slot, slot, slot + 1);
    }
    std::vector<int32_t> wanted;
    const int one_in = 1 << rng.between(0, 6);
    for (const int32_t row : rows.logit_rows)
      if (rng.between(1, one_in) == 1) wanted.push_back(row);
    rows.logit_rows = wanted;
    const std::vector<float> got = rows.forward(program, variant);
    for (size_t r = 0; r < wanted.size(); r++)
      CHECK(std::memcmp(got.data() + r * Model::kVocab,
                        want.data() + (begin + static_cast<size_t>(wanted[r])) * Model::kVocab, Model::kVocab * 4) == 0,
            "row %d of %zu, one of %zu", wanted[r], at - begin, wanted.size());
  }
}

// Two sequences in one pass, the second's slots going on in the page where the first's stop: each as if alone.
inline void check_two_sequences(const Model& model, const KernelTable& table, const std::vector<int>& text) {
  const auto together = model.bind(table, 2), alone = model.bind(table, 1);
  std::vector<int32_t> tables[2] = {page_order(1), page_order(1)};
  tables[0].resize(Model::kPages / 2);
  tables[1].erase(tables[1].begin(), tables[1].begin() + Model::kPages / 2);
  for (size_t at = 0; at + 10 <= text.size(); at += 10) {
    Rows both(tables[0]);
    std::vector<float> want;
    for (size_t s = 0; s < 2; s++) {
      if (s) both.next_sequence(tables[1]);
      Rows one(tables[s]);
      for (size_t i = 5 * s; i < 5 * s + 5; i++) {
        const int slot = static_cast<int>(at / 2 + i % 5 + 5 * s);  // the second starts five slots further on
        for (Rows* rows : {&both, &one}) rows->add(text[at + i], slot, slot, slot + 1);
      }
      const std::vector<float> logits = one.forward(*alone);
      want.insert(want.end(), logits.begin(), logits.end());
    }
    CHECK(same_bits(want, both.forward(*together)), "%s at %zu", table.name, at);
  }
}

// A tree after the text, nodes in tail slots: each equals its path as a chain. Then one path is moved and continued.
inline void check_tree(const Model& model, const KernelTable& table, int num_threads, const std::vector<int>& text) {
  constexpr int kParents[] = {-1, 0, 0, 1, 1, 3, 2, 5, 7, 8}, kNodes = 10;
  const auto program = model.bind(table, num_threads), plain = model.bind(table, 1);
  run_text(*program, text, {40, 7}, 1);
  run_text(*plain, text, {40}, 1);
  const int committed = static_cast<int>(text.size());
  Rows tree(page_order(1));
  std::vector<uint64_t> masks;
  for (int node = 0; node < kNodes; node++) {
    masks.push_back((kParents[node] < 0 ? 0 : masks[static_cast<size_t>(kParents[node])]) | uint64_t{1} << node);
    const int depth = __builtin_popcountll(masks.back());
    tree.add(node * 3 + 1, committed + depth - 1, committed + node, committed, committed, masks.back());
  }
  const std::vector<float> got = tree.forward(*program);
  std::vector<int> path;
  std::vector<int32_t> src, dst;
  for (int node = 0; node < kNodes; node++) {
    path = text;
    src.clear();
    for (int bit = 0; bit < kNodes; bit++) {
      if (!(masks[static_cast<size_t>(node)] >> bit & 1)) continue;
      path.push_back(bit * 3 + 1);
      src.push_back(committed + bit);
    }
    const std::vector<float> chain = run_text(*plain, path, {40}, 1, text.size());
    CHECK(std::memcmp(got.data() + static_cast<size_t>(node) * Model::kVocab, &chain[chain.size() - Model::kVocab],
                      Model::kVocab * 4) == 0,
          "%s: tree node %d differs from its chain", table.name, node);
  }
  for (size_t i = 0; i < src.size(); i++) dst.push_back(committed + static_cast<int>(i));
  const std::vector<int32_t> pages = page_order(1);
  program->move_slots(pages.data(), Model::kPages, src.data(), dst.data(), static_cast<int>(src.size()));
  Rows next(pages);
  const int slot = static_cast<int>(path.size());
  next.add(5, slot, slot, slot + 1);
  CHECK(same_bits(next.forward(*program), next.forward(*plain)), "%s: after moving slots", table.name);
}

// A layer as a variant has the bits of a program of that layer alone, and neither disturbs the other; variants come
// when the whole model has run.
inline void check_variants(const Model& model, const KernelTable& table, int num_threads, const std::vector<int>& text,
                           Rng& rng) {
  const auto program = model.bind(table, num_threads);
  const int float_down = Model::add_float_down(*program);
  const std::vector<float> whole = run_text(*program, text, {40, 7}, 1);
  const size_t whole_bytes = program->weight_bytes();
  for (int layer = 0; layer < 2; layer++) {
    const auto alone = model.bind_layer(reference(), 1, layer);
    const std::vector<float> want = run_text(*alone, text, {11}, 1);
    const int variant = model.add_layer(*program, layer);
    CHECK(program->weight_bytes(variant) == alone->weight_bytes(), "layer %d", layer);
    CHECK(same_bits(want, run_text(*program, text, {1, 40, 17, 3}, 1, 0, variant)), "%s, %s, layer %d", table.name,
          name_of(model.source), layer);
    check_wanted_rows(*program, text, want, rng, variant);
    CHECK(same_bits(whole, run_text(*program, text, {1, 16, 33}, 1)), "%s: the whole model after layer %d", table.name,
          layer);
    check_wanted_rows(*program, text, whole, rng);
  }
  CHECK(program->weight_bytes() == whole_bytes, "a variant's bytes are the model's");
  // What a gate lets through was quantised at once, until somebody reads it as floats.
  const int floats = model.add_layer(*program, 1, float_down);
  const std::vector<float> first = run_text(*program, text, {40}, 1, 0, floats);
  CHECK(same_bits(whole, run_text(*program, text, {40, 2}, 1)), "%s: the whole model after floats", table.name);
  CHECK(same_bits(first, run_text(*program, text, {3, 33}, 1, 0, floats)), "%s: floats again", table.name);
}

template <class Fn>
bool refuses(Fn run) {
  try {
    run();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

inline void check_refused(Program& program, const Rows& rows, const char* what) {
  CHECK(refuses([&] { rows.forward(program); }), "%s", what);
}

inline void test_variants_refuse() {
  const Model model{SourceFormat::Q8_0, 4, 2, 16, false};
  const auto program = model.bind(reference(), 1);
  const int variant = model.add_layer(*program, 1);
  Rows rows({0, 1});
  rows.add(0, 0, 0, 1);
  for (const int unknown : {-1, variant + 1}) {
    CHECK(refuses([&] { rows.forward(*program, unknown); }), "a pass of variant %d", unknown);
    CHECK(refuses([&] { program->weight_bytes(unknown); }), "the bytes of variant %d", unknown);
    CHECK(refuses([&] { program->add(Instr{Op::Embed, -1, -1, 0, {0}}, unknown); }), "variant %d", unknown);
  }
  CHECK(refuses([&] { program->add(Instr{Op::Gated, 0, -1, 3, {5, 6}}, variant); }), "something after the logits");
  const int open = program->add_variant();
  program->add(Instr{Op::Embed, -1, -1, 0, {0}}, open);
  CHECK(refuses([&] { program->add(Instr{Op::Gated, 0, -1, 3, {5, 4}}, open); }), "a gate of other sizes");
  rows.logit_rows.clear();
  rows.forward(*program, open);
  CHECK(refuses([&] { program->add(Instr{Op::Gated, 0, -1, 3, {5, 6}}, open); }), "a list that has run");
}

inline void test_program_refuses() {
  const auto program = Model{SourceFormat::Q8_0, 4, 2, 16, false}.bind(reference(), 1);
  const int32_t most = std::numeric_limits<int32_t>::max();
  const std::vector<int32_t> pages{0, 1};
  auto refused = [&](int token_id, int position, int slot, int visible, int base, uint64_t mask, const char* what) {
    Rows rows(pages);
    rows.add(token_id, position, slot, visible, base, mask);
    check_refused(*program, rows, what);
  };
  refused(-1, 0, 0, 1, 0, 0, "a negative token id");
  refused(Model::kVocab, 0, 0, 1, 0, 0, "a token id past the vocabulary");
  refused(0, -1, 0, 1, 0, 0, "a negative position");
  refused(0, most, 0, 1, 0, 0, "a position past the tables");
  refused(0, 0, -1, 1, 0, 0, "a negative slot");
  refused(0, 0, 32, 1, 0, 0, "a slot past the pages");
  refused(0, 0, 0, -1, 0, 0, "a negative visible length");
  refused(0, 0, 0, 33, 0, 0, "a visible length past the pages");
  refused(0, 0, 0, 0, 0, 0, "a row that sees nothing");
  refused(0, 0, 0, 1, -1, 2, "a tail before the sequence");
  refused(0, 0, 0, 1, 1, uint64_t{1} << 63, "a tail past the pages");
  refused(0, 0, 0, 1, most, 1, "a tail whose end does not fit an int");
  for (const std::vector<int32_t>& wanted : {std::vector<int32_t>{1, 0}, std::vector<int32_t>{1, 1}}) {
    Rows rows(pages);
    for (int slot = 0; slot < 2; slot++) rows.add(0, slot, slot, slot + 1);
    rows.logit_rows = wanted;
    check_refused(*program, rows, "logit rows that do not ascend");
  }
}

inline void check_program(const Model& model, int text_len, size_t turn) {
  const std::vector<std::vector<int>> passes{{40}, {1, 2, 3, 5, 8, 9, 15, 16, 17, 20, 21, 31, 33, 36}, {7, 24}};
  Rng rng(30 + turn);
  std::vector<int> text;
  for (int i = 0; i < text_len; i++) text.push_back(rng.between(0, Model::kVocab - 1));
  const std::vector<float> want = run_text(*model.bind(reference(), 1), text, {1}, 1);
  for (const KernelTable* table : all_tables()) {
    const auto program = model.bind(*table, 1 + static_cast<int>(turn % 3));
    CHECK(same_bits(want, run_text(*program, text, passes[turn / 2 % passes.size()], turn % 2 ? 1 : 7)),
          "%s, %s, head size %d, turn %zu", table->name, name_of(model.source), model.head_dim, turn);
    check_wanted_rows(*program, text, want, rng);
    turn++;
  }
  check_tree(model, *all_tables().back(), 2, text);
  check_variants(model, *all_tables()[turn % all_tables().size()], 1 + static_cast<int>(turn % 3), text, rng);
  check_two_sequences(model, *all_tables().back(), text);
}

// The shares of the threads cover every column of QKV once, and in order.
inline void test_qkv_shares() {
  const int shapes[][3] = {{8, 2, 64},  {9, 3, 64},   {14, 2, 64}, {12, 2, 128},
                           {4, 1, 256}, {32, 32, 16}, {7, 7, 24},  {1, 1, 16}};
  for (const auto& [num_heads, num_kv_heads, head_dim] : shapes) {
    const Geometry g{100, 1, num_heads, num_kv_heads, head_dim, 1, 1, false};
    const int first_key = num_heads * head_dim, first_value = first_key + num_kv_heads * head_dim;
    for (int num_threads = 1; num_threads <= 70; num_threads++) {
      int query = 0, key = first_key, value = first_value;
      for (int thread = 0; thread < num_threads; thread++) {
        const QkvShare mine = qkv_share(g, thread, num_threads);
        CHECK(mine.queries.begin == query && mine.keys.begin == key && mine.values.begin == value &&
                  mine.values.end >= value && mine.values.end % (head_dim % 16 ? head_dim : 16) == 0,
              "%d heads, %d KV heads of %d: thread %d of %d", num_heads, num_kv_heads, head_dim, thread, num_threads);
        query = mine.queries.end;
        key = mine.keys.end;
        value = mine.values.end;
      }
      CHECK(query == first_key && key == first_value && value == first_value + num_kv_heads * head_dim,
            "%d heads, %d KV heads of %d on %d threads", num_heads, num_kv_heads, head_dim, num_threads);
    }
  }
}

// Programs that would read or write outside, or have something ignored.
inline void test_program_refuses_instructions() {
  using Change = void (*)(Instr&);
  const Model model{SourceFormat::Q8_0, 4, 2, 16, false};
  auto check = [&](const char* what, Instr instr, Change change) {
    const auto program = model.bind_without_logits(reference(), 1);
    std::vector<int32_t> columns(Model::kInner);
    for (int k = 0; k < Model::kInner; k++) columns[static_cast<size_t>(k)] = k;
    program->add_order(columns.data(), Model::kInner);
    change(instr);
    CHECK(refuses([&] { program->add(instr); }), "%s", what);
  };
  // Buffers: 0 the hidden state, 1 QKV, 2 attended, 3 inner. Matrices: 0 the embedding, 1 to 3 QKV, 4 o, 5 and 6 gate
  // and up, 7 down. Vector 0 is a norm of the hidden state, order 0 one of the inner columns.
  Instr gated, sum, logits, qkv;
  gated.op = Op::Gated, gated.in = 0, gated.out = 3, gated.weights = {5, 6};
  sum.op = Op::NormAdd, sum.in = 2, sum.residual = 0, sum.out = 0, sum.norm = 0;
  logits.op = Op::Logits, logits.in = 0, logits.weights = {0};
  qkv.op = Op::Linear, qkv.in = 0, qkv.out = 1, qkv.weights = {1, 2, 3}, qkv.layer = 0, qkv.rope = 0;
  check("gate and up of other sizes", gated, [](Instr& i) { i.weights = {1, 2}; });
  check("one matrix of a gate", gated, [](Instr& i) { i.weights = {5}; });
  check("a residual of a gate", gated, [](Instr& i) { i.residual = 0; });
  check("a bias of a gate", gated, [](Instr& i) { i.bias = 0; });
  check("a sum without a norm", sum, [](Instr& i) { i.norm = -1; });
  check("a sum with a matrix", sum, [](Instr& i) { i.weights = {0}; });
  check("a sum of nothing", sum, [](Instr& i) { i.residual = -1; });
  check("an embedding of another vocabulary", gated,
        [](Instr& i) { i.op = Op::Embed, i.in = -1, i.out = 0, i.weights = {4}; });
  check("logits of another width", logits, [](Instr& i) { i.in = 3; });
  check("logits into a buffer", logits, [](Instr& i) { i.out = 1; });
  check("an unknown RoPE table", qkv, [](Instr& i) { i.rope = 1; });
  check("a norm of neither one head nor all", qkv, [](Instr& i) { i.k_norm = 0; });
  check("a layer without a cache", qkv, [](Instr& i) { i.layer = 2; });
  check("an unknown vector", qkv, [](Instr& i) { i.bias = 99; });
  check("a bias of another size", qkv, [](Instr& i) { i.bias = 0; });
  check("an unknown order", qkv, [](Instr& i) { i.order = 1; });
  check("an order of another width", qkv, [](Instr& i) { i.order = 0; });
  check("an order of a sum", sum, [](Instr& i) { i.order = 0; });
  check("no matrix", qkv, [](Instr& i) { i.weights = {}; });
  check("more matrices than any instruction has", qkv, [](Instr& i) { i.weights = {0, 0, 0, 0}; });
  const auto program = model.bind(reference(), 1);
  CHECK(refuses([&] { program->add(gated); }), "something after the logits");
}

inline void test_program() {
  test_qkv_shares();
  test_program_refuses_instructions();
  size_t turn = 0;
  for (const SourceFormat source : kSources) {
    // 16: heads are whole tiles; 24: they are not, and a vector is half empty.
    check_program({source, 4, 2, 16, source == SourceFormat::F16}, 41, turn++);
    check_program({source, 4, 1, 24, false}, 45, turn++);
  }
  // What the gate lets through is quantised at once only if a quantised matrix reads it.
  check_program({SourceFormat::Q4_1, 4, 2, 16, false, SourceFormat::F32}, 43, turn++);
  check_program({SourceFormat::F32, 4, 2, 16, false, SourceFormat::Q8_0}, 43, turn++);
  check_program({SourceFormat::Q8_0, 4, 2, 16, false, SourceFormat::BF16}, 43, turn++);
  check_program({SourceFormat::BF16, 4, 2, 16, false, SourceFormat::Q4_1}, 43, turn++);
  // A split of attention ends within the text, and within the tree after it.
  check_program({SourceFormat::Q4_1, 4, 1, 24, true}, 270, turn++);
  check_program({SourceFormat::Q8_0, 3, 3, 32, false}, 250, turn++);
  test_program_refuses();
  test_variants_refuse();
}

}  // namespace test
}  // namespace forerun
