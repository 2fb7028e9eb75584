// Sixteen lanes in plain arrays: correct everywhere, as fast as the compiler's own vectorizer.
#pragma once
#include "types.h"

namespace qrun::QRUN_NS {

struct f32x16 {
  float v[16];
};
struct i32x16 {
  int32_t v[16];
};

constexpr int kMaxTile[kMaxDigits + 1] = {0, 4, 2, 2};
constexpr int kGridRows = 4, kGridBlocks = 1, kPanelsFrom = 9;  // of products of floats
constexpr bool kFastDots = false;

#define QRUN_EACH(expr)                \
  {                                    \
    for (int i = 0; i < 16; i++) expr; \
  }

static inline f32x16 splat(float x) {
  f32x16 r;
  QRUN_EACH(r.v[i] = x)
  return r;
}
static inline f32x16 load(const float* p) {
  f32x16 r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
static inline void store(float* p, f32x16 a) { __builtin_memcpy(p, a.v, 64); }
#define QRUN_F(name, expr)                        \
  static inline f32x16 name(f32x16 a, f32x16 b) { \
    f32x16 r;                                     \
    QRUN_EACH(r.v[i] = expr)                      \
    return r;                                     \
  }
QRUN_F(operator+, a.v[i] + b.v[i])
QRUN_F(operator-, a.v[i] - b.v[i])
QRUN_F(operator*, a.v[i] * b.v[i])
QRUN_F(operator/, a.v[i] / b.v[i])
QRUN_F(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
QRUN_F(min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef QRUN_F
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
static inline float sum(f32x16 a) {
  for (int h = 8; h; h /= 2)
    for (int i = 0; i < h; i++) a.v[i] += a.v[i + h];
  return a.v[0];
}
static inline float greatest(f32x16 a) {
  for (int i = 1; i < 16; i++) a.v[0] = a.v[0] > a.v[i] ? a.v[0] : a.v[i];
  return a.v[0];
}

static inline i32x16 splat_i(int x) {
  i32x16 r;
  QRUN_EACH(r.v[i] = x)
  return r;
}
static inline i32x16 load_i(const void* p) {
  i32x16 r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
static inline void store_i(void* p, i32x16 a) { __builtin_memcpy(p, a.v, 64); }
#define QRUN_I(name, expr)                        \
  static inline i32x16 name(i32x16 a, i32x16 b) { \
    i32x16 r;                                     \
    QRUN_EACH(r.v[i] = expr)                      \
    return r;                                     \
  }
QRUN_I(operator+, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]))
QRUN_I(operator-, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]))
QRUN_I(operator&, a.v[i] & b.v[i])
QRUN_I(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
#undef QRUN_I
template <int S>
static inline i32x16 shl(i32x16 a) {
  QRUN_EACH(a.v[i] = (int32_t)((uint32_t)a.v[i] << S))
  return a;
}
template <int S>
static inline i32x16 shr(i32x16 a) {
  QRUN_EACH(a.v[i] = (int32_t)((uint32_t)a.v[i] >> S))
  return a;
}
template <int S>
static inline i32x16 sra(i32x16 a) {
  QRUN_EACH(a.v[i] = a.v[i] >> S)
  return a;
}
static inline int sum(i32x16 a) {
  int s = 0;
  QRUN_EACH(s += a.v[i])
  return s;
}
static inline int greatest(i32x16 a) {
  int s = a.v[0];
  QRUN_EACH(s = a.v[i] > s ? a.v[i] : s)
  return s;
}

static inline f32x16 to_float(i32x16 a) {
  f32x16 r;
  QRUN_EACH(r.v[i] = (float)a.v[i])
  return r;
}
// To nearest, ties to even (the default rounding mode); callers stay below 2^31.
static inline i32x16 round_to_int(f32x16 a) {
  i32x16 r;
  QRUN_EACH(r.v[i] = (int32_t)__builtin_rintf(a.v[i]))
  return r;
}
static inline i32x16 bits_of(f32x16 a) {
  i32x16 r;
  __builtin_memcpy(&r, &a, 64);
  return r;
}
static inline f32x16 float_of(i32x16 a) {
  f32x16 r;
  __builtin_memcpy(&r, &a, 64);
  return r;
}

static inline float float_from_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  float magnitude;
  if (rest >= 0x7c00) {
    uint32_t b = 0x7f800000 | (rest & 0x3ff) << 13;
    __builtin_memcpy(&magnitude, &b, 4);
  } else {
    uint32_t b = rest << 13;  // exponent and fraction in place, 2^112 too small, subnormals too
    __builtin_memcpy(&magnitude, &b, 4);
    magnitude *= 0x1p112f;
  }
  uint32_t b;
  __builtin_memcpy(&b, &magnitude, 4);
  b |= sign;
  __builtin_memcpy(&magnitude, &b, 4);
  return magnitude;
}
static inline uint16_t half_from_float(float f) {
  uint32_t b;
  __builtin_memcpy(&b, &f, 4);
  uint32_t sign = b >> 16 & 0x8000;
  b &= 0x7fffffff;
  if (b > 0x7f800000) return sign | 0x7e00;
  if (b >= 0x477ff000) return sign | 0x7c00;  // rounds beyond 65504
  if (b < 0x38800000) {                       // subnormal: a fixed step of 2^-24
    float magnitude;
    __builtin_memcpy(&magnitude, &b, 4);
    return sign | (uint16_t)__builtin_rintf(magnitude * 0x1p24f);
  }
  b += 0xfff + (b >> 13 & 1);
  return sign | (uint16_t)((b - 0x38000000) >> 13);
}
static inline f32x16 load_f16(const void* p) {
  uint16_t h[16];
  f32x16 r;
  __builtin_memcpy(h, p, 32);
  QRUN_EACH(r.v[i] = float_from_half(h[i]))
  return r;
}
static inline void store_f16(void* p, f32x16 a) {
  uint16_t h[16];
  QRUN_EACH(h[i] = half_from_float(a.v[i]))
  __builtin_memcpy(p, h, 32);
}
static inline f32x16 load_bf16(const void* p) {
  uint16_t h[16];
  i32x16 r;
  __builtin_memcpy(h, p, 32);
  QRUN_EACH(r.v[i] = (int32_t)((uint32_t)h[i] << 16))
  return float_of(r);
}
static inline void store_u16(void* p, i32x16 a) {
  uint16_t h[16];
  QRUN_EACH(h[i] = (uint16_t)a.v[i])
  __builtin_memcpy(p, h, 32);
}
static inline void store_bytes(int8_t* p, i32x16 a) { QRUN_EACH(p[i] = (int8_t)a.v[i]) }
static inline void store_bytes_even_odd(int8_t* p, i32x16 a) {
  QRUN_EACH(p[(i & 8) | (i & 1) << 2 | (i & 6) >> 1] = (int8_t)a.v[i])
}

static inline i32x16 lookup(const uint8_t* table, i32x16 index) {
  uint8_t b[64];
  __builtin_memcpy(b, &index, 64);
  for (int i = 0; i < 64; i++) b[i] = table[b[i]];
  __builtin_memcpy(&index, b, 64);
  return index;
}
static inline i32x16 dot_byte(i32x16 acc, i32x16 codes, const int8_t* p) {
  const int x0 = p[0], x1 = p[1], x2 = p[2], x3 = p[3];
  QRUN_EACH({
    uint32_t c = (uint32_t)codes.v[i];
    acc.v[i] += (int)(c & 255) * x0 + (int)(c >> 8 & 255) * x1 + (int)(c >> 16 & 255) * x2 +
                (int)(c >> 24) * x3;
  })
  return acc;
}
static inline i32x16 dot_small(i32x16 acc, i32x16 codes, const int8_t* p) {
  return dot_byte(acc, codes, p);
}
static inline void transpose(f32x16 (&r)[16]) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      const float x = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = x;
    }
}
static inline void prefetch(const void*) {}
static inline void prefetch_near(const void*) {}

}  // namespace qrun::QRUN_NS
