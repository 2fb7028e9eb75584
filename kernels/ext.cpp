// qrun._ext: the CPU kernels as MLX primitives, and what a benchmark or a test must ask them.
// The typed signatures are in qrun/_ext.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "common/op.h"
#include "common/pool.h"
#include "common/program.h"

#define QRUN_STRING2(x) #x
#define QRUN_STRING(x) QRUN_STRING2(x)

namespace nb = nanobind;
using namespace nb::literals;
using qrun::mx::array;
using Maybe = std::optional<array>;
using qrun::mx::Dtype;

namespace {

template <const char* const& name>
array bound_product(const array& x, const array& packed, int n, int k, int bits, int group_size,
                    Dtype scale_dtype, const Maybe& norm_weight, float eps, const Maybe& bias,
                    const Maybe& residual, const std::string& activation, float scale,
                    const std::string& activations, const std::string& mode) {
  return qrun::product(name, x, packed, n, k, bits, group_size,
                       {qrun::type_of(scale_dtype, name, "scale_dtype"), mode, activation,
                        activations, norm_weight, bias, residual, eps, scale});
}

const char* const kQmv = "qmv";
const char* const kQmm = "qmm";

template <class F>
void define_product(nb::module_& m, const char* name, F f) {
  m.def(name, f, "x"_a, "packed"_a, "n"_a, "k"_a, "bits"_a, "group_size"_a, nb::kw_only(),
        "scale_dtype"_a, "norm_weight"_a = nb::none(), "eps"_a = 0.0f, "bias"_a = nb::none(),
        "residual"_a = nb::none(), "activation"_a = "none", "scale"_a = 1.0f,
        "activations"_a = "default", "mode"_a = "affine");
}

}  // namespace

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers the array type
  m.attr("mlx_version") = QRUN_STRING(MLX_VERSION_MAJOR) "." QRUN_STRING(
      MLX_VERSION_MINOR) "." QRUN_STRING(MLX_VERSION_PATCH);

  m.def("pack", &qrun::pack, "w"_a, "scales"_a, "biases"_a.none(), "bits"_a, "group_size"_a,
        "mode"_a = "affine", "count"_a = 1);
  define_product(m, kQmv, &bound_product<kQmv>);
  define_product(m, kQmm, &bound_product<kQmm>);
  m.def(
      "gather_qmm",
      [](const array& x, const array& packed, const array& expert, const Maybe& row, int count,
         int n, int k, int bits, int group_size, Dtype scale_dtype, const std::string& activation,
         const std::string& activations, const std::string& mode) {
        return qrun::gather_qmm(x, packed, row, expert, count, n, k, bits, group_size,
                                qrun::type_of(scale_dtype, "gather_qmm", "scale_dtype"), mode,
                                activation, activations);
      },
      "x"_a, "packed"_a, "expert"_a, "row"_a.none(), "count"_a, "n"_a, "k"_a, "bits"_a,
      "group_size"_a, nb::kw_only(), "scale_dtype"_a, "activation"_a = "none",
      "activations"_a = "default", "mode"_a = "affine");
  m.def(
      "route",
      [](const array& logits, int top, bool renormalize) {
        auto out = qrun::route(logits, top, renormalize);
        return std::make_tuple(out[0], out[1], out[2], out[3]);
      },
      "logits"_a, "top"_a, "renormalize"_a);
  m.def("combine", &qrun::combine, "x"_a, "place"_a, "share"_a, "residual"_a);
  m.def("gemm", &qrun::gemm, "x"_a, "w"_a, nb::kw_only(), "bias"_a = nb::none(),
        "residual"_a = nb::none(), "scale"_a = 1.0f);
  m.def("rms_norm", &qrun::rms_norm, "x"_a, "weight"_a, "eps"_a, "residual"_a = nb::none(),
        "centered"_a = false);
  m.def("rms_norm_parts", &qrun::rms_norm_parts, "x"_a, "weights"_a, "eps"_a);
  m.def("swiglu", &qrun::swiglu, "gate_up"_a);
  m.def("softcap", &qrun::softcap, "x"_a, "limit"_a);
  m.def("argmax", &qrun::argmax, "logits"_a, "limit"_a);
  m.def(
      "embedding",
      [](const array& ids, const array& packed, int n, int k, int bits, int group_size,
         Dtype scale_dtype, Dtype dtype, float scale, const std::string& mode) {
        return qrun::embedding(ids, packed, n, k, bits, group_size,
                               qrun::type_of(scale_dtype, "embedding", "scale_dtype"), mode,
                               qrun::type_of(dtype, "embedding", "dtype"), scale);
      },
      "ids"_a, "packed"_a, "n"_a, "k"_a, "bits"_a, "group_size"_a, "scale_dtype"_a, "dtype"_a,
      "scale"_a = 1.0f, "mode"_a = "affine");
  m.def(
      "rope",
      [](const array& qkv, const array& k_cache, const array& v_cache, const array& offset,
         const array& table, int heads, int kv_heads, int head_dim, const Maybe& q_norm,
         const Maybe& k_norm, float eps) {
        auto out = qrun::rope(qkv, k_cache, v_cache, offset, table, heads, kv_heads, head_dim,
                              q_norm, k_norm, eps);
        return std::make_tuple(out[0], out[1], out[2]);
      },
      "qkv"_a, "k_cache"_a, "v_cache"_a, "offset"_a, "table"_a, nb::kw_only(), "heads"_a,
      "kv_heads"_a, "head_dim"_a, "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "eps"_a = 0.0f);
  m.def("sdpa", &qrun::sdpa, "q"_a, "k_cache"_a, "v_cache"_a, "offset"_a, nb::kw_only(), "scale"_a,
        "window"_a = 0, "softcap"_a = 0.0f);

  nb::class_<qrun::Program>(m, "Program")
      .def(nb::init<const std::vector<array>&, const std::vector<array>&>(), "inputs"_a,
           "outputs"_a)
      .def("__call__", &qrun::Program::operator(), "inputs"_a, "after"_a);

  m.def("isa", [] { return qrun::kernels().name; });
  m.def("fast_dots", [] { return qrun::kernels().fast_dots; });
  m.def("force_isa", [](const std::string& name) { qrun::force_isa(name.c_str()); }, "name"_a);
  m.def("threads", &qrun::threads);
  m.def("set_threads", &qrun::set_threads, "n"_a);
  m.def("read_bandwidth", &qrun::read_bandwidth, "bytes"_a, "threads"_a = 0);
  m.def("peak_flops", &qrun::peak_flops, "kind"_a, "threads"_a = 0);
  m.def("trim", &qrun::trim);
  m.def(
      "blank",
      [](const std::vector<std::vector<int>>& shapes, Dtype dtype) {
        std::vector<qrun::mx::Shape> given;
        for (const auto& shape : shapes) given.emplace_back(shape.begin(), shape.end());
        return qrun::blank(given, dtype);
      },
      "shapes"_a, "dtype"_a);
  m.def("guarded", &qrun::guarded, "a"_a);
}
