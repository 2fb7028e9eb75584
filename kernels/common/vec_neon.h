// Sixteen lanes in four 128-bit registers: NEON with the dot product extension; with i8mm also the
// mixed-sign one.
#pragma once
#include <arm_neon.h>

#include "types.h"

namespace qrun::QRUN_NS {

struct f32x16 {
  float32x4_t v[4];
};
struct i32x16 {
  int32x4_t v[4];
};

constexpr int kMaxTile[kMaxDigits + 1] = {0, 4, 2, 1};
constexpr int kGridRows = 6, kGridBlocks = 1, kPanelsFrom = 9;  // of products of floats
constexpr bool kFastDots = true;

#define QRUN_EACH(expr)                                                  \
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) { r.v[i] = expr; } \
  return r;
#define QRUN_F(name, f)                           \
  static inline f32x16 name(f32x16 a, f32x16 b) { \
    f32x16 r;                                     \
    QRUN_EACH(f(a.v[i], b.v[i]))                  \
  }
#define QRUN_I(name, f)                           \
  static inline i32x16 name(i32x16 a, i32x16 b) { \
    i32x16 r;                                     \
    QRUN_EACH(f(a.v[i], b.v[i]))                  \
  }

static inline f32x16 splat(float x) {
  f32x16 r;
  QRUN_EACH(vdupq_n_f32(x))
}
static inline f32x16 load(const float* p) {
  f32x16 r;
  QRUN_EACH(vld1q_f32(p + 4 * i))
}
static inline void store(float* p, f32x16 a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  f32x16 r;
  QRUN_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i]))
}
QRUN_F(operator+, vaddq_f32)
QRUN_F(operator-, vsubq_f32)
QRUN_F(operator*, vmulq_f32)
QRUN_F(operator/, vdivq_f32)
QRUN_F(max, vmaxq_f32)
QRUN_F(min, vminq_f32)
// Halves first, then quarters: the same order as the other instruction sets.
static inline float sum(f32x16 a) {
  float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t h = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
static inline float greatest(f32x16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}

static inline i32x16 splat_i(int x) {
  i32x16 r;
  QRUN_EACH(vdupq_n_s32(x))
}
static inline i32x16 load_i(const void* p) {
  i32x16 r;
  QRUN_EACH(vld1q_s32((const int32_t*)p + 4 * i))
}
static inline void store_i(void* p, i32x16 a) {
  for (int i = 0; i < 4; i++) vst1q_s32((int32_t*)p + 4 * i, a.v[i]);
}
QRUN_I(operator+, vaddq_s32)
QRUN_I(operator-, vsubq_s32)
QRUN_I(operator&, vandq_s32)
QRUN_I(max, vmaxq_s32)
template <int S>
static inline i32x16 shl(i32x16 a) {
  i32x16 r;
  QRUN_EACH(vshlq_n_s32(a.v[i], S))
}
template <int S>
static inline i32x16 shr(i32x16 a) {
  i32x16 r;
  QRUN_EACH(vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), S)))
}
template <int S>
static inline i32x16 sra(i32x16 a) {
  i32x16 r;
  QRUN_EACH(vshrq_n_s32(a.v[i], S))
}
static inline int sum(i32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
static inline int greatest(i32x16 a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}

static inline f32x16 to_float(i32x16 a) {
  f32x16 r;
  QRUN_EACH(vcvtq_f32_s32(a.v[i]))
}
static inline i32x16 round_to_int(f32x16 a) {
  i32x16 r;
  QRUN_EACH(vcvtnq_s32_f32(a.v[i]))
}
static inline i32x16 bits_of(f32x16 a) {
  i32x16 r;
  QRUN_EACH(vreinterpretq_s32_f32(a.v[i]))
}
static inline f32x16 float_of(i32x16 a) {
  f32x16 r;
  QRUN_EACH(vreinterpretq_f32_s32(a.v[i]))
}

static inline f32x16 load_f16(const void* p) {
  f32x16 r;
  QRUN_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + 4 * i))))
}
static inline void store_f16(void* p, f32x16 a) {
  for (int i = 0; i < 4; i++)
    vst1_u16((uint16_t*)p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
static inline f32x16 load_bf16(const void* p) {
  f32x16 r;
  QRUN_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p + 4 * i), 16)))
}

static inline void store_bytes(int8_t* p, i32x16 a) {
  int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
static inline void store_bytes_even_odd(int8_t* p, i32x16 a) {
  static const uint8_t order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
  int8_t b[16];
  store_bytes(b, a);
  vst1q_s8(p, vqtbl1q_s8(vld1q_s8(b), vld1q_u8(order)));
}

static inline i32x16 lookup(const uint8_t* table, i32x16 index) {
  const uint8x16_t t = vld1q_u8(table);
  i32x16 r;
  QRUN_EACH(vreinterpretq_s32_u8(vqtbl1q_u8(t, vreinterpretq_u8_s32(index.v[i]))))
}

static inline int8x16_t four(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
// Codes up to 24 are the same number as signed bytes.
static inline i32x16 dot_small(i32x16 acc, i32x16 codes, const int8_t* p) {
  const int8x16_t x = four(p);
  i32x16 r;
  QRUN_EACH(vdotq_s32(acc.v[i], vreinterpretq_s8_s32(codes.v[i]), x))
}
// unsigned * signed = (unsigned - 128) * signed + 128 * signed
static inline i32x16 dot_byte(i32x16 acc, i32x16 codes, const int8_t* p) {
  const int8x16_t x = four(p);
  i32x16 r;
#ifdef __ARM_FEATURE_MATMUL_INT8
  QRUN_EACH(vusdotq_s32(acc.v[i], vreinterpretq_u8_s32(codes.v[i]), x))
#else
  const int32x4_t offset = vdupq_n_s32(128 * (p[0] + p[1] + p[2] + p[3]));
  const int8x16_t flip = vdupq_n_s8(-128);
  QRUN_EACH(
      vdotq_s32(vaddq_s32(acc.v[i], offset), veorq_s8(vreinterpretq_s8_s32(codes.v[i]), flip), x))
#endif
}

// r[i] lane j <-> r[j] lane i: a 4x4 of 4x4 corners.
static inline void transpose(f32x16 (&r)[16]) {
  f32x16 t[16];
  for (int a = 0; a < 4; a++)
    for (int b = 0; b < 4; b++) {
      const float32x4x2_t x = vtrnq_f32(r[4 * a].v[b], r[4 * a + 1].v[b]);
      const float32x4x2_t y = vtrnq_f32(r[4 * a + 2].v[b], r[4 * a + 3].v[b]);
      t[4 * b].v[a] = vcombine_f32(vget_low_f32(x.val[0]), vget_low_f32(y.val[0]));
      t[4 * b + 1].v[a] = vcombine_f32(vget_low_f32(x.val[1]), vget_low_f32(y.val[1]));
      t[4 * b + 2].v[a] = vcombine_f32(vget_high_f32(x.val[0]), vget_high_f32(y.val[0]));
      t[4 * b + 3].v[a] = vcombine_f32(vget_high_f32(x.val[1]), vget_high_f32(y.val[1]));
    }
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
static inline void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }

#undef QRUN_EACH
#undef QRUN_F
#undef QRUN_I

}  // namespace qrun::QRUN_NS
