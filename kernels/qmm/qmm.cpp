// y = x @ w.T on a matrix unit (AMX). Without one, qmm is the register grid of qmv.cpp, swept over
// panels of x. From small to large (drawing and counts in README.md):
//
//   tile    16 rows of x (digits) times 16 rows of w (codes) over a chunk of 64 k, in whole
//           numbers; one tile of sums for each digit.
//   group   sums go through L1 into vectors and are joined and scaled as in qmv.cpp, operation by
//           operation, so that the result has the same bits.
//   panel   up to 512 k: the codes of a run of blocks, unpacked to bytes (8 KB a block), while the
//           digits of one tile of x stay in L1 (16 * 512 * 3 bytes) and pass all blocks.
//   march   panels along k; the float sums wait in memory between panels.
//
// Two sets of sum tiles alternate: the unit works on one group while the vectors finish the last.
#include "../common/amx.h"
#include "../common/epilogue.h"
#include "../common/join.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

#ifndef __AMX_INT8__

const ProductTiled product_tiled = nullptr;

#else

constexpr int kRows = kUnitRows;  // rows of x in a tile
constexpr int kPanel = kSegment;  // k
constexpr int kRun = 8;           // blocks of w whose panels are unpacked together
constexpr int kTilesAtOnce = 32;  // tiles of x whose sums wait between panels

// Tiles 0-2 and 3-5: two sets of sums, a tile for each digit; 6: digits; 7: codes.
constexpr int kSums = kRows * kLanes;  // whole numbers of one tile

// sums[d] (rows, 16) = digit d of x (rows, group) times codes (group/4, 16 lanes, 4).
template <int SET, int D>
static inline void dot_group(const int8_t* x, const uint8_t* codes, int chunks, int chunk,
                             int32_t* sums) {
#define QRUN_SET(c0, c1, c2)                                  \
  QRUN_TILE_ZERO(c0);                                         \
  if constexpr (D > 1) QRUN_TILE_ZERO(c1);                    \
  if constexpr (D > 2) QRUN_TILE_ZERO(c2);                    \
  for (int c = 0; c < chunks; c++) {                          \
    QRUN_TILE_LOAD(7, codes, 64);                             \
    QRUN_TILE_LOAD(6, x, D* chunk);                           \
    QRUN_TILE_DOT(bsud, c0, 6, 7);                            \
    if constexpr (D > 1) {                                    \
      QRUN_TILE_LOAD(6, x + chunk, D * chunk);                \
      QRUN_TILE_DOT(bsud, c1, 6, 7);                          \
    }                                                         \
    if constexpr (D > 2) {                                    \
      QRUN_TILE_LOAD(6, x + 2 * chunk, D * chunk);            \
      QRUN_TILE_DOT(bsud, c2, 6, 7);                          \
    }                                                         \
    codes += chunk * kLanes;                                  \
    x += (size_t)kRows * D * chunk;                           \
  }                                                           \
  QRUN_TILE_STORE(c0, sums, 64);                              \
  if constexpr (D > 1) QRUN_TILE_STORE(c1, sums + kSums, 64); \
  if constexpr (D > 2) QRUN_TILE_STORE(c2, sums + 2 * kSums, 64);
  if constexpr (SET == 0) {
    QRUN_SET(0, 1, 2)
  } else {
    QRUN_SET(3, 4, 5)
  }
#undef QRUN_SET
}

// acc (16, 16) += one group's sums, scaled. meta: (2, 16).
template <int D>
static inline void add_group(f32x16 (&acc)[kRows], const int32_t* sums, const float* scales,
                             const float* meta) {
  const f32x16 scale = load(scales), bias = load(scales + kLanes);
  QRUN_UNROLL
  for (int r = 0; r < kRows; r++) {
    i32x16 s[D];
    QRUN_UNROLL
    for (int d = 0; d < D; d++) s[d] = load_i(sums + d * kSums + r * kLanes);
    acc[r] = fma(scale, join<D>(s) * splat(meta[r]), acc[r]);
    acc[r] = fma(bias, splat(meta[kRows + r]), acc[r]);
  }
}

