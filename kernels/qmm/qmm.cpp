// y = x @ w.T on a matrix unit (AMX). Without one, qmm is the register grid of qmv.cpp, swept over
// panels of x. From small to large (drawing and counts in README.md):
//
//   dot     16 rows of x times 16 rows of w over 32 k. Codes are whole numbers and exact as
//           bfloat16; a number of x is the sum of up to three of them (terms.cpp): their products
//           all go into one tile of float32 sums.
//   square  two tiles of x times two blocks of w. Four dots share four loads, and none waits the
//           52 cycles that the one before it on the same sums takes.
//   step    the dots of a group. Each tile of sums of the step before goes to L1 right before the
//           first dot that begins it anew (the unit renames tiles, so neither waits), and between
//           the dots that follow vectors add them up: acc += scale * sum + bias * x_sum
//   march   a pair of tiles of x, their terms in L1, past up to 16 pairs of blocks, from L2
//   panel   up to 128 k, 192 of a single term: the codes of those blocks are unpacked once and meet
//           up to 16 tiles of x, whose float sums wait in L2.
//
// With a single term (int8) and enough rows w is rounded too, to one bfloat16 scale * code + bias:
// then a step is a whole panel.
#include "../common/amx.h"
#include "../common/epilogue.h"
#include "../common/join.h"
#include "../common/kernels.h"
#include "../common/lease.h"

namespace qrun::QRUN_NS {

#ifndef __AMX_BF16__

const ProductTiled product_tiled = nullptr;

#else

constexpr int kPanel = 192;       // k, at most
constexpr int kPairs = 16;        // pairs of blocks of w whose panels are unpacked together
constexpr int kTilesAtOnce = 16;  // tiles of x whose sums wait between panels

using Square = float[2][2][kSums];  // by tile of x and block of w

struct Workspace {
  alignas(64) char codes[kPairs * kPanel / 32 * 2 * kTileBytes];  // (pair, k/32, block, 16, 16, 2)
  alignas(64) float scales[kPairs][kPanel / 32][2][2][kLanes];    // by group, block: scale, bias
  alignas(64) Square waiting[kTilesAtOnce / 2][kPairs];
  alignas(64) float sums[4][kSums];
  alignas(64) Square nowhere;  // what a march adds before it has sums
};

// Where the sums of a step belong.
struct Step {
  float* acc;           // a Square
  const float* scales;  // (2 blocks, 2, 16)
  const float* x_sums;  // of the first tile's rows; the second's are `next_tile` behind
  size_t next_tile;
  bool first;  // nothing waits in acc yet
};

// Adds the sums of a step, (XT tiles of x, 2 blocks, 16, 16), to acc, some rows at a time. WHOLE:
// they are of w itself, without scale and bias. Passed by value: behind a reference g++ 12 keeps
// its vectors in memory.
template <int XT, bool WHOLE>
class Fold {
 public:
  Fold(const Step& s, const float* sums)
      : scale0_(load(s.scales)),
        bias0_(load(s.scales + kLanes)),
        scale1_(load(s.scales + 2 * kLanes)),
        bias1_(load(s.scales + 3 * kLanes)),
        acc_(s.acc),
        sums_(sums),
        x_sums0_(s.x_sums),
        x_sums1_(s.x_sums + s.next_tile),
        keep_(s.first ? 0 : 0xffff) {}

  // What belongs behind dot AT of a step, if the first OF dots do it all. Behind the very first dot
  // nothing: its sums are still on their way to L1.
  template <int AT, int OF>
  void part() const {
    if constexpr (AT >= 1 && AT < OF) {
      constexpr int to = kRows * AT / (OF - 1);
      static_assert(to <= kUnitRows * (AT + 1), "sums are added before they are stored");
      rows<kRows*(AT - 1) / (OF - 1), to>();
    }
  }
  void all() const { rows<0, kRows>(); }

 private:
  static constexpr int kRows = XT * 2 * kUnitRows;

