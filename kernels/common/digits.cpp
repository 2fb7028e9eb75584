// x, once per product: normalized if asked, then written as signed base-256 digits (types.h).
//
//   a group of x  ->  a power of two s and whole numbers v = round(x / s), |v| < 2^(8*count - 1)
//   v             ->  count digits in -128..127, the most significant first
//
// With three digits v carries 23 bits and a sign: as much as float32 itself gives the largest
// element of the group. One-hot rows, and any x whose bits fit, are exact because s is a power of
// two. A single digit has no bits to spare, so there s is max/127.
//
// Against fp8 codes x stays as it is: kFloats in place of a count.
//
// A non-finite x must not vanish in the rounding: its group gets the scale NaN.
#include "kernels.h"
#include "prologue.h"

namespace qrun::QRUN_NS {

// The factor that brings the largest |x| of a group just under what `count` digits hold.
static float inverse_scale(int largest_bits, int count) {
  if (count > 1) return power_below(count == 3 ? 8355000.0f : 32600.0f, largest_bits);
  float largest;
  __builtin_memcpy(&largest, &largest_bits, 4);
  return largest > 0x1p-119f ? 127.0f / largest : 0x1p125f;
}

// v (16 numbers at k = i of the group) -> digits[d][i..]; digits of one row and chunk are adjacent.
template <int COUNT>
static void write_digits(int8_t* out, int chunk, i32x16 v, bool even_odd) {
#ifdef QRUN_STORE_DIGITS
  if constexpr (COUNT == 2 || COUNT == 3) return store_digits<COUNT>(out, chunk, v, even_odd);
#endif
  for (int d = COUNT - 1; d >= 0; d--) {
    if (even_odd)
      store_bytes_even_odd(out + d * chunk, v);
    else
      store_bytes(out + d * chunk, v);
    i32x16 low = sra<24>(shl<24>(v));
    v = sra<8>(v - low);
  }
}

template <int COUNT>
static void prepare_row(const Prologue& p, const Digits& d, int tile, int r) {
  const int rows = rows_in_tile(d, tile), groups = d.k / d.group;
  const size_t row = (size_t)tile * d.tile + r;
  const bool spare = row >= (size_t)d.m;
  const size_t from = p.from && !spare ? (size_t)p.from[row] : row;
  const f32x16 rms = splat(p.norm && !spare ? inverse_rms(p, from, d.k) : 1.0f);
  int8_t* digits = tile_digits(d, tile) + r * COUNT * d.chunk;
  float* meta = tile_meta(d, tile) + r;
  f32x16 x[8];  // a group of up to 128
  for (int g = 0; g < groups; g++) {
    i32x16 largest = splat_i(0);
    for (int i = 0; i < d.group / 16; i++) {
      const size_t k = (size_t)g * d.group + i * 16;
      x[i] = spare ? splat(0) : load(at(p.x, p.type, from * d.k + k), p.type);
      if (p.norm && !spare) x[i] = x[i] * rms * load(at(p.norm, p.norm_type, k), p.norm_type);
      largest = max(largest, bits_of(x[i]) & splat_i(0x7fffffff));
    }
    if constexpr (COUNT == kFloats) {
      for (int i = 0; i < d.group / 16; i++) {
        const int k = g * d.group + i * 16;
        int8_t* to = digits + (size_t)(k / d.chunk) * rows * COUNT * d.chunk;
        store((float*)to + k % d.chunk, x[i]);
      }
      continue;
    }
    const int bits = greatest(largest);
    const bool finite = bits < 0x7f800000;
    const float inverse = finite ? inverse_scale(bits, COUNT) : 0.0f;
    const float scale = finite ? 1.0f / inverse : __builtin_nanf("");
    i32x16 total = splat_i(0);
    for (int i = 0; i < d.group / 16; digits += (size_t)rows * COUNT * d.chunk)
      for (int k = 0; k < d.chunk; k += 16, i++) {
        i32x16 v = finite ? round_to_int(x[i] * splat(inverse)) : splat_i(0);
        total = total + v;
        write_digits<COUNT>(digits + k, d.chunk, v, d.even_odd);
      }
    meta[(2 * g) * rows] = scale;
    meta[(2 * g + 1) * rows] = (float)sum(total) * scale;
  }
}

void prepare(const Prologue& p, const Digits& d, int tile0, int tile1) {
  if (d.tile == kUnitRows)
    return d.count == kFloats ? prepare_panels(p, d, tile0, tile1)
                              : prepare_terms(p, d, tile0, tile1);
  for (int t = tile0; t < tile1; t++)
    for (int r = 0; r < rows_in_tile(d, t); r++) {
      if (d.count == 1)
        prepare_row<1>(p, d, t, r);
      else if (d.count == 2)
        prepare_row<2>(p, d, t, r);
      else if (d.count == 3)
        prepare_row<3>(p, d, t, r);
      else
        prepare_row<kFloats>(p, d, t, r);
    }
}

}  // namespace qrun::QRUN_NS
