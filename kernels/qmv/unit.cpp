// qmv.cpp's product for a few rows of x on a matrix unit (AMX): the same digits, the same
// whole-number sums, the same float32 steps in the same order, hence the same bits. Vectors need a
// dot product for every digit of every row of x; the unit takes all of them at once.
//
//   lines    digits of x, (rows, digits), up to 64 k each, as they lie together: one operand or two
//   codes    as bytes, (k/4, 16 lanes, 4): 4-bit ones unpacked by vectors into L1, in turn even and
//            odd k, the order of the digits; 8-bit ones are an operand as they lie in memory
//   dot      (line, k) x (k, lane) -> (line, lane): the sums of each digit of each row
//   round    a group of two blocks, which share the lines. Codes are unpacked two rounds before
//            their dots and sums are added up a round after them, so that nothing waits for the
//            100 cycles from a code to its sum.
#include "../common/amx.h"
#include "../common/epilogue.h"
#include "../common/join.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

#ifndef __AMX_INT8__

const ProductTiled product_few = nullptr;

#else

constexpr int kAhead = 8192, kNear = 4096;  // bytes, as in qmv.cpp
constexpr int kEarly = 2;                   // rounds from codes to their dots
constexpr int kSlots = 4;                   // of unpacked codes, a power of two above kEarly
constexpr int kMostGroup = 128;

// Groups in order: those of a block (of NB blocks side by side, of the first), then of the next.
struct Cursor {
  const uint8_t* p;
  size_t group_bytes, skip;
  int groups, left;

  void next() {
    p += group_bytes;
    if (--left > 0) return;
    left = groups;
    p += skip;
  }
  Cursor after(size_t count) const {
    Cursor c = *this;
    while (count-- > 0) c.next();
    return c;
  }
};

static inline void unpack(const uint8_t* p, int lines, uint8_t* to) {
  const i32x16 mask = splat_i(0x0f0f0f0f);
  for (int i = 0; i < lines; i++, p += 64, to += 128) {
    const i32x16 codes = load_i(p);
    store_i(to, codes & mask);
    store_i(to + 64, high_halves(codes));
  }
}

