// Sixteen lanes in one zmm register: AVX-512 F, BW, VL, DQ; byte dot products with VNNI.
#pragma once
#include <immintrin.h>

#include "types.h"

namespace qrun::QRUN_NS {

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};

// Register grid of the product (kernels/qmm/README.md counts the registers): rows of x by digits.
constexpr int kMaxTile[kMaxDigits + 1] = {0, 8, 8, 6};
// The same of products of floats (qmm/panels.cpp): rows of x at most, blocks of w. They pay from so
// many rows of x on, where they pay.
constexpr int kGridRows = 8, kGridBlocks = 2, kPanelsFrom = 16;
#ifdef __AVX512VNNI__
constexpr bool kFastDots = true;
#else
constexpr bool kFastDots = false;
#endif

static inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline float sum(f32x16 a) { return _mm512_reduce_add_ps(a.v); }
static inline float greatest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

static inline i32x16 splat_i(int x) { return {_mm512_set1_epi32(x)}; }
static inline i32x16 load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_i(void* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
static inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int S>
static inline i32x16 shl(i32x16 a) {
  return {_mm512_slli_epi32(a.v, S)};
}
template <int S>
static inline i32x16 shr(i32x16 a) {
  return {_mm512_srli_epi32(a.v, S)};
}
template <int S>
static inline i32x16 sra(i32x16 a) {
  return {_mm512_srai_epi32(a.v, S)};
}
static inline int sum(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
static inline int greatest(i32x16 a) { return _mm512_reduce_max_epi32(a.v); }

static inline f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline i32x16 round_to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline i32x16 bits_of(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
static inline f32x16 float_of(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }

static inline f32x16 load_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static inline void store_f16(void* p, f32x16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, 0));
}
static inline f32x16 load_bf16(const void* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
static inline void store_u16(void* p, i32x16 a) {  // the low half of each lane
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v));
}

// The low byte of each lane, in order, or each eight lanes in the order 0 2 4 6 1 3 5 7.
static inline void store_bytes(int8_t* p, i32x16 a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
}
static inline void store_bytes_even_odd(int8_t* p, i32x16 a) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_permutexvar_epi32(order, a.v)));
}

// Sixteen numbers as `COUNT` signed base-256 digits, the most significant at p, the next at p +
// chunk. Adding 128 to a byte and taking it away without borrowing turns it into its digit; a
// shuffle puts bytes of like weight side by side within 128 bits, a permutation those of like
// digits.
#define QRUN_STORE_DIGITS
template <int COUNT>
static inline void store_digits(int8_t* p, int chunk, i32x16 v, bool even_odd) {
  static_assert(COUNT == 2 || COUNT == 3);
  alignas(64) static constexpr uint8_t apart[2][16] = {
      {2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, 128, 128, 128, 128},
      {2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, 128, 128, 128, 128}};
  alignas(64) static constexpr uint16_t together[2][32] = {
      {0, 1, 8,  9,  16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27,
       4, 5, 12, 13, 20, 21, 28, 29, 6, 6, 6,  6,  6,  6,  6,  6},
      {0, 8,  1, 9,  16, 24, 17, 25, 2, 10, 3, 11, 18, 26, 19, 27,
       4, 12, 5, 13, 20, 28, 21, 29, 6, 6,  6, 6,  6,  6,  6,  6}};
  const __m512i half = _mm512_set1_epi32(COUNT == 3 ? 0x8080 : 0x80);
  const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(v.v, half), half);
  const __m512i shuffle = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)apart[even_odd]));
  const __m512i digits = _mm512_permutexvar_epi16(_mm512_load_si512(together[even_odd]),
                                                  _mm512_shuffle_epi8(bytes, shuffle));
  if (COUNT == 3) _mm_storeu_si128((__m128i*)p, _mm512_castsi512_si128(digits));
  _mm_storeu_si128((__m128i*)(p + (COUNT - 2) * chunk), _mm512_extracti32x4_epi32(digits, 1));
  _mm_storeu_si128((__m128i*)(p + (COUNT - 1) * chunk), _mm512_extracti32x4_epi32(digits, 2));
}

