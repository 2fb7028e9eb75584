// y = x @ w.T on a matrix unit (AMX). Without one, qmm is the register grid of qmv.cpp, swept over
// panels of x. From small to large (drawing and counts in README.md):
//
//   tile    16 rows of x times 16 rows of w over 32 k. Codes are whole numbers and exact as
//           bfloat16; a number of x is the sum of up to three of them (terms.cpp): their products
//           all go into one tile of float32 sums.
//   group   its sums go through L1 into vectors: acc += scale * sum + bias * x_sum
//   panel   up to 320 k: the codes of a run of blocks, unpacked to bfloat16 (10 KB a block), while
//           the terms of one tile of x stay in L1 (16 * 320 * 3 * 2 bytes) and pass all blocks.
//   march   panels along k; the float sums wait in memory between panels.
//
// A dot instruction waits 52 cycles for the one before it on the same sums: two groups go side by
// side. Two sets of two alternate: the unit works on one pair while the vectors finish the last.
#include "../common/amx.h"
#include "../common/epilogue.h"
#include "../common/join.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

#ifndef __AMX_BF16__

const ProductTiled product_tiled = nullptr;

#else

constexpr int kPanel = 320;       // k
constexpr int kRun = 8;           // blocks of w whose panels are unpacked together
constexpr int kTilesAtOnce = 32;  // tiles of x whose sums wait between panels

// The sums of one group, or of two that follow each other; tiles 0, 1 or 2, 3.
// x: (k/32, T, 16, 32), codes: (k/32, 16, 16 lanes, 2); `chunks` times 32 k are a group.
template <int SET, int T, bool TWO>
static inline void dot_groups(const char* x, const char* codes, int chunks) {
  const size_t x_next = (size_t)chunks * T * kTileBytes, codes_next = (size_t)chunks * kTileBytes;
#define QRUN_TERM(c0, c1, t)                        \
  if constexpr (T > t) {                            \
    QRUN_TILE_LOAD(4, x + t * kTileBytes);          \
    QRUN_TILE_DOT(c0, 4, 6);                        \
  }                                                 \
  if constexpr (T > t && TWO) {                     \
    QRUN_TILE_LOAD(5, x + x_next + t * kTileBytes); \
    QRUN_TILE_DOT(c1, 5, 7);                        \
  }
#define QRUN_SET(c0, c1)                                      \
  QRUN_TILE_ZERO(c0);                                         \
  QRUN_TILE_ZERO(c1);                                         \
  for (int c = 0; c < chunks; c++) {                          \
    QRUN_TILE_LOAD(6, codes);                                 \
    if constexpr (TWO) QRUN_TILE_LOAD(7, codes + codes_next); \
    QRUN_TERM(c0, c1, 0)                                      \
    QRUN_TERM(c0, c1, 1)                                      \
    QRUN_TERM(c0, c1, 2)                                      \
    x += T * kTileBytes;                                      \
    codes += kTileBytes;                                      \
  }
  if constexpr (SET == 0) {
    QRUN_SET(0, 1)
  } else {
    QRUN_SET(2, 3)
  }
#undef QRUN_SET
#undef QRUN_TERM
}

template <int SET>
static inline void store_sums(float (*sums)[kSums]) {
  if constexpr (SET == 0) {
    QRUN_TILE_STORE(0, sums[0]);
    QRUN_TILE_STORE(1, sums[1]);
  } else {
    QRUN_TILE_STORE(2, sums[0]);
    QRUN_TILE_STORE(3, sums[1]);
  }
}

// acc (16, 16) += one group's sums, scaled. meta: (2, 16); its second row are the sums of x.
static inline void add_group(f32x16 (&acc)[kUnitRows], const float* sums, const float* scales,
                             const float* meta) {
  const f32x16 scale = load(scales), bias = load(scales + kLanes);
  QRUN_UNROLL
  for (int r = 0; r < kUnitRows; r++) {
    acc[r] = fma(scale, load(sums + r * kLanes), acc[r]);
    acc[r] = fma(bias, splat(meta[kUnitRows + r]), acc[r]);
  }
}

