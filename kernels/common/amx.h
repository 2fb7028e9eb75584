// The matrix unit of x86: eight tiles of 16 rows of 64 bytes. A dot instruction multiplies
// (16, 32) bfloat16 by (32/2, 16 lanes, 2) bfloat16 and adds to (16, 16) float32 in 16 cycles.
// Tile numbers are part of the instruction, hence macros.
#pragma once

#ifdef __AMX_BF16__

#include "vec.h"

// The "memory" clobbers keep ordinary loads and stores on their side of the tile instructions.
#define QRUN_TILE_LOAD(t, p) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((size_t)64) : "memory")
#define QRUN_TILE_STORE(t, p) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((size_t)64) : "memory")
#define QRUN_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define QRUN_TILE_DOT(c, x, w) __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #c ::)
// Lines as configured, side by side; a dot of bytes, x's signed and w's not, into 32-bit sums.
#define QRUN_LINES_LOAD(t, p, bytes) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((size_t)(bytes)) : "memory")
#define QRUN_TILE_DOT_BYTES(c, x, w) \
  __asm__ volatile("tdpbsud %%tmm" #w ", %%tmm" #x ", %%tmm" #c ::)
#define QRUN_TILES_DONE() __asm__ volatile("tilerelease" ::)

namespace qrun::QRUN_NS {

constexpr int kUnitDepth = 32;                          // k of one dot instruction
constexpr int kTileBytes = kUnitRows * kUnitDepth * 2;  // of an operand
constexpr int kSums = kUnitRows * kLanes;               // numbers of a result

// Tiles 0 to 3 hold sums, 5 and 6 the operand of x, `lines` of `bytes`; 4 and 7 that of w. By
// default all are full.
static inline void configure_tiles(int lines = kUnitRows, int bytes = 64) {
  alignas(64) struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } c = {};
  c.palette = 1;
  for (int t = 0; t < 8; t++) {
    c.rows[t] = (uint8_t)(t == 4 || t == 7 ? bytes / 4 : lines);
    c.bytes[t] = (uint16_t)(t == 5 || t == 6 ? bytes : 64);
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(c) : "memory");
}

// Two vectors -> 32 bfloat16, a's first: cut off, or rounded to nearest even.
static inline void store_cut(void* p, f32x16 a, f32x16 b) {
  const __m512i high =
      _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015,
                        0x001b0019, 0x001f001d, 0x00230021, 0x00270025, 0x002b0029, 0x002f002d,
                        0x00330031, 0x00370035, 0x003b0039, 0x003f003d);
  _mm512_storeu_si512(
      p, _mm512_permutex2var_epi16(_mm512_castps_si512(a.v), high, _mm512_castps_si512(b.v)));
}
static inline void store_rounded(void* p, f32x16 a, f32x16 b) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}
// The same with a's and b's in turn.
static inline void store_rounded_pairs(void* p, f32x16 a, f32x16 b) {
  const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)));
}
// Zero instead of what is at p where keep's bits are not set.
static inline f32x16 load_if(uint16_t keep, const float* p) {
  return {_mm512_maskz_loadu_ps(keep, p)};
}
// The high four bits of each byte, brought down: one instruction for a shift and a mask.
static inline i32x16 high_halves(i32x16 a) {
  return {_mm512_gf2p8affine_epi64_epi8(a.v, _mm512_set1_epi64(0x1020408000000000), 0)};
}
static inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }
static inline f32x16 rounded_to_bf16(f32x16 a) {
  const __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(h, 16))};
}
static inline f32x16 cut_to_bf16(f32x16 a) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32((int)0xffff0000)))};
}
// Each eight lanes in the order 0 4 1 5 2 6 3 7.
static inline f32x16 paired_by_fours(f32x16 a) {
  return {_mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), a.v)};
}

}  // namespace qrun::QRUN_NS

#endif
