// y = x @ w.T for a few rows of x: w is read once, as one sequential stream, and never unpacked
// into memory. From small to large (drawing in README.md, what lost in WORKLOG.md):
//
//   lane    one row of w. A dword holds eight 4-bit codes of that row (or four 8-bit codes).
//   dot     codes are bytes after one AND (and one shift for the high halves); the byte dot product
//           takes four codes of every lane and the same four digits of x, and adds to 32 bits.
//   group   whole-number sums of each digit of each row of x: exact. Then one step in float32:
//             acc += scale * (x_scale * sum) + bias * x_sum
//   segment 512 k: acc starts anew, so that small steps are not added to a large sum
//   row     the segments of 16 rows of w, added up; finish() writes 16 results.
//   tile    MT rows of x share every load and unpacking of w; MT*D whole-number and MT float
//           accumulators stay in registers for the whole march.
//
// The order of additions depends on nothing but k: any M, tile or thread count gives the same bits.
#include "../common/epilogue.h"
#include "../common/join.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

// Bytes: from memory into L2, and on into L1. 1 KB ahead from memory is worse than none. Without a
// byte dot product instructions are what is short: there one prefetch a line, all the way.
constexpr int kAhead = 8192, kNear = 4096;
static inline void ask_for(const uint8_t* p) {
  if constexpr (kFastDots) prefetch(p + kAhead);
  prefetch_near(p + kNear);
}

#ifdef QRUN_PAIR_SUMS
// s += the dot products of LINES lines of 4-bit codes with MT*D runs of digits, where a byte dot
// product is three instructions: multiply bytes to sums of two in 16 bits, sum pairs of those to
// 32, add. Eight products of codes up to 15 fit into 16 bits (8 * 2 * 15 * 128 = 30720), five of
// codes up to 24: the first two add up there, and the step to 32 bits comes once for all of them.
// So the codes of the lines stay in registers and the sums pass by, one after the other.
template <bool FP4, int LINES, int D, int MT, int CHUNK, int PART = 0>
static inline void dot_lines(i32x16 (&s)[MT][D], const uint8_t* p, const int8_t* x) {
  constexpr int most = FP4 ? 4 : 8;
  static_assert(LINES * 2 <= most || LINES * 2 % most == 0);
  const i32x16 mask = splat_i(0x0f0f0f0f);
  PairSums codes[LINES * 2];
  QRUN_UNROLL
  for (int i = 0; i < LINES; i++) {
    const i32x16 line = load_i(p + i * 64);
    i32x16 even = line & mask, odd = shr<4>(line) & mask;
    if constexpr (FP4) {
      even = lookup(kFp4, even);
      odd = lookup(kFp4, odd);
    }
    codes[2 * i] = part_of<PART>(even);
    codes[2 * i + 1] = part_of<PART>(odd);
  }
  QRUN_UNROLL
  for (int m = 0; m < MT; m++) QRUN_UNROLL
  for (int d = 0; d < D; d++) {
    const int8_t* digits = x + (m * D + d) * CHUNK;
    QRUN_UNROLL
    for (int i = 0; i < LINES * 2; i += most) {
      PairSums sum = pairs(codes[i], digits + i * 4);
      QRUN_UNROLL
      for (int j = i + 1; j < i + most && j < LINES * 2; j++)
        sum = sum + pairs(codes[j], digits + j * 4);
      add_pairs<PART>(s[m][d], sum);
    }
  }
  if constexpr (PART + 1 < kPairParts) dot_lines<FP4, LINES, D, MT, CHUNK, PART + 1>(s, p, x);
}
#endif

