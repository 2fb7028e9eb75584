// Sixteen lanes in two ymm registers: AVX2, FMA, F16C; byte dot products with AVX-VNNI if compiled.
#pragma once
#include <immintrin.h>

#include "types.h"

namespace qrun::QRUN_NS {

struct f32x16 {
  __m256 a, b;
};
struct i32x16 {
  __m256i a, b;
};

constexpr int kMaxTile[kMaxDigits + 1] = {0, 4, 2, 1};
constexpr int kGridRows = 6, kGridBlocks = 1, kPanelsFrom = 9;  // of products of floats
constexpr bool kFastDots = false;

static inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
#define QRUN_F(name, f) \
  static inline f32x16 name(f32x16 x, f32x16 y) { return {f(x.a, y.a), f(x.b, y.b)}; }
QRUN_F(operator+, _mm256_add_ps)
QRUN_F(operator-, _mm256_sub_ps)
QRUN_F(operator*, _mm256_mul_ps)
QRUN_F(operator/, _mm256_div_ps)
QRUN_F(max, _mm256_max_ps)
QRUN_F(min, _mm256_min_ps)
#undef QRUN_F

// Halves first, then quarters: the same order as the AVX-512 reduction.
static inline float sum(f32x16 x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
}
static inline float greatest(f32x16 x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
}

static inline i32x16 splat_i(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline i32x16 load_i(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
static inline void store_i(void* p, i32x16 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
#define QRUN_I(name, f) \
  static inline i32x16 name(i32x16 x, i32x16 y) { return {f(x.a, y.a), f(x.b, y.b)}; }
QRUN_I(operator+, _mm256_add_epi32)
QRUN_I(operator-, _mm256_sub_epi32)
QRUN_I(operator&, _mm256_and_si256)
QRUN_I(max, _mm256_max_epi32)
#undef QRUN_I
template <int S>
static inline i32x16 shl(i32x16 x) {
  return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)};
}
template <int S>
static inline i32x16 shr(i32x16 x) {
  return {_mm256_srli_epi32(x.a, S), _mm256_srli_epi32(x.b, S)};
}
template <int S>
static inline i32x16 sra(i32x16 x) {
  return {_mm256_srai_epi32(x.a, S), _mm256_srai_epi32(x.b, S)};
}
static inline int sum(i32x16 x) {
  int v[16], s = 0;
  store_i(v, x);
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
}
static inline int greatest(i32x16 x) {
  int v[16], s;
  store_i(v, x);
  s = v[0];
  for (int i = 1; i < 16; i++) s = v[i] > s ? v[i] : s;
  return s;
}

static inline f32x16 to_float(i32x16 x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
static inline i32x16 round_to_int(f32x16 x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
static inline i32x16 bits_of(f32x16 x) {
  return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
static inline f32x16 float_of(i32x16 x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}

static inline f32x16 load_f16(const void* p) {
  const __m128i* q = (const __m128i*)p;
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
static inline void store_f16(void* p, f32x16 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
static inline f32x16 load_bf16(const void* p) {
  const __m128i* q = (const __m128i*)p;
  i32x16 w = {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)),
              _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
  return float_of(shl<16>(w));
}
static inline void store_u16(void* p, i32x16 x) {
  i32x16 low = x & splat_i(0xffff);
  __m256i packed = _mm256_packus_epi32(low.a, low.b);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

// Byte 0 of each lane of four, gathered to the front of each 128-bit half, then joined.
static inline long long low_bytes(__m256i x) {
  const __m256i pick =
      _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                       -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  __m256i y = _mm256_shuffle_epi8(x, pick);
  return _mm_cvtsi128_si64(
      _mm_unpacklo_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
static inline void store_bytes(int8_t* p, i32x16 x) {
  long long halves[2] = {low_bytes(x.a), low_bytes(x.b)};
  __builtin_memcpy(p, halves, 16);
}
static inline void store_bytes_even_odd(int8_t* p, i32x16 x) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  store_bytes(p,
              {_mm256_permutevar8x32_epi32(x.a, order), _mm256_permutevar8x32_epi32(x.b, order)});
}

static inline i32x16 lookup(const uint8_t* table, i32x16 index) {
  __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}

static inline __m256i dot_small_half(__m256i acc, __m256i codes, __m256i x) {
  __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline i32x16 dot_small(i32x16 acc, i32x16 codes, const int8_t* p) {
  int x;
  __builtin_memcpy(&x, p, 4);
  __m256i xs = _mm256_set1_epi32(x);
  return {dot_small_half(acc.a, codes.a, xs), dot_small_half(acc.b, codes.b, xs)};
}
static inline __m256i dot_byte_half(__m256i acc, __m256i codes, __m256i even_x, __m256i odd_x) {
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)), even_x);
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odd_x);
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
static inline i32x16 dot_byte(i32x16 acc, i32x16 codes, const int8_t* p) {
  int x;
  __builtin_memcpy(&x, p, 4);
  __m256i xs = _mm256_set1_epi32(x);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8), odd = _mm256_srai_epi16(xs, 8);
  return {dot_byte_half(acc.a, codes.a, even, odd), dot_byte_half(acc.b, codes.b, even, odd)};
}

// The products of pairs of bytes, summed in 16 bits for as long as they fit, so that widening to 32
// bits is paid once and not with every dot product. Eight lanes at a time: the codes of a chunk
// then fill half of the registers.
#define QRUN_PAIR_SUMS
struct PairSums {
  __m256i v;
};
constexpr int kPairParts = 2;  // of a lane vector's sixteen lanes
static inline PairSums pairs(PairSums codes, const int8_t* p) {
  int x;
  __builtin_memcpy(&x, p, 4);
  return {_mm256_maddubs_epi16(codes.v, _mm256_set1_epi32(x))};
}
static inline PairSums operator+(PairSums a, PairSums b) { return {_mm256_add_epi16(a.v, b.v)}; }
template <int PART>
static inline PairSums part_of(i32x16 codes) {
  return {PART ? codes.b : codes.a};
}
template <int PART>
static inline void add_pairs(i32x16& acc, PairSums a) {
  __m256i& half = PART ? acc.b : acc.a;
  half = _mm256_add_epi32(half, _mm256_madd_epi16(a.v, _mm256_set1_epi16(1)));
}

// r[i] lane j <-> r[j] lane i: four 8x8 corners.
static inline void transpose8(__m256 (&r)[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int b = 0; b < 8; b += 4) {
    u[b] = _mm256_shuffle_ps(t[b], t[b + 2], 0x44);
    u[b + 1] = _mm256_shuffle_ps(t[b], t[b + 2], 0xee);
    u[b + 2] = _mm256_shuffle_ps(t[b + 1], t[b + 3], 0x44);
    u[b + 3] = _mm256_shuffle_ps(t[b + 1], t[b + 3], 0xee);
  }
  for (int c = 0; c < 4; c++) {
    r[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
  }
}
static inline void transpose(f32x16 (&r)[16]) {
  __m256 corner[4][8];  // top left, top right, bottom left, bottom right
  for (int i = 0; i < 8; i++) {
    corner[0][i] = r[i].a;
    corner[1][i] = r[i].b;
    corner[2][i] = r[i + 8].a;
    corner[3][i] = r[i + 8].b;
  }
  for (auto& c : corner) transpose8(c);
  for (int i = 0; i < 8; i++) {
    r[i] = {corner[0][i], corner[2][i]};
    r[i + 8] = {corner[1][i], corner[3][i]};
  }
}

// Into L2: a line on its way to L1 would hold one of the few fill buffers until memory answers.
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
static inline void prefetch_near(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace qrun::QRUN_NS
