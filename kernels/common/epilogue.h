// The float32 sums of 16 rows of w for one row of x, on their way to memory:
// y*scale + bias, then the gate, then + residual, then one rounding. Nothing is read back.
#pragma once
#include "vec.h"

namespace qrun::QRUN_NS {

// gate * sigmoid(gate), and the tanh form of gelu, which is gate * sigmoid(2u).
static inline f32x16 silu(f32x16 gate) { return gate / (splat(1) + exp(splat(0) - gate)); }
static inline f32x16 gelu(f32x16 gate) {
  f32x16 u = gate * fma(gate * gate, splat(0.0356774081f), splat(0.7978845608f));
  return gate / (splat(1) + exp(u * splat(-2)));
}

// acc: sums of rows 16*block .. of w for row m of x; m counts rows of y.
static inline void finish(const Epilogue& e, int n, int block, size_t m, f32x16 acc) {
  const int first = block * kLanes, lanes = n - first < kLanes ? n - first : kLanes;
  acc = acc * splat(e.scale);
  if (e.bias) acc = acc + load_first(at(e.bias, e.bias_type, first), e.bias_type, lanes);
  size_t out = m * n + first;
  int count = lanes;
  if (e.activation != Activation::none) {
    // rows of w alternate: gate, up, gate, up
    alignas(64) float pairs[16], gate[16] = {}, up[16] = {};
    store(pairs, acc);
    for (int i = 0; i < 8; i++) {
      gate[i] = pairs[2 * i];
      up[i] = pairs[2 * i + 1];
    }
    f32x16 g = load(gate);
    acc = (e.activation == Activation::swiglu ? silu(g) : gelu(g)) * load(up);
    out = m * (n / 2) + first / 2;
    count = lanes / 2;
  }
  if (e.residual)
    acc = acc + load_first(at(e.residual, e.residual_type, out), e.residual_type, count);
  store_first(at(e.y, e.type, out), e.type, acc, count);
}

}  // namespace qrun::QRUN_NS