template <int BITS, bool FP4, int CHUNK, int D, int MT>
static void tile(const Matrix& w, const Digits& digits, const Epilogue& e, int block, int t) {
  const uint8_t* p = w.data + block * w.block_bytes();
  const int8_t* x = tile_digits(digits, t);
  const float* meta = tile_meta(digits, t);
  const int groups = w.k / w.group, chunks = w.group / CHUNK;
  const size_t scales_bytes = kLanes * size_of(w.scales);
  // A dot product takes 5 cycles and two start in each: few sums need twice the chains.
  constexpr int LINES = BITS * CHUNK / 32;  // dwords of a lane in a chunk
#ifdef QRUN_PAIR_SUMS
  constexpr bool pair_sums = BITS == 4;
#else
  constexpr bool pair_sums = false;
#endif
  constexpr bool two_chains = BITS == 4 && MT * D <= 6 && !pair_sums;
  f32x16 acc[MT], total[MT];
  QRUN_UNROLL
  for (int m = 0; m < MT; m++) acc[m] = total[m] = splat(0);

  for (int g = 0, next = kSegment / w.group; g < groups; g++) {
    if (g == next) {
      next += kSegment / w.group;
      QRUN_UNROLL
      for (int m = 0; m < MT; m++) {
        total[m] = total[m] + acc[m];
        acc[m] = splat(0);
      }
    }
    i32x16 s[MT][D], s2[MT][D];
    auto& odd_sums = two_chains ? s2 : s;
    QRUN_UNROLL
    for (int m = 0; m < MT; m++) QRUN_UNROLL
    for (int d = 0; d < D; d++) s[m][d] = s2[m][d] = splat_i(0);

    for (int c = 0; c < chunks; c++) {
      QRUN_UNROLL
      for (int i = 0; i < LINES; i++) {
        ask_for(p + i * 64);
        if constexpr (pair_sums) continue;
        i32x16 codes = load_i(p + i * 64);
        if constexpr (BITS == 8) {
          QRUN_UNROLL
          for (int m = 0; m < MT; m++) QRUN_UNROLL
          for (int d = 0; d < D; d++)
            s[m][d] = dot_byte(s[m][d], codes, x + (m * D + d) * CHUNK + i * 4);
        } else {
          const i32x16 mask = splat_i(0x0f0f0f0f);
          i32x16 even = codes & mask, odd = shr<4>(codes) & mask;
          if constexpr (FP4) {
            even = lookup(kFp4, even);
            odd = lookup(kFp4, odd);
          }
          QRUN_UNROLL
          for (int m = 0; m < MT; m++) QRUN_UNROLL
          for (int d = 0; d < D; d++)
            s[m][d] = dot_small(s[m][d], even, x + (m * D + d) * CHUNK + i * 8);
          QRUN_UNROLL
          for (int m = 0; m < MT; m++) QRUN_UNROLL
          for (int d = 0; d < D; d++)
            odd_sums[m][d] = dot_small(odd_sums[m][d], odd, x + (m * D + d) * CHUNK + i * 8 + 4);
        }
      }
#ifdef QRUN_PAIR_SUMS
      if constexpr (pair_sums) dot_lines<FP4, LINES, D, MT, CHUNK>(s, p, x);
#endif
      p += LINES * 64;
      x += MT * D * CHUNK;
    }
    ask_for(p);
    f32x16 scale = load(p, w.scales), bias = load(p + scales_bytes, w.scales);
    p += 2 * scales_bytes;
    QRUN_UNROLL
    for (int m = 0; m < MT; m++) {
      if constexpr (two_chains) QRUN_UNROLL
      for (int d = 0; d < D; d++) s[m][d] = s[m][d] + s2[m][d];
      acc[m] = fma(scale, join<D>(s[m]) * splat(meta[m]), acc[m]);
      acc[m] = fma(bias, splat(meta[MT + m]), acc[m]);
    }
    meta += 2 * MT;
  }
  QRUN_UNROLL
  for (int m = 0; m < MT; m++) {
    const int row = t * digits.tile + m;
    if (row < digits.m) finish(e, w.n, block, row, total[m] + acc[m]);
  }
}

using Tile = void (*)(const Matrix&, const Digits&, const Epilogue&, int, int);

template <int BITS, bool FP4, int CHUNK, int D>
static Tile pick_rows(int rows) {
  constexpr int most = kMaxTile[D];
  if (rows == 1) return tile<BITS, FP4, CHUNK, D, 1>;
  if constexpr (most >= 2)
    if (rows == 2) return tile<BITS, FP4, CHUNK, D, 2>;
  if constexpr (most >= 4)
    if (rows == 4) return tile<BITS, FP4, CHUNK, D, 4>;
  if constexpr (most >= 6)
    if (rows == 6) return tile<BITS, FP4, CHUNK, D, 6>;
  if constexpr (most >= 8)
    if (rows == 8) return tile<BITS, FP4, CHUNK, D, 8>;
  __builtin_trap();  // tile_height() knows no other
}

template <int BITS, bool FP4, int CHUNK = kChunk>
static Tile pick(int count, int rows) {
  return count == 1   ? pick_rows<BITS, FP4, CHUNK, 1>(rows)
         : count == 2 ? pick_rows<BITS, FP4, CHUNK, 2>(rows)
                      : pick_rows<BITS, FP4, CHUNK, 3>(rows);
}

void product(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1, int tile0,
             int tile1) {
  if (tile0 >= tile1) return;
  if (w.fp8) return product_fp8(w, x, e, block0, block1, tile0, tile1);
  auto choose = [&](int t) {
    const int rows = rows_in_tile(x, t);
    return w.bits == 8     ? pick<8, false>(x.count, rows)
           : !w.fp4        ? pick<4, false>(x.count, rows)
           : w.group == 16 ? pick<4, true, 16>(x.count, rows)
                           : pick<4, true>(x.count, rows);
  };
  const Tile full = choose(tile0), last = choose(tile1 - 1);
  for (int b = block0; b < block1; b++) {
    for (int t = tile0; t < tile1 - 1; t++) full(w, x, e, b, t);
    last(w, x, e, b, tile1 - 1);
  }
}

}  // namespace qrun::QRUN_NS