// A 16-entry byte table, one copy per 128-bit lane; every index byte is below 16.
static inline i32x16 lookup(const uint8_t* table, i32x16 index) {
  __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(t, index.v)};
}

// acc + the dot product of each lane's four unsigned bytes with the four signed bytes at p.
// dot_small: the unsigned bytes are at most 24, so pairs cannot overflow 16 bits.
static inline i32x16 dot_small(i32x16 acc, i32x16 codes, const int8_t* p) {
#ifdef __AVX512VNNI__
  // The broadcast belongs to the instruction; the intrinsic makes g++ 12 spend a register on it.
  __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc.v) : "v"(codes.v), "m"(*(const int8_t(*)[4])p));
  return acc;
#else
  int x;
  __builtin_memcpy(&x, p, 4);
  __m512i pairs = _mm512_maddubs_epi16(codes.v, _mm512_set1_epi32(x));
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}
static inline i32x16 dot_byte(i32x16 acc, i32x16 codes, const int8_t* p) {
#ifdef __AVX512VNNI__
  return dot_small(acc, codes, p);
#else
  int x;
  __builtin_memcpy(&x, p, 4);
  __m512i xs = _mm512_set1_epi32(x);
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(codes.v, _mm512_set1_epi16(255)),
                                   _mm512_srai_epi16(_mm512_slli_epi16(xs, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(codes.v, 8), _mm512_srai_epi16(xs, 8));
  return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
#endif
}

// Without VNNI: the products of pairs of bytes, summed in 16 bits for as long as they fit, so that
// widening to 32 bits is paid once and not with every dot product.
#ifndef __AVX512VNNI__
#define QRUN_PAIR_SUMS
struct PairSums {
  __m512i v;
};
constexpr int kPairParts = 1;  // of a lane vector's sixteen lanes
static inline PairSums pairs(PairSums codes, const int8_t* p) {
  int x;
  __builtin_memcpy(&x, p, 4);
  return {_mm512_maddubs_epi16(codes.v, _mm512_set1_epi32(x))};
}
static inline PairSums operator+(PairSums a, PairSums b) { return {_mm512_add_epi16(a.v, b.v)}; }
template <int PART>
static inline PairSums part_of(i32x16 codes) {
  return {codes.v};
}
template <int PART>
static inline void add_pairs(i32x16& acc, PairSums a) {
  acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, _mm512_set1_epi16(1)));
}
#endif

// Lanes 0 2 4 .. of a and b, and lanes 1 3 5 ..
static inline void unzip(f32x16 a, f32x16 b, f32x16& even, f32x16& odd) {
  const __m512i first =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even.v = _mm512_permutex2var_ps(a.v, first, b.v);
  odd.v = _mm512_permutex2var_ps(a.v, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b.v);
}

// r[i] lane j <-> r[j] lane i: pairs of dwords, of quadwords, then of 128-bit quarters twice.
static inline void transpose(f32x16 (&r)[16]) {
  __m512 t[16], u[16];  // u[4b + c]: rows 4b .. 4b+3 of columns c, c+4, c+8, c+12
  QRUN_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  QRUN_UNROLL
  for (int b = 0; b < 16; b += 4) QRUN_UNROLL
  for (int h = 0; h < 2; h++) {
    const __m512d low = _mm512_castps_pd(t[b + h]), high = _mm512_castps_pd(t[b + 2 + h]);
    u[b + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
    u[b + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
  }
  QRUN_UNROLL
  for (int c = 0; c < 4; c++) {
    const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
    const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    r[c].v = _mm512_shuffle_f32x4(a, d, 0x88);
    r[8 + c].v = _mm512_shuffle_f32x4(a, d, 0xdd);
    r[4 + c].v = _mm512_shuffle_f32x4(b, e, 0x88);
    r[12 + c].v = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
}

// Into L2: a line on its way to L1 would hold one of the few fill buffers until memory answers.
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
static inline void prefetch_near(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace qrun::QRUN_NS
