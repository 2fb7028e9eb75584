// A router's logits -> the experts of each token and their shares, then the rows in the order of
// experts (a counting sort), so that an expert's rows follow each other. A few thousand numbers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "../common/op.h"
#include "../common/pool.h"

namespace qrun {
namespace {

// How large a logit counts: a NaN above all, so that it reaches a share and is seen in the result.
inline float rank(float logit) {
  return std::isnan(logit) ? std::numeric_limits<float>::infinity() : logit;
}

float number(const void* p, Type type, size_t i) {
  if (type == Type::f32) return static_cast<const float*>(p)[i];
  if (type == Type::f16) return static_cast<const mx::float16_t*>(p)[i];
  return static_cast<const mx::bfloat16_t*>(p)[i];
}

// One token: logits (experts,) -> chosen (top,), the largest first, of equals the first.
void choose(const float* logits, int experts, int top, bool renormalize, int* chosen,
            float* share) {
  std::vector<int> order(experts);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + top, order.end(), [&](int a, int b) {
    const float x = rank(logits[a]), y = rank(logits[b]);
    return x > y || (x == y && a < b);
  });
  std::copy_n(order.begin(), top, chosen);
  const float most = logits[chosen[0]];
  float total = 0;
  if (renormalize)
    for (int j = 0; j < top; j++) total += std::exp(logits[chosen[j]] - most);
  else
    for (int e = 0; e < experts; e++) total += std::exp(logits[e] - most);
  for (int j = 0; j < top; j++) share[j] = std::exp(logits[chosen[j]] - most) / total;
}

class Route : public CpuPrimitive {
 public:
  Route(mx::Stream s, int top, bool renormalize)
      : CpuPrimitive(s), top_(top), renormalize_(renormalize) {}
  const char* name() const override { return "qrun_route"; }

  // in: logits; out: expert, row, place, share
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const int rows = in[0].shape(0), experts = in[0].shape(1);
    int* chosen = static_cast<int*>(scratch(sizeof(int) * rows * top_, stream()));
    const Type type = type_of(in[0].dtype(), "route", "logits");
    enqueue(stream(), [x = dense(in[0], stream()), type, chosen, expert = allocate<int>(out[0]),
                       row = allocate<int>(out[1]), place = allocate<int>(out[2]),
                       share = allocate<float>(out[3]), rows, experts, top = top_,
                       renormalize = renormalize_] {
      parallel(rows, 16, [&](int r0, int r1) {
        std::vector<float> logits(experts);
        for (int r = r0; r < r1; r++) {
          for (int e = 0; e < experts; e++)
            logits[e] = number(x, type, static_cast<size_t>(r) * experts + e);
          choose(logits.data(), experts, top, renormalize, chosen + r * top, share + r * top);
        }
      });
      std::vector<int> next(experts + 1);
      for (int i = 0; i < rows * top; i++) next[chosen[i] + 1]++;
      std::partial_sum(next.begin(), next.end(), next.begin());
      for (int i = 0; i < rows * top; i++) {
        const int at = next[chosen[i]]++;
        expert[at] = chosen[i];
        row[at] = i / top;
        place[i] = at;
      }
    });
  }

 private:
  int top_;
  bool renormalize_;
};

class CombineOp : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  const char* name() const override { return "qrun_combine"; }

  // in: x, place, share, residual
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    const Combine a{dense(in[0], stream()),
                    reinterpret_cast<const int*>(dense(in[1], stream())),
                    reinterpret_cast<const float*>(dense(in[2], stream())),
                    dense(in[3], stream()),
                    allocate<char>(out[0]),
                    in[0].shape(1),
                    in[1].shape(1),
                    type_of(in[0].dtype(), "combine", "x")};
    enqueue(stream(), [a, rows = in[1].shape(0), have = in[0].shape(0)] {
      for (int i = 0; i < rows * a.top; i++)
        if (a.place[i] < 0 || a.place[i] >= have)
          throw std::out_of_range("combine: place " + std::to_string(a.place[i]) + " of " +
                                  std::to_string(have) + " rows");
      const int step = std::max(1, 16384 / std::max(1, a.n * a.top));
      parallel(rows, step, [&](int r0, int r1) { kernels().combine(a, r0, r1); });
    });
  }
};

}  // namespace

std::vector<mx::array> route(const mx::array& logits, int top, bool renormalize) {
  require(logits.ndim() == 2, "route: logits must be (M, E)");
  type_of(logits.dtype(), "route", "logits");
  require(top >= 1 && top <= logits.shape(1),
          "route: top is " + std::to_string(top) + " of " + std::to_string(logits.shape(1)));
  const int rows = logits.shape(0);
  return mx::array::make_arrays({{rows * top}, {rows * top}, {rows, top}, {rows, top}},
                                {mx::int32, mx::int32, mx::int32, mx::float32},
                                std::make_shared<Route>(cpu_stream(), top, renormalize), {logits});
}

mx::array combine(const mx::array& x, const mx::array& place, const mx::array& share,
                  const mx::array& residual) {
  require(x.ndim() == 2, "combine: x must be (R, N)");
  require(place.ndim() == 2 && place.dtype() == mx::int32, "combine: place must be int32 (M, top)");
  require_shape("combine", "share", share, place.shape());
  require(share.dtype() == mx::float32, "combine: share must be float32");
  require_shape("combine", "residual", residual, {place.shape(0), x.shape(1)});
  require(residual.dtype() == x.dtype(), "combine: x and residual must have one dtype");
  type_of(x.dtype(), "combine", "x");
  return mx::array(residual.shape(), x.dtype(), std::make_shared<CombineOp>(cpu_stream()),
                   {x, place, share, residual});
}

}  // namespace qrun
