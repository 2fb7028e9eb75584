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

// Memory is written in order, all rows of 32 k before the next 32: a row at a time, each of its
// lines a kilobyte behind the last, waits for every one of them.
template <int COUNT>
static void prepare_tile(const Prologue& p, const Digits& d, int tile) {
  const void* x[kUnitRows];  // null: a spare row
  float rms[kUnitRows], factor[kUnitRows];
  const auto number = [&](int r, int k) {  // 16 of them
    if (!x[r]) return splat(0);
    const f32x16 v = load(at(x[r], p.type, k), p.type);
    return p.norm ? v * splat(rms[r]) * load(at(p.norm, p.norm_type, k), p.norm_type) : v;
  };
  for (int r = 0; r < kUnitRows; r++) {
    const size_t row = (size_t)tile * d.tile + r;
    const bool spare = row >= (size_t)d.m;
    const size_t from = p.from && !spare ? (size_t)p.from[row] : row;
    x[r] = spare ? nullptr : at(p.x, p.type, from * d.k);
    rms[r] = p.norm && !spare ? inverse_rms(p, from, d.k) : 1.0f;
    i32x16 largest = splat_i(0);
    for (int k = 0; k < d.k; k += 16)
      largest = max(largest, bits_of(number(r, k)) & splat_i(0x7fffffff));
    const int bits = greatest(largest);
    factor[r] = bits < 0x7f800000 ? power_below(1.0f, bits) : 1.0f;
  }

  char* out = (char*)tile_digits(d, tile);
  float* meta = tile_meta(d, tile);
  for (int begin = 0; begin < d.k; begin += d.group, meta += 2 * kUnitRows) {
    f32x16 total[kUnitRows];
    for (int r = 0; r < kUnitRows; r++) total[r] = splat(0);
    for (int k = begin; k < begin + d.group; k += kUnitDepth, out += COUNT * kTileBytes)
      for (int r = 0; r < kUnitRows; r++) {
        f32x16 low[COUNT], high[COUNT];
        f32x16 a = number(r, k) * splat(factor[r]), b = number(r, k + 16) * splat(factor[r]);
        if (d.even_odd) {
          a = paired_by_fours(a);
          b = paired_by_fours(b);
        }
        total[r] = total[r] + split<COUNT>(a, low) + split<COUNT>(b, high);
        char* to = out + r * kUnitDepth * 2;
        QRUN_UNROLL
        for (int t = 0; t < COUNT - 1; t++) store_cut(to + t * kTileBytes, low[t], high[t]);
        store_rounded(to + (COUNT - 1) * kTileBytes, low[COUNT - 1], high[COUNT - 1]);
      }
    for (int r = 0; r < kUnitRows; r++) {
      meta[r] = 1 / factor[r];
      meta[kUnitRows + r] = sum(total[r]);
    }
  }
}

void prepare_terms(const Prologue& p, const Digits& d, int tile0, int tile1) {
  const auto one = d.count == 1   ? prepare_tile<1>
                   : d.count == 2 ? prepare_tile<2>
                                  : prepare_tile<3>;
  for (int t = tile0; t < tile1; t++) one(p, d, t);
}

#endif

}  // namespace qrun::QRUN_NS