struct Workspace {
  alignas(64) char codes[kRun][kPanel * kLanes * 2];
  alignas(64) float scales[kRun][kPanel / 32 * 2 * kLanes];
  alignas(64) float waiting[kTilesAtOnce][kRun][kSums];
};

// One tile of x against `blocks` blocks of w over a panel of `groups` groups; their sums so far
// wait, (blocks, 16, 16). The unit begins with a block before the vectors are done with the last.
template <int T>
static void march(const char* x, const float* meta, const Workspace& s, int blocks, int groups,
                  int chunks, float (*waiting)[kSums]) {
  alignas(64) float sums[2][kSums];
  f32x16 acc[kUnitRows];
  QRUN_UNROLL
  for (int r = 0; r < kUnitRows; r++) acc[r] = splat(0);
  const size_t x_step = (size_t)chunks * T * kTileBytes, codes_step = (size_t)chunks * kTileBytes;
  const int pairs = (groups + 1) / 2, steps = blocks * pairs;
  for (int i = 0, b = 0, g = 0, last_b = 0, last_g = 0; i <= steps; i++) {
    if (i < steps) {
      const char *xs = x + g * x_step, *codes = s.codes[b] + g * codes_step;
      const bool two = g + 1 < groups;
      if (i % 2 == 0)
        two ? dot_groups<0, T, true>(xs, codes, chunks)
            : dot_groups<0, T, false>(xs, codes, chunks);
      else
        two ? dot_groups<1, T, true>(xs, codes, chunks)
            : dot_groups<1, T, false>(xs, codes, chunks);
    }
    if (i > 0) {
      if (i % 2)
        store_sums<0>(sums);
      else
        store_sums<1>(sums);
      const int n = groups - last_g < 2 ? 1 : 2;
      const float* scales = s.scales[last_b] + last_g * 2 * kLanes;
      const float* x_sums = meta + last_g * 2 * kUnitRows;
      for (int j = 0; j < n; j++)
        add_group(acc, sums[j], scales + j * 2 * kLanes, x_sums + j * 2 * kUnitRows);
      if (last_g + 2 >= groups) QRUN_UNROLL
      for (int r = 0; r < kUnitRows; r++) {
        float* sum = waiting[last_b] + r * kLanes;
        store(sum, load(sum) + acc[r]);
        acc[r] = splat(0);
      }
    }
    last_b = b;
    last_g = g;
    g += 2;
    if (g >= groups) {
      g = 0;
      b++;
    }
  }
}