// One tile of x against one block of w over a panel of `groups` groups; sums (16, 16) in memory.
template <int D>
static void march(const int8_t* x, const float* meta, const uint8_t* codes, const float* scales,
                  int groups, int group, int chunk, float* waiting) {
  alignas(64) int32_t sums[2][D * kSums];
  f32x16 acc[kRows];
  QRUN_UNROLL
  for (int r = 0; r < kRows; r++) acc[r] = splat(0);
  const int chunks = group / chunk;
  const size_t x_step = (size_t)kRows * D * group, codes_step = (size_t)group * kLanes;
  dot_group<0, D>(x, codes, chunks, chunk, sums[0]);
  for (int g = 1;; g++) {
    x += x_step;
    codes += codes_step;
    if (g < groups) {
      if (g % 2)
        dot_group<1, D>(x, codes, chunks, chunk, sums[1]);
      else
        dot_group<0, D>(x, codes, chunks, chunk, sums[0]);
    }
    add_group<D>(acc, sums[(g - 1) % 2], scales, meta);
    if (g == groups) break;
    scales += 2 * kLanes;
    meta += 2 * kRows;
  }
  QRUN_UNROLL
  for (int r = 0; r < kRows; r++) store(waiting + r * kLanes, load(waiting + r * kLanes) + acc[r]);
}

// Groups g0 .. g0+groups-1 of a block: codes as bytes, (group/4, 16 lanes, 4) each; scales and
// biases as float32, (2, 16) each.
static void unpack(const Matrix& w, int block, int g0, int groups, uint8_t* codes, float* scales) {
  const uint8_t* p = w.data + block * w.block_bytes() + g0 * w.group_bytes();
  const size_t scales_bytes = kLanes * size_of(w.scales);
  const i32x16 mask = splat_i(0x0f0f0f0f);
  for (int g = 0; g < groups; g++) {
    const int lines = (int)(w.codes_bytes() / 64);
    for (int i = 0; i < lines; i++) {
      prefetch(p + i * 64 + 8192);
      const i32x16 c = load_i(p + i * 64);
      if (w.bits == 8) {
        store_i(codes + i * 64, c);
        continue;
      }
      i32x16 even = c & mask, odd = shr<4>(c) & mask;
      if (w.fp4) {
        even = lookup(kFp4, even);
        odd = lookup(kFp4, odd);
      }
      store_i(codes + i * 128, even);
      store_i(codes + i * 128 + 64, odd);
    }
    p += w.codes_bytes();
    store(scales, load(p, w.scales));
    store(scales + kLanes, load(p + scales_bytes, w.scales));
    codes += w.group * kLanes;
    scales += 2 * kLanes;
    p += 2 * scales_bytes;
  }
}

struct Workspace {
  alignas(64) uint8_t codes[kRun][kPanel * kLanes];
  alignas(64) float scales[kRun][kPanel / 32 * 2 * kLanes];
  alignas(64) float waiting[kTilesAtOnce][kRun][kSums];
};

template <int D>
static void run(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int blocks,
                int tile0, int tiles, Workspace& s) {
  const int groups = w.k / w.group, most = kPanel / w.group;
  for (int t = 0; t < tiles; t++)
    for (int b = 0; b < blocks; b++)
      for (int i = 0; i < kSums; i += 16) store(s.waiting[t][b] + i, splat(0));
  for (int g = 0; g < groups; g += most) {
    const int n = groups - g < most ? groups - g : most;
    for (int b = 0; b < blocks; b++) unpack(w, block0 + b, g, n, s.codes[b], s.scales[b]);
    for (int t = 0; t < tiles; t++) {
      const int8_t* digits = tile_digits(x, tile0 + t) + (size_t)g * w.group * kRows * D;
      const float* meta = tile_meta(x, tile0 + t) + (size_t)g * 2 * kRows;
      for (int b = 0; b < blocks; b++)
        march<D>(digits, meta, s.codes[b], s.scales[b], n, w.group, x.chunk, s.waiting[t][b]);
    }
  }
  for (int t = 0; t < tiles; t++)
    for (int r = 0; r < kRows && (tile0 + t) * kRows + r < x.m; r++)
      for (int b = 0; b < blocks; b++)
        finish(e, w.n, block0 + b, (size_t)(tile0 + t) * kRows + r,
               load(s.waiting[t][b] + r * kLanes));
}

static void amx_product(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                        int tile0, int tile1) {
  static thread_local Workspace space;
  configure_tiles(6, x.chunk);
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
