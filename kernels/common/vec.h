// Sixteen float or int lanes: the one vocabulary in which every kernel is written.
// Each header defines the same functions for its registers; this one adds what they share.
#pragma once

// Arrays of lanes become registers only when their indices are constants.
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#define QRUN_UNROLL _Pragma("GCC unroll 16")
#else
#define QRUN_UNROLL  // the portable lanes are memory anyway
#endif

#if defined(__AVX512BW__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

namespace qrun::QRUN_NS {

// Rounded to nearest even; a NaN keeps its sign and becomes quiet.
static inline void store_bf16(void* p, f32x16 a) {
  uint16_t h[16];
  uint32_t b[16];
  store_i(b, bits_of(a));
  for (int i = 0; i < 16; i++) {
    uint32_t rounded = (b[i] + 0x7fff + (b[i] >> 16 & 1)) >> 16;
    h[i] = (b[i] & 0x7fffffff) > 0x7f800000 ? (b[i] >> 16 | 0x40) : rounded;
  }
  __builtin_memcpy(p, h, 32);
}

static inline f32x16 load(const void* p, Type t) {
  return t == Type::f32 ? load((const float*)p) : t == Type::f16 ? load_f16(p) : load_bf16(p);
}
static inline void store(void* p, Type t, f32x16 a) {
  if (t == Type::f32)
    store((float*)p, a);
  else if (t == Type::f16)
    store_f16(p, a);
  else
    store_bf16(p, a);
}
static inline const void* at(const void* p, Type t, size_t i) {
  return (const char*)p + i * size_of(t);
}
static inline void* at(void* p, Type t, size_t i) { return (char*)p + i * size_of(t); }

// The first n <= 16 elements at p; the other lanes are zero and nothing is read there.
static inline f32x16 load_first(const void* p, Type t, int n) {
  if (n >= 16) return load(p, t);
  alignas(64) char copy[64] = {};
  __builtin_memcpy(copy, p, n * size_of(t));
  return load(copy, t);
}
static inline void store_first(void* p, Type t, f32x16 a, int n) {
  if (n >= 16) return store(p, t, a);
  alignas(64) char copy[64];
  store(copy, t, a);
  __builtin_memcpy(p, copy, n * size_of(t));
}

#ifndef __AVX512BW__
// Lanes 0 2 4 .. of a and b, and lanes 1 3 5 ..
static inline void unzip(f32x16 a, f32x16 b, f32x16& even, f32x16& odd) {
  alignas(64) float pairs[32], e[16], o[16];
  store(pairs, a);
  store(pairs + 16, b);
  for (int i = 0; i < 16; i++) {
    e[i] = pairs[2 * i];
    o[i] = pairs[2 * i + 1];
  }
  even = load(e);
  odd = load(o);
}
#endif

// e^x to about 1 ulp; 0 below -87 (so for -inf), inf above 88.8; NaN stays NaN.
// x = n*ln2 + r with |r| <= ln2/2; a polynomial of degree 6 for e^r; n added to the exponent.
static inline f32x16 exp(f32x16 x) {
  x = min(splat(88.8f), max(splat(-104.0f), x));
  i32x16 n = round_to_int(x * splat(1.44269504f));
  f32x16 nf = to_float(n);
  f32x16 r = fma(nf, splat(-0.693359375f), x);
  r = fma(nf, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  // n spans -150..128: twice p, so that 2^(n-1) is a normal number, or else zero. A result too
  // small for a normal number would take most processors ten times as long.
  return (p + p) * float_of(shl<23>(max(n + splat_i(126), splat_i(0))));
}

static inline f32x16 tanh(f32x16 x) { return splat(1) - splat(2) / (exp(x * splat(2)) + splat(1)); }

}  // namespace qrun::QRUN_NS
