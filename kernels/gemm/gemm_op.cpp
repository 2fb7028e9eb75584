// The dense product as an MLX primitive: checks, then the kernel over rows of w.
#include <algorithm>

#include "../common/op.h"
#include "../common/pool.h"

namespace qrun {
namespace {

class GemmOp : public CpuPrimitive {
 public:
  GemmOp(mx::Stream s, Gemm a, bool bias, bool residual)
      : CpuPrimitive(s), a_(a), bias_(bias), residual_(residual) {}
  const char* name() const override { return "qrun_gemm"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Gemm a = a_;
    a.x = dense(in[0], stream());
    a.w = dense(in[1], stream());
    if (bias_) a.bias = dense(in[2], stream());
    if (residual_) a.residual = dense(in.back(), stream());
    a.y = allocate<char>(out[0]);
    enqueue(stream(), [a] {
      const size_t row = a.k * size_of(a.w_type);
      const int step = std::max<int>(1, static_cast<int>(kShareBytes / row));
      parallel(a.n, step, [&](int n0, int n1) { kernels().gemm(a, n0, n1); });
    });
  }

 private:
  Gemm a_;
  bool bias_, residual_;
};

}  // namespace

mx::array gemm(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
               const std::optional<mx::array>& residual, float scale) {
  require(x.ndim() == 2 && w.ndim() == 2, "gemm: x and w must have two axes");
  const int m = x.shape(0), n = w.shape(0), k = x.shape(1);
  require_shape("gemm", "w", w, {n, k});
  std::vector<mx::array> inputs{x, w};
  Gemm a{};
  a.m = m, a.n = n, a.k = k, a.scale = scale;
  a.type = type_of(x.dtype(), "gemm", "x");
  a.w_type = type_of(w.dtype(), "gemm", "w");
  if (bias) {
    require_shape("gemm", "bias", *bias, {n});
    a.bias_type = type_of(bias->dtype(), "gemm", "bias");
    inputs.push_back(*bias);
  }
  if (residual) {
    require_shape("gemm", "residual", *residual, {m, n});
    require(residual->dtype() == x.dtype(), "gemm: residual and x must have one dtype");
    inputs.push_back(*residual);
  }
  return mx::array(
      {m, n}, x.dtype(),
      std::make_shared<GemmOp>(cpu_stream(), a, bias.has_value(), residual.has_value()),
      std::move(inputs));
}

}  // namespace qrun
