// x for a matrix unit, once per product: normalized if asked, then each number as a sum of up to
// three bfloat16, the operands of the unit.
//
//   a row of x  ->  a power of two that brings its largest number to 1 (nothing of any use is then
//                   so small that the unit takes it for zero)
//   a number    ->  its first 8 bits | the next 8 | the last 8: three terms are a float32, exactly
//
// With fewer terms the last one is rounded to nearest: two keep 16 bits of every number, one keeps
// 8. A non-finite x is a non-finite term.
#include "../common/amx.h"
#include "../common/kernels.h"
#include "../common/prologue.h"

namespace qrun::QRUN_NS {

#ifndef __AMX_BF16__

void prepare_terms(const Prologue&, const Digits&, int, int) {}

#else

// x (16 numbers) -> its terms for a store; returns what they add up to.
template <int COUNT>
static inline f32x16 split(f32x16 x, f32x16 (&term)[COUNT]) {
  f32x16 kept = splat(0);
  QRUN_UNROLL
  for (int t = 0; t < COUNT - 1; t++) {
    term[t] = cut_to_bf16(x);
    x = x - term[t];
    kept = kept + term[t];
  }
  term[COUNT - 1] = x;
  return kept + (COUNT == 3 ? x : rounded_to_bf16(x));
}

template <int COUNT>
static void prepare_row(const Prologue& p, const Digits& d, int tile, int r) {
  const size_t row = (size_t)tile * d.tile + r;
  const bool spare = row >= (size_t)d.m;
  const size_t from = p.from && !spare ? (size_t)p.from[row] : row;
  const f32x16 rms = splat(p.norm && !spare ? inverse_rms(p, from, d.k) : 1.0f);
  const auto number = [&](int k) {  // 16 of them
    if (spare) return splat(0);
    const f32x16 x = load(at(p.x, p.type, from * d.k + k), p.type);
    return p.norm ? x * rms * load(at(p.norm, p.norm_type, k), p.norm_type) : x;
  };
  i32x16 largest = splat_i(0);
  for (int k = 0; k < d.k; k += 16)
    largest = max(largest, bits_of(number(k)) & splat_i(0x7fffffff));
  const int bits = greatest(largest);
  const float factor = bits < 0x7f800000 ? power_below(1.0f, bits) : 1.0f;

  char* out = (char*)tile_digits(d, tile) + r * kUnitDepth * 2;
  float* meta = tile_meta(d, tile) + r;
  for (int k = 0; k < d.k; meta += 2 * kUnitRows) {
    f32x16 total = splat(0);
    for (int end = k + d.group; k < end; k += kUnitDepth, out += COUNT * kTileBytes) {
      f32x16 low[COUNT], high[COUNT];
      f32x16 a = number(k) * splat(factor), b = number(k + 16) * splat(factor);
      if (d.even_odd) {
        a = paired_by_fours(a);
        b = paired_by_fours(b);
      }
      total = total + split<COUNT>(a, low) + split<COUNT>(b, high);
      QRUN_UNROLL
      for (int t = 0; t < COUNT - 1; t++) store_cut(out + t * kTileBytes, low[t], high[t]);
      store_rounded(out + (COUNT - 1) * kTileBytes, low[COUNT - 1], high[COUNT - 1]);
    }
    meta[0] = 1 / factor;
    meta[kUnitRows] = sum(total);
  }
}

void prepare_terms(const Prologue& p, const Digits& d, int tile0, int tile1) {
  for (int t = tile0; t < tile1; t++)
    for (int r = 0; r < kUnitRows; r++) {
      if (d.count == 1)
        prepare_row<1>(p, d, t, r);
      else if (d.count == 2)
        prepare_row<2>(p, d, t, r);
      else
        prepare_row<3>(p, d, t, r);
    }
}

#endif

}  // namespace qrun::QRUN_NS