// A dword of eight 4-bit codes, or of four bytes, in every lane -> bfloat16, (16 lanes, 2) each.
static inline void unpack_dwords(const Matrix& w, i32x16 c, char* codes) {
  if (w.bits == 8) {
    for (int i = 0; i < 2; i++, c = shr<16>(c)) {
      const i32x16 first = shr<16>(bits_of(to_float(c & splat_i(255))));
      const i32x16 second = bits_of(to_float(shr<8>(c) & splat_i(255)));
      store_i(codes + i * 64, first + second);  // whole numbers up to 255 leave the low half empty
    }
    return;
  }
  // 0 .. 15, or what fp4 codes stand for; bits beyond the fourth do not choose.
  const __m512i plain = _mm512_broadcast_i64x4(
      _mm256_setr_epi16(0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                        0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
  const __m512i fp4 = _mm512_broadcast_i64x4(
      _mm256_setr_epi16(0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4190, 0x41a0, 0x41c0, 0x4140,
                        0x4130, 0x4120, 0x4110, 0x4100, 0x40c0, 0x4080, 0x0000));
  const __m512i table = w.fp4 ? fp4 : plain;
  store_i(codes, {_mm512_permutexvar_epi16(c.v, table)});
  store_i(codes + 64, {_mm512_permutexvar_epi16(shr<4>(c).v, table)});
  store_i(codes + 128, {_mm512_permutexvar_epi16(shr<8>(c).v, table)});
  store_i(codes + 192, {_mm512_permutexvar_epi16(shr<12>(c).v, table)});
}

// Groups g0 .. g0+groups-1 of a block: codes as bfloat16, (k/2, 16 lanes, 2); scales and biases as
// float32, (groups, 2, 16).
static void unpack(const Matrix& w, int block, int g0, int groups, char* codes, float* scales) {
  const uint8_t* p = w.data + block * w.block_bytes() + g0 * w.group_bytes();
  const size_t scales_bytes = kLanes * size_of(w.scales);
  const int lines = (int)(w.codes_bytes() / 64), step = w.bits == 8 ? 128 : 256;
  for (int g = 0; g < groups; g++) {
    for (int i = 0; i < lines; i++, codes += step) {
      prefetch(p + i * 64 + 8192);
      unpack_dwords(w, load_i(p + i * 64), codes);
    }
    p += w.codes_bytes();
    store(scales, load(p, w.scales));
    store(scales + kLanes, load(p + scales_bytes, w.scales));
    scales += 2 * kLanes;
    p += 2 * scales_bytes;
  }
}

template <int T>
static void run(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int blocks,
                int tile0, int tiles, Workspace& s) {
  const int groups = w.k / w.group, chunks = w.group / kUnitDepth;
  const int fit = kPanel / w.group, panels = (groups + fit - 1) / fit;
  const int most = (groups + panels - 1) / panels;
  for (int t = 0; t < tiles; t++)
    for (int b = 0; b < blocks; b++)
      for (int i = 0; i < kSums; i += 16) store(s.waiting[t][b] + i, splat(0));
  for (int g = 0; g < groups; g += most) {
    const int n = groups - g < most ? groups - g : most;
    for (int b = 0; b < blocks; b++) unpack(w, block0 + b, g, n, s.codes[b], s.scales[b]);
    for (int t = 0; t < tiles; t++) {
      const char* terms =
          (const char*)tile_digits(x, tile0 + t) + (size_t)g * chunks * T * kTileBytes;
      const float* meta = tile_meta(x, tile0 + t) + (size_t)g * 2 * kUnitRows;
      march<T>(terms, meta, s, blocks, n, chunks, s.waiting[t]);
    }
  }
  for (int t = 0; t < tiles; t++) {
    const float* factor = tile_meta(x, tile0 + t);
    for (int r = 0; r < kUnitRows && (tile0 + t) * kUnitRows + r < x.m; r++)
      for (int b = 0; b < blocks; b += 2) {
        const size_t row = (size_t)(tile0 + t) * kUnitRows + r;
        const f32x16 a = load(s.waiting[t][b] + r * kLanes) * splat(factor[r]);
        if (b + 1 < blocks)
          finish_two(e, w.n, block0 + b, row, a,
                     load(s.waiting[t][b + 1] + r * kLanes) * splat(factor[r]));
        else
          finish(e, w.n, block0 + b, row, a);
      }
  }
}

static void amx_product(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                        int tile0, int tile1) {
  static thread_local Workspace space;
  configure_tiles();
  const auto step = x.count == 1 ? run<1> : x.count == 2 ? run<2> : run<3>;
  for (int t = tile0; t < tile1; t += kTilesAtOnce)
    for (int b = block0; b < block1; b += kRun)
      step(w, x, e, b, block1 - b < kRun ? block1 - b : kRun, t,
           tile1 - t < kTilesAtOnce ? tile1 - t : kTilesAtOnce, space);
  QRUN_TILES_DONE();
}

const ProductTiled product_tiled = amx_product;

#endif

}  // namespace qrun::QRUN_NS
