// Building a program: weights, buffers, instructions, KV storage.
#include "program.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "rope_table.h"

namespace forerun {

// With positions of 31 bits, an angle of which the quarter turns fit into 64 bits.
constexpr double kMaxFrequency = 1e8;

Program::Program(const Geometry& geometry, int num_threads, const KernelTable& kernels)
    : geometry_(geometry), kernels_(kernels), pool_(num_threads), scratch_(static_cast<size_t>(pool_.num_threads())) {
  const Geometry& g = geometry_;
  check_geometry(g);
  if (g.num_heads % g.num_kv_heads != 0 || g.num_heads / g.num_kv_heads > kMaxPairs || g.head_dim % 2 != 0)
    throw std::invalid_argument("heads must be a multiple of KV heads, at most 36 times, and the head size even");
  KvLayer kv{nullptr, g.is_kv_f32, g.num_kv_heads, g.head_dim, round_up(g.head_dim, 16)};
  // All layers in one array, which huge pages hold: a pass reads a little of every KV page.
  const size_t layer_elems = static_cast<size_t>(g.num_pages) * g.num_kv_heads * kv.page_elems();
  const size_t layer_bytes = layer_elems * (g.is_kv_f32 ? 4 : 2);
  kv_data_ = Array<uint8_t>(layer_bytes * static_cast<size_t>(g.num_layers));
  for (int layer = 0; layer < g.num_layers; layer++) {
    kv.data = kv_data_.get() + static_cast<size_t>(layer) * layer_bytes;
    kv_.push_back(kv);
  }
  profile_s_.assign(kNumOps, 0.0);
  argmax_.resize(static_cast<size_t>(g.max_rows));  // never moves: callers hold views of it
}

int Program::add_rope(const std::vector<double>& inv_freq, double magnitude) {
  const int half = static_cast<int>(inv_freq.size()), num_positions = geometry_.num_positions();
  if (half < 1 || 2 * half > geometry_.head_dim)
    throw std::invalid_argument("there must be a RoPE frequency per pair of a head, or fewer");
  for (const double freq : inv_freq)
    if (!(freq >= 0.0 && freq <= kMaxFrequency)) throw std::invalid_argument("a RoPE frequency is not from 0 to 1e8");
  const size_t n = static_cast<size_t>(num_positions) * static_cast<size_t>(half);
  RopeTable table{half, Array<float>(n), Array<float>(n)};
  for (size_t position = 0, at = 0; position < static_cast<size_t>(num_positions); position++) {
    for (const double freq : inv_freq) {
      double s, c;
      sin_cos(static_cast<double>(position) * freq, &s, &c);
      table.cos[at] = static_cast<float>(c * magnitude);
      table.sin[at++] = static_cast<float>(s * magnitude);
    }
  }
  ropes_.push_back(std::move(table));
  return static_cast<int>(ropes_.size()) - 1;
}

int Program::add_matrix(SourceFormat source, int outputs, int inputs, const uint8_t* data, const int32_t* rows) {
  check_matrix_shape(outputs, inputs);
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
  has_scratch_ = false;
  max_inputs_ = std::max(max_inputs_, round_up(inputs, kGroup));
  return static_cast<int>(matrices_.size()) - 1;
}

int Program::add_vector(const float* data, int n) {
  float* values = reinterpret_cast<float*>(weights_.allocate(sizeof(float) * static_cast<size_t>(round_up(n, kGroup))));
  std::memcpy(values, data, sizeof(float) * static_cast<size_t>(n));
  vectors_.push_back({values, n});
  has_scratch_ = false;
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_order(const int32_t* columns, int n) {
  std::vector<bool> is_there(static_cast<size_t>(n), false);
  for (int k = 0; k < n; k++) {
    const int32_t column = columns[k];
    if (column < 0 || column >= n || is_there[static_cast<size_t>(column)])
      throw std::invalid_argument("an order must name each column once");
    is_there[static_cast<size_t>(column)] = true;
  }
  orders_.emplace_back(columns, columns + n);
  has_scratch_ = false;
  return static_cast<int>(orders_.size()) - 1;
}

int Program::add_buffer(int width) {
  if (width < 1 || width > kMaxWidth) throw std::invalid_argument("a buffer has no width, or an absurd one");
  // Rows a multiple of 4 KB apart would share cache sets.
  Buffer buffer;
  buffer.width = width;
  buffer.stride = round_up(width, kGroup) + kTileRows;
  buffers_.push_back(std::move(buffer));
  has_scratch_ = false;
  return static_cast<int>(buffers_.size()) - 1;
}

int Program::add_variant() {
  variants_.emplace_back();
  return static_cast<int>(variants_.size()) - 1;
}

size_t Program::checked_variant(int variant) const {
  if (variant < 0 || variant >= static_cast<int>(variants_.size())) throw std::invalid_argument("no such variant");
  return static_cast<size_t>(variant);
}

void Program::add(const Instr& instr, int variant) {
  Variant& to = variants_[checked_variant(variant)];
  check(instr, to);
  for (const int w : instr.weights) {
    const PackedMatrix& m = matrices_[static_cast<size_t>(w)];
    to.weight_bytes += instr.op == Op::Embed ? 0 : m.tile_bytes * static_cast<size_t>(m.tiles);
  }
  to.instrs.push_back(instr);
  has_scratch_ = false;
}

size_t Program::kv_bytes() const {
  const size_t elem = geometry_.is_kv_f32 ? 4 : 2;
  return kv_.size() * kv_[0].page_elems() * elem * static_cast<size_t>(geometry_.num_pages) * geometry_.num_kv_heads;
}

size_t Program::scratch_bytes() const {
  size_t bytes = (logits_capacity_ + partials_capacity_) * sizeof(float) + shared_.num_bytes();
  for (const ThreadScratch& t : scratch_) bytes += t.num_bytes();
  for (const Buffer& b : buffers_) bytes += b.is_coded ? b.codes.num_bytes() : b.data.num_bytes();
  return bytes;
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

}  // namespace forerun
