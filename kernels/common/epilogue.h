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

// One that is missing here does not compile (-Werror=switch).
static inline f32x16 curve(Activation activation, f32x16 gate) {
  switch (activation) {
    case Activation::swiglu:
      return silu(gate);
    case Activation::geglu:
      return gelu(gate);
    case Activation::none:
      break;
  }
  return gate;
}

// Rows of w alternate: gate, up, gate, up. Two vectors of them -> activated (16).
static inline f32x16 gated(const Epilogue& e, f32x16 a, f32x16 b) {
  f32x16 gate, up;
  unzip(a, b, gate, up);
  return curve(e.activation, gate) * up;
}

// acc: sums of rows 16*block .. of w for row m of x; m counts rows of y.
static inline void finish(const Epilogue& e, int n, int block, size_t m, f32x16 acc) {
  const int first = block * kLanes, lanes = n - first < kLanes ? n - first : kLanes;
  acc = acc * splat(e.scale);
  if (e.bias) acc = acc + load_first(at(e.bias, e.bias_type, first), e.bias_type, lanes);
  size_t out = m * n + first;
  int count = lanes;
  if (e.activation != Activation::none) {
    acc = gated(e, acc, splat(0));
    out = m * (n / 2) + first / 2;
    count = lanes / 2;
  }
  if (e.residual)
    acc = acc + load_first(at(e.residual, e.residual_type, out), e.residual_type, count);
  store_first(at(e.y, e.type, out), e.type, acc, count);
}

// The same for this block and the one behind it, whose first row exists: gates fill a vector.
static inline void finish_two(const Epilogue& e, int n, int block, size_t m, f32x16 a, f32x16 b) {
  if (e.activation == Activation::none) {
    finish(e, n, block, m, a);
    finish(e, n, block + 1, m, b);
    return;
  }
  const int first = block * kLanes, lanes = n - first < 2 * kLanes ? n - first : 2 * kLanes;
  a = a * splat(e.scale);
  b = b * splat(e.scale);
  if (e.bias) {
    a = a + load(at(e.bias, e.bias_type, first), e.bias_type);
    b = b + load_first(at(e.bias, e.bias_type, first + kLanes), e.bias_type, lanes - kLanes);
  }
  f32x16 y = gated(e, a, b);
  const size_t out = m * (n / 2) + first / 2;
  if (e.residual)
    y = y + load_first(at(e.residual, e.residual_type, out), e.residual_type, lanes / 2);
  store_first(at(e.y, e.type, out), e.type, y, lanes / 2);
}

}  // namespace qrun::QRUN_NS