// MT rows of x against blocks block0 .. block1-1, NB at a time.
template <int BITS, int D, int MT, int NB>
static void march(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                  int t) {
  constexpr int operands = MT * D > kUnitRows ? 2 : 1, lines = MT * D / operands;
  alignas(64) uint8_t codes[kSlots][NB][BITS == 4 ? kMostGroup * kLanes : 1];
  alignas(64) int32_t sums[2][NB][MT * D][kLanes];
  const int groups = w.k / w.group, chunk = x.chunk, segment = kSegment / w.group;
  const int code_lines = (int)(w.codes_bytes() / 64);
  const size_t block_bytes = w.block_bytes(), group_bytes = w.group_bytes();
  const size_t codes_bytes = w.codes_bytes(), scales_bytes = kLanes * size_of(w.scales);

  Cursor now{w.data + block0 * block_bytes, group_bytes, (NB - 1) * block_bytes, groups, groups};
  Cursor coming = now, near = now.after(kEarly + kNear / group_bytes),
         far = now.after(kEarly + kAhead / group_bytes);
  int to_come = (block1 - block0) / NB * groups;
  const auto bring = [&](int slot) {
    if (to_come-- <= 0) return;
    for (int b = 0; b < NB; b++) {
      for (size_t i = b * block_bytes; i < b * block_bytes + group_bytes; i += 64) {
        prefetch(far.p + i);
        prefetch_near(near.p + i);
      }
      if constexpr (BITS == 4) unpack(coming.p + b * block_bytes, code_lines, codes[slot][b]);
    }
    coming.next();
    near.next();
    far.next();
  };
  for (int i = 0; i < kEarly; i++) bring(i);

  int round = 0;
  for (int block = block0; block < block1; block += NB) {
    f32x16 acc[NB][MT], total[NB][MT];
    QRUN_UNROLL
    for (int b = 0; b < NB; b++) QRUN_UNROLL
    for (int m = 0; m < MT; m++) acc[b][m] = total[b][m] = splat(0);
    const float* meta = tile_meta(x, t);
    const int8_t* digits = tile_digits(x, t);
    const uint8_t* factors = now.p + codes_bytes;

    for (int g = 0, next = segment; g <= groups; g++) {
      if (g < groups) {
        bring((round + kEarly) % kSlots);
        const int slot = round++ % kSlots;
        const uint8_t* c0 = BITS == 4 ? codes[slot][0] : now.p;
        const uint8_t* c1 = BITS == 4 ? codes[slot][NB - 1] : now.p + block_bytes;
        QRUN_TILE_ZERO(0);
        if constexpr (operands == 2) QRUN_TILE_ZERO(1);
        if constexpr (NB == 2) QRUN_TILE_ZERO(2);
        if constexpr (NB == 2 && operands == 2) QRUN_TILE_ZERO(3);
        for (int k = 0; k < w.group; k += chunk, digits += MT * D * chunk) {
          QRUN_TILE_LOAD(4, c0 + k * kLanes);
          QRUN_LINES_LOAD(5, digits, chunk);
          QRUN_TILE_DOT_BYTES(0, 5, 4);
          if constexpr (operands == 2) {
            QRUN_LINES_LOAD(6, digits + lines * chunk, chunk);
            QRUN_TILE_DOT_BYTES(1, 6, 4);
          }
          if constexpr (NB == 2) {
            QRUN_TILE_LOAD(7, c1 + k * kLanes);
            QRUN_TILE_DOT_BYTES(2, 5, 7);
          }
          if constexpr (NB == 2 && operands == 2) QRUN_TILE_DOT_BYTES(3, 6, 7);
        }
        QRUN_TILE_STORE(0, sums[g % 2][0][0]);
        if constexpr (operands == 2) QRUN_TILE_STORE(1, sums[g % 2][0][lines]);
        if constexpr (NB == 2) QRUN_TILE_STORE(2, sums[g % 2][1][0]);
        if constexpr (NB == 2 && operands == 2) QRUN_TILE_STORE(3, sums[g % 2][1][lines]);
        now.next();
      }
      if (g == 0) continue;  // the sums of group g-1, as in qmv.cpp
      if (g - 1 == next) {
        next += segment;
        QRUN_UNROLL
        for (int b = 0; b < NB; b++) QRUN_UNROLL
        for (int m = 0; m < MT; m++) {
          total[b][m] = total[b][m] + acc[b][m];
          acc[b][m] = splat(0);
        }
      }
      QRUN_UNROLL
      for (int b = 0; b < NB; b++) {
        const uint8_t* f = factors + b * block_bytes;
        const f32x16 scale = load(f, w.scales), bias = load(f + scales_bytes, w.scales);
        QRUN_UNROLL
        for (int m = 0; m < MT; m++) {
          i32x16 digit[D];
          QRUN_UNROLL
          for (int d = 0; d < D; d++) digit[d] = load_i(sums[(g - 1) % 2][b][m * D + d]);
          acc[b][m] = fma(scale, join<D>(digit) * splat(meta[m]), acc[b][m]);
          acc[b][m] = fma(bias, splat(meta[MT + m]), acc[b][m]);
        }
      }
      factors += group_bytes;
      meta += 2 * MT;
    }
    QRUN_UNROLL
    for (int b = 0; b < NB; b++) QRUN_UNROLL
    for (int m = 0; m < MT; m++) {
      const int row = t * x.tile + m;
      if (row < x.m) finish(e, w.n, block + b, row, total[b][m] + acc[b][m]);
    }
  }
}

template <int BITS, int D, int MT>
static void rows(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                 int t) {
  configure_tiles(MT * D > kUnitRows ? MT * D / 2 : MT * D, x.chunk);
  const int even = block0 + (block1 - block0) / 2 * 2;
  if (block0 < even) march<BITS, D, MT, 2>(w, x, e, block0, even, t);
  if (even < block1) march<BITS, D, MT, 1>(w, x, e, even, block1, t);
}

using Rows = void (*)(const Matrix&, const Digits&, const Epilogue&, int, int, int);

template <int BITS, int D>
static Rows pick_rows(int count) {
  return count == 4 ? rows<BITS, D, 4> : count == 6 ? rows<BITS, D, 6> : rows<BITS, D, 8>;
}

template <int BITS>
static Rows pick(int digits, int count) {
  return digits == 1   ? pick_rows<BITS, 1>(count)
         : digits == 2 ? pick_rows<BITS, 2>(count)
                       : pick_rows<BITS, 3>(count);
}

static void amx_few(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                    int tile0, int tile1) {
  for (int t = tile0; t < tile1; t++) {
    const int count = rows_in_tile(x, t);
    (w.bits == 8 ? pick<8> : pick<4>)(x.count, count)(w, x, e, block0, block1, t);
  }
  QRUN_TILES_DONE();
}

const ProductTiled product_few = amx_few;

#endif

}  // namespace qrun::QRUN_NS