  template <int FROM, int TO>
  void rows() const {
    tile<0, FROM, TO>(scale0_, bias0_, x_sums0_);
    tile<1, FROM, TO>(scale1_, bias1_, x_sums0_);
    if constexpr (XT == 2) {
      tile<2, FROM, TO>(scale0_, bias0_, x_sums1_);
      tile<3, FROM, TO>(scale1_, bias1_, x_sums1_);
    }
  }
  template <int TILE, int FROM, int TO>
  void tile(f32x16 scale, f32x16 bias, const float* x_sums) const {
    constexpr int at = TILE * kUnitRows, from = FROM > at ? FROM : at,
                  to = TO < at + kUnitRows ? TO : at + kUnitRows;
    QRUN_UNROLL
    for (int r = from; r < to; r++) {
      f32x16 a = load_if(keep_, acc_ + r * kLanes);
      if constexpr (WHOLE) {
        a = a + load(sums_ + r * kLanes);
      } else {
        a = fma(scale, load(sums_ + r * kLanes), a);
        a = fma(bias, splat(x_sums[r - at]), a);
      }
      store(acc_ + r * kLanes, a);
    }
  }

  f32x16 scale0_, bias0_, scale1_, bias1_;
  float* acc_;
  const float *sums_, *x_sums0_, *x_sums1_;
  uint16_t keep_;
};

// The dots of one term of x over 32 k; AT: the first one's number within the step.
template <int XT, int AT, int OF, bool WHOLE>
static inline void term(const char* x0, const char* x1, float (*sums)[kSums], Fold<XT, WHOLE> f) {
#define QRUN_DOT(c, x, w, i)     \
  if constexpr (AT == 0) {       \
    QRUN_TILE_STORE(c, sums[c]); \
    QRUN_TILE_ZERO(c);           \
  }                              \
  QRUN_TILE_DOT(c, x, w);        \
  f.template part<AT + i, OF>();
  QRUN_TILE_LOAD(4, x0);
  if constexpr (XT == 2) QRUN_TILE_LOAD(5, x1);
  QRUN_DOT(0, 4, 6, 0)
  QRUN_DOT(1, 4, 7, 1)
  if constexpr (XT == 2) {
    QRUN_DOT(2, 5, 6, 2)
    QRUN_DOT(3, 5, 7, 3)
  }
#undef QRUN_DOT
}

template <int T, int XT, int CHUNK, int OF, bool WHOLE>
static inline void chunk(const char* x0, const char* x1, const char* codes, float (*sums)[kSums],
                         Fold<XT, WHOLE> f) {
  constexpr int dots = 2 * XT, at = CHUNK * T * dots;
  QRUN_TILE_LOAD(6, codes);
  QRUN_TILE_LOAD(7, codes + kTileBytes);
  term<XT, at, OF>(x0, x1, sums, f);
  if constexpr (T > 1) term<XT, at + dots, OF>(x0 + kTileBytes, x1 + kTileBytes, sums, f);
  if constexpr (T > 2)
    term<XT, at + 2 * dots, OF>(x0 + 2 * kTileBytes, x1 + 2 * kTileBytes, sums, f);
}

// Chunks C .. SPREAD-1 of a step.
template <int T, int XT, int C, int SPREAD, bool WHOLE>
static inline void spread(const char* x0, const char* x1, const char* codes, float (*sums)[kSums],
                          Fold<XT, WHOLE> f) {
  chunk<T, XT, C, SPREAD * T * 2 * XT>(x0, x1, codes, sums, f);
  if constexpr (C + 1 < SPREAD)
    spread<T, XT, C + 1, SPREAD>(x0 + T * kTileBytes, x1 + T * kTileBytes, codes + 2 * kTileBytes,
                                 sums, f);
}

// All dots of a step of `chunks` times 32 k; the first SPREAD of them share the fold. x0, x1:
// (chunks, T, 16, 32), codes: (chunks, 2 blocks, 16, 16, 2). What `sums` gets and `f` adds are
// those of the step before.
template <int T, int XT, int SPREAD, bool WHOLE>
static inline void step(const char* x0, const char* x1, const char* codes, int chunks,
                        float (*sums)[kSums], Fold<XT, WHOLE> f) {
  constexpr int x_next = T * kTileBytes, next = 2 * kTileBytes;
  spread<T, XT, 0, SPREAD>(x0, x1, codes, sums, f);
  if constexpr (SPREAD > 1)
    for (int c = SPREAD; c < chunks; c++)
      chunk<T, XT, SPREAD, SPREAD * T * 2 * XT>(x0 + c * x_next, x1 + c * x_next, codes + c * next,
                                                sums, f);
}

// What a march brings nearer for those who come next.
struct Ahead {
  const char* x;  // terms: of two tiles, `next_tile` bytes apart, this many lines a step of each
  size_t next_tile;
  int lines;
  char* y;  // results: of this many rows, `row` bytes apart, `pair` bytes a pair of blocks
  int rows;
  size_t row, pair;
};

// XT tiles of x against `pairs` pairs of blocks over a panel of `steps` steps of `chunks` times 32
// k. x_sums: of the first tile and step; `first`: the panel begins at k = 0.
template <int T, int XT, int SPREAD, bool WHOLE>
static void march(const char* x0, const char* x1, const float* x_sums, size_t next_tile, bool first,
                  Workspace& w, int pairs, int steps, int chunks, Square* waiting, Ahead ahead) {
  const size_t x_step = (size_t)chunks * T * kTileBytes;
  const char* codes = w.codes;
  Step last{w.nowhere[0][0], w.scales[0][0][0][0], x_sums, next_tile, true};
  for (int b = 0; b < pairs; b++) {
    for (int r = 0; r < ahead.rows; r++)
      for (size_t i = 0; i < ahead.pair; i += 64)
        prefetch_to_write(ahead.y + r * ahead.row + b * ahead.pair + i);
    for (int g = 0; g < steps; g++) {
      for (int i = 0; i < ahead.lines; i++, ahead.x += 64) {
        prefetch(ahead.x);
        prefetch(ahead.x + ahead.next_tile);
      }
      const Fold<XT, WHOLE> fold(last, w.sums[0]);
      step<T, XT, SPREAD>(x0 + g * x_step, x1 + g * x_step, codes, chunks, w.sums, fold);
      codes += (size_t)chunks * 2 * kTileBytes;
      last = {waiting[b][0][0], w.scales[b][g][0][0], x_sums + g * 2 * kUnitRows, next_tile,
              first && g == 0};
    }
  }
  QRUN_TILE_STORE(0, w.sums[0]);
  QRUN_TILE_STORE(1, w.sums[1]);
  if constexpr (XT == 2) {
    QRUN_TILE_STORE(2, w.sums[2]);
    QRUN_TILE_STORE(3, w.sums[3]);
  }
  Fold<XT, WHOLE>(last, w.sums[0]).all();
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

// 64 bytes of codes as bfloat16 -> scale * code + bias, rounded.
static inline void dequantize(char* codes, f32x16 scale, f32x16 bias) {
  const i32x16 c = load_i(codes);
  store_rounded_pairs(codes, fma(scale, float_of(shl<16>(c)), bias),
                      fma(scale, cut_to_bf16(float_of(c)), bias));
}

// Groups g0 .. g0+groups-1 of a block: codes as bfloat16, (k/32, 16, 16 lanes, 2) two tiles apart;
// scales and biases as float32, (groups, [2 blocks,] 2, 16). WHOLE: a single step, w itself.
template <bool WHOLE>
static void unpack(const Matrix& w, int block, int g0, int groups, char* codes,
                   float (*scales)[2][2][kLanes]) {
  const uint8_t* p = w.data + block * w.block_bytes() + g0 * w.group_bytes();
  const size_t scales_bytes = kLanes * size_of(w.scales);
  const int lines = (int)(w.codes_bytes() / 64), step = w.bits == 8 ? 2 : 4;
  int row = 0;
  for (int g = 0; g < groups; g++) {
    const uint8_t* s = p + w.codes_bytes();
    const f32x16 scale = load(s, w.scales), bias = load(s + scales_bytes, w.scales);
    for (int i = 0; i < lines; i++, row += step) {
      prefetch(p + i * 64 + 8192);
      char* to = codes + row / 16 * 2 * kTileBytes + row % 16 * 64;
      unpack_dwords(w, load_i(p + i * 64), to);
      if constexpr (WHOLE)
        for (int j = 0; j < step; j++) dequantize(to + j * 64, scale, bias);
    }
    p = s + 2 * scales_bytes;
    if constexpr (WHOLE) continue;
    store(scales[g][0][0], scale);
    store(scales[g][0][1], bias);
  }
}

// Rows of one tile of x: their sums on the way to y. acc: of its first pair of blocks.
static void finish_tile(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int blocks,
                        int tile, const float* acc) {
  const float* factor = tile_meta(x, tile);
  for (int r = 0; r < kUnitRows && tile * kUnitRows + r < x.m; r++) {
    const size_t row = (size_t)tile * kUnitRows + r;
    for (int b = 0; b < blocks; b += 2) {
      const float* sums = acc + b / 2 * (sizeof(Square) / sizeof(float)) + r * kLanes;
      const f32x16 a = load(sums) * splat(factor[r]);
      if (b + 1 < blocks)
        finish_two(e, w.n, block0 + b, row, a, load(sums + kSums) * splat(factor[r]));
      else
        finish(e, w.n, block0 + b, row, a);
    }
  }
}

template <int T, bool WHOLE>
static void run(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int blocks,
                int tile0, int tiles, Workspace& s) {
  const int groups = w.k / w.group, chunks = w.group / kUnitDepth, pairs = (blocks + 1) / 2;
  const int fit = (WHOLE ? kPanel : 128) / w.group, panels = (groups + fit - 1) / fit;
  const int most = (groups + panels - 1) / panels;
  const int gated = e.activation != Activation::none;
  const size_t next_terms = tile_digits(x, 1) - tile_digits(x, 0);
  const size_t next_sums = tile_meta(x, 1) - tile_meta(x, 0);
  const auto terms = [&](int t, int g) {
    return (const char*)tile_digits(x, tile0 + t) + (size_t)g * chunks * T * kTileBytes;
  };
  for (int g = 0; g < groups; g += most) {
    const int n = groups - g < most ? groups - g : most;
    const bool last = g + n == groups;
    const int steps = WHOLE ? 1 : n, depth = WHOLE ? n * chunks : chunks;
    for (int b = 0; b < blocks; b++) {
      char* codes = s.codes + ((size_t)(b / 2) * n * chunks * 2 + b % 2) * kTileBytes;
      unpack<WHOLE>(w, block0 + b, g, n, codes, (float(*)[2][2][kLanes])s.scales[b / 2][0][b % 2]);
    }
    for (int t = 0; t < tiles; t += 2) {
      const bool two = t + 1 < tiles;
      Ahead ahead{
          t + 2 < tiles ? terms(t + 2, g) : terms(0, g + n), next_terms, 0, nullptr, 0, 0, 0};
      ahead.lines = n * chunks * T * kTileBytes / 64 / (pairs * steps) + 1;
      if (last) {
        const size_t row = (size_t)(tile0 + t) * kUnitRows, width = w.n >> gated;
        ahead.y = (char*)at(e.y, e.type, row * width + (block0 * kLanes >> gated));
        ahead.rows = two ? 2 * kUnitRows : kUnitRows;
        ahead.row = width * size_of(e.type);
        ahead.pair = (2 * kLanes >> gated) * size_of(e.type);
      }
      const float* x_sums = tile_meta(x, tile0 + t) + (size_t)g * 2 * kUnitRows + kUnitRows;
      constexpr int share = WHOLE ? 6 : 2;  // chunks that share a fold
      const auto step = two         ? depth >= share ? march<T, 2, share, WHOLE>
                                      : depth > 1    ? march<T, 2, 2, WHOLE>
                                                     : march<T, 2, 1, WHOLE>
                                : depth > 1 ? march<T, 1, 2, WHOLE>
                                    : march<T, 1, 1, WHOLE>;
      step(terms(t, g), two ? terms(t + 1, g) : nullptr, x_sums, next_sums, g == 0, s, pairs, steps,
           depth, s.waiting[t / 2], ahead);
      for (int i = 0; last && i <= two; i++)
        finish_tile(w, x, e, block0, blocks, tile0 + t + i, s.waiting[t / 2][0][i][0]);
    }
  }
}

static void amx_product(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                        int tile0, int tile1) {
  const Lease lease(sizeof(Workspace));
  Workspace& own = *reinterpret_cast<Workspace*>(lease.data());
  configure_tiles();
  constexpr int pays = 4;  // tiles of x from which rounding w costs less than the steps it saves
  const auto step = x.count == 3                    ? run<3, false>
                    : x.count == 2                  ? run<2, false>
                    : x.tiles() >= pays && !x.exact ? run<1, true>
                                                    : run<1, false>;
  for (int t = tile0; t < tile1; t += kTilesAtOnce)
    for (int b = block0; b < block1; b += 2 * kPairs)
      step(w, x, e, b, block1 - b < 2 * kPairs ? block1 - b : 2 * kPairs, t,
           tile1 - t < kTilesAtOnce ? tile1 - t : kTilesAtOnce, own);
  QRUN_TILES_DONE();
}

const ProductTiled product_tiled = amx_product;

#endif

}  // namespace qrun::QRUN_NS
