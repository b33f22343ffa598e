// The one bridge between Python and the kernels. Checks dtypes and ranks; shapes that the kernels rely on are checked
// again behind it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"
#include "program.h"
#include "step_rows.h"
#include "stream.h"

namespace nb = nanobind;
using namespace forerun;

void bind_control(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_suffix(nb::module_& m);

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class E>
E checked_enum(int value, int count, const char* what) {
  if (value < 0 || value >= count) throw std::invalid_argument(std::string("unknown ") + what);
  return static_cast<E>(value);
}

void add_instr(Program& program, int op, int in, int residual, int out, std::vector<int> weights, int norm, float eps,
               int bias, int activation, int layer, float scale, int order, int rope, int q_norm, int k_norm,
               float qk_eps, int window, int variant) {
  Instr instr;
  instr.op = checked_enum<Op>(op, kNumOps, "operation");
  instr.in = in;
  instr.residual = residual;
  instr.out = out;
  instr.weights = std::move(weights);
  instr.norm = norm;
  instr.eps = eps;
  instr.bias = bias;
  instr.activation = checked_enum<Activation>(activation, 2, "activation");
  instr.layer = layer;
  instr.scale = scale;
  instr.order = order;
  instr.rope = rope;
  instr.q_norm = q_norm;
  instr.k_norm = k_norm;
  instr.qk_eps = qk_eps;
  instr.window = window;
  program.add(instr, variant);
}

void forward(Program& program, Vector<int32_t> token_ids, Vector<int32_t> positions, Vector<int32_t> slots,
             Vector<int32_t> visible_len, Vector<int32_t> tail_base, Vector<uint64_t> tail_mask,
             Vector<int32_t> seq_ids, Matrix<int32_t> page_tables, Vector<int32_t> logit_rows, int variant) {
  const size_t n = token_ids.size();
  if (positions.size() != n || slots.size() != n || visible_len.size() != n || tail_base.size() != n ||
      tail_mask.size() != n || seq_ids.size() != n)
    throw std::invalid_argument("the arrays of a step differ in length");
  StepArgs step{};
  step.num_rows = static_cast<int>(n);
  step.token_ids = token_ids.data();
  step.positions = positions.data();
  step.slots = slots.data();
  step.visible_len = visible_len.data();
  step.tail_base = tail_base.data();
  step.tail_mask = tail_mask.data();
  step.seq_ids = seq_ids.data();
  step.page_tables = page_tables.data();
  step.num_seqs = static_cast<int>(page_tables.shape(0));
  step.num_table_pages = static_cast<int>(page_tables.shape(1));
  step.logit_rows = logit_rows.data();
  step.num_logit_rows = static_cast<int>(logit_rows.size());
  nb::gil_scoped_release release;
  program.forward(step, variant);
}

// A pass over rows that were filled in; returns the argmax of each row whose logits are wanted.
nb::list forward_rows(Program& program, StepRows& rows, int variant) {
  const StepArgs step = rows.args();
  {
    nb::gil_scoped_release release;
    program.forward(step, variant);
  }
  nb::list argmax;
  for (int row = 0; row < step.num_logit_rows; row++) argmax.append(program.argmax()[row]);
  return argmax;
}

double stream_read(int num_threads, size_t num_bytes) {
  nb::gil_scoped_release release;
  return stream_read_gb_per_s(num_threads, num_bytes);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native CPU backend: programs, kernels and sampling.";
  m.def("available_isas", &available_isas, "Instruction sets this machine has, slowest first.");
  m.def("num_available_cpus", &num_available_cpus);
  m.def("packed_formats", &source_format_names, "Weight formats that add_matrix takes.");
  m.def("stream_read_gb_per_s", &stream_read, nb::arg("num_threads"), nb::arg("num_bytes"));
  m.def(
      "exp_f32",
      [](const std::string& isa, Vector<float> x, nb::ndarray<float, nb::ndim<1>, nb::c_contig> out) {
        if (out.size() != x.size()) throw std::invalid_argument("x and out differ in length");
        kernels_for(isa).exp_f32(x.data(), static_cast<int>(x.size()), out.data());
      },
      "exp of each value as the kernels compute it.");

  nb::class_<StepRows>(m, "StepRows")
      .def(nb::init<>())
      .def("clear", &StepRows::clear)
      .def(
          "add_draft",
          [](StepRows& self, int32_t last_id, const std::vector<int32_t>& node_ids, const std::vector<int32_t>& parents,
             int32_t root, Vector<int32_t> page_table) {
            self.add_draft(last_id, node_ids, parents, root, page_table.data(), page_table.size());
          },
          nb::arg("last_id"), nb::arg("node_ids"), nb::arg("parents"), nb::arg("root"),
          nb::arg("page_table").noconvert())
      .def(
          "add_prompt",
          [](StepRows& self, const std::vector<int32_t>& token_ids, int32_t start, Vector<int32_t> page_table,
             int num_logits) {
            self.add_prompt(token_ids, start, page_table.data(), page_table.size(), num_logits);
          },
          nb::arg("token_ids"), nb::arg("start"), nb::arg("page_table").noconvert(), nb::arg("num_logits"));

  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, const std::string& isa, int num_threads, int vocab_size, int num_layers, int num_heads,
             int num_kv_heads, int head_dim, int num_pages, int max_rows, bool is_kv_f32, int max_positions) {
            const Geometry g{vocab_size, num_layers, num_heads, num_kv_heads, head_dim,
                             num_pages,  max_rows,   is_kv_f32, max_positions};
            new (self) Program(g, num_threads, kernels_for(isa));
          },
          nb::arg("isa"), nb::arg("num_threads"), nb::arg("vocab_size"), nb::arg("num_layers"), nb::arg("num_heads"),
          nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("num_pages"), nb::arg("max_rows"),
          nb::arg("is_kv_f32"), nb::arg("max_positions"))
      .def(
          "add_matrix",
          [](Program& p, const std::string& format, int outputs, int inputs, Vector<uint8_t> data,
             std::optional<Vector<int32_t>> rows) {
            const SourceFormat source = source_format(format);
            check_matrix_shape(outputs, inputs);
            const size_t need = source_row_bytes(source, inputs) * static_cast<size_t>(outputs);
            if (data.size() != need)
              throw std::invalid_argument("a matrix of " + std::to_string(need) + " bytes has " +
                                          std::to_string(data.size()));
            if (rows) {
              if (rows->size() != static_cast<size_t>(outputs))
                throw std::invalid_argument("one source row per output");
              for (size_t i = 0; i < rows->size(); i++)
                if (rows->data()[i] < 0 || rows->data()[i] >= outputs)
                  throw std::invalid_argument("no such source row");
            }
            nb::gil_scoped_release release;
            return p.add_matrix(source, outputs, inputs, data.data(), rows ? rows->data() : nullptr);
          },
          nb::arg("format"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("data"), nb::arg("rows").none())
      .def("add_vector",
           [](Program& p, Vector<float> data) { return p.add_vector(data.data(), static_cast<int>(data.size())); })
      .def("add_order",
           [](Program& p, Vector<int32_t> columns) {
             return p.add_order(columns.data(), static_cast<int>(columns.size()));
           })
      .def("add_buffer", &Program::add_buffer)
      .def("add_rope", &Program::add_rope, nb::arg("inv_freq"), nb::arg("magnitude"))
      .def("add", &add_instr, nb::arg("op"), nb::arg("in_"), nb::arg("residual"), nb::arg("out"), nb::arg("weights"),
           nb::arg("norm"), nb::arg("eps"), nb::arg("bias"), nb::arg("activation"), nb::arg("layer"), nb::arg("scale"),
           nb::arg("order"), nb::arg("rope"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("qk_eps"),
           nb::arg("window"), nb::arg("variant") = 0)
      .def("add_variant", &Program::add_variant)
      .def("forward", &forward, nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert(), nb::arg().noconvert(), nb::arg("variant") = 0)
      .def("forward_rows", &forward_rows, nb::arg("rows"), nb::arg("variant"))
      .def(
          "logits",
          [](Program& p) {
            const size_t num_rows = static_cast<size_t>(p.logits_capacity());
            const size_t vocab_size = static_cast<size_t>(p.geometry().vocab_size);
            const int64_t stride = p.logit_stride();
            return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(p.logits(), {num_rows, vocab_size}, nb::handle(),
                                                                   {stride, 1});
          },
          nb::rv_policy::reference_internal,
          "A view of as many rows as there is room for; each pass writes those in front, until there is more room.")
      .def_prop_ro("logits_capacity", &Program::logits_capacity)
      .def(
          "argmax",
          [](Program& p) {
            const size_t num_rows = static_cast<size_t>(p.geometry().max_rows);
            return nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>(p.argmax(), {num_rows}, nb::handle());
          },
          nb::rv_policy::reference_internal)
      .def("move_slots",
           [](Program& p, Vector<int32_t> page_table, Vector<int32_t> src, Vector<int32_t> dst) {
             if (src.size() != dst.size()) throw std::invalid_argument("src and dst differ in length");
             p.move_slots(page_table.data(), static_cast<int>(page_table.size()), src.data(), dst.data(),
                          static_cast<int>(src.size()));
           })
      .def("weight_bytes", &Program::weight_bytes, nb::arg("variant") = 0)
      .def_prop_ro("kv_bytes", &Program::kv_bytes)
      .def_prop_ro("scratch_bytes", &Program::scratch_bytes)
      .def_prop_ro("isa", [](Program& p) { return std::string(p.kernels().name); })
      .def_prop_ro("num_threads", [](Program& p) { return p.pool().num_threads(); })
      .def("set_profiling", &Program::set_profiling)
      .def_prop_ro("profile_s", &Program::profile_s);

  bind_control(m);
  bind_sampling(m);
  bind_suffix(m);
}
