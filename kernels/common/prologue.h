// What happens to a row of x before its digits are taken.
#pragma once
#include "vec.h"

namespace qrun::QRUN_NS {

// 1 / rms of row `row` of x (k,)
static inline float inverse_rms(const Prologue& p, size_t row, int k) {
  f32x16 squares = splat(0);
  int i = 0;
  for (; i + 16 <= k; i += 16) {
    prefetch_near(at(p.norm, p.norm_type, i));  // needed next, and nobody has had it for a layer
    f32x16 x = load(at(p.x, p.type, row * k + i), p.type);
    squares = fma(x, x, squares);
  }
  if (i < k) {
    f32x16 x = load_first(at(p.x, p.type, row * k + i), p.type, k - i);
    squares = fma(x, x, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / k + p.eps);
}

// The largest power of two that brings `largest` (the bits of a finite float, >= 0) under `limit`.
static inline float power_below(float limit, int largest_bits) {
  float largest;
  __builtin_memcpy(&largest, &largest_bits, 4);
  float ratio = limit / largest;
  if (!(ratio < 0x1p126f)) return 0x1p126f;  // zeros and numbers far below any use
  uint32_t bits;
  __builtin_memcpy(&bits, &ratio, 4);
  bits &= 0x7f800000;
  __builtin_memcpy(&ratio, &bits, 4);
  return ratio;
}

}  // namespace qrun::QRUN_NS
