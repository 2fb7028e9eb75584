// y = x @ w.T for many rows of x by float multiply-adds: where bytes have no dot product of their
// own (AVX2, AVX-512 without VNNI) those of qmv.cpp's digits cost more than they save, and where
// codes are no small whole numbers (fp8) there are none. From small to large (README.md draws it):
//
//   tile    16 rows of x, (k, 16 rows): what meets one k of w is one line
//   panel   up to 128 k of 16 blocks of w, dequantized once, (block group, k, its rows of w): L2
//   grid    some rows of a tile times one or two blocks. Its sums stay in registers for 32 k: a
//           step is one vector of w a block and one number of x a row
//   sums    of up to 16 tiles times those blocks, to which the grids' are added: in L1, and
//           between panels in L2
//
// All in float32. Registers add up 32 k only: in one chain the small steps would meet large sums.
#include "../common/epilogue.h"
#include "../common/join.h"
#include "../common/kernels.h"
#include "../common/lease.h"
#include "../common/prologue.h"
#include "../qmv/fp8.h"

namespace qrun::QRUN_NS {

constexpr int kPanel = 128;  // k; a multiple of every group
constexpr int kSummed = 32;  // k that a register adds up
constexpr int kBlocksAtOnce = 16;
constexpr int kTilesAtOnce = 16;  // tiles of x whose sums wait between panels
constexpr int kWidth = kGridBlocks * kLanes;

struct PanelSpace {
  alignas(64) float panels[kBlocksAtOnce / kGridBlocks][kPanel][kWidth];
  alignas(64) float sums[kTilesAtOnce][kBlocksAtOnce / kGridBlocks][kUnitRows][kWidth];
};

void prepare_panels(const Prologue& p, const Digits& d, int tile0, int tile1) {
  for (int t = tile0; t < tile1; t++) {
    const void* x[kUnitRows];  // null: a spare row
    float rms[kUnitRows];
    for (int r = 0; r < kUnitRows; r++) {
      const size_t row = (size_t)t * kUnitRows + r;
      const bool spare = row >= (size_t)d.m;
      const size_t from = p.from && !spare ? (size_t)p.from[row] : row;
      x[r] = spare ? nullptr : at(p.x, p.type, from * d.k);
      rms[r] = p.norm && !spare ? inverse_rms(p, from, d.k) : 1.0f;
    }
    float* out = (float*)tile_digits(d, t);
    for (int k = 0; k < d.k; k += kLanes, out += kLanes * kUnitRows) {
      f32x16 v[kUnitRows];
      const f32x16 norm = p.norm ? load(at(p.norm, p.norm_type, k), p.norm_type) : splat(1);
      QRUN_UNROLL
      for (int r = 0; r < kUnitRows; r++) {
        v[r] = x[r] ? load(at(x[r], p.type, k), p.type) : splat(0);
        if (p.norm) v[r] = v[r] * splat(rms[r]) * norm;
      }
      transpose(v);
      QRUN_UNROLL
      for (int i = 0; i < kLanes; i++) store(out + i * kUnitRows, v[i]);
    }
  }
}

// Byte I of each lane, scale * that + bias.
template <int I>
static inline void dequantize_byte(i32x16 bytes, f32x16 scale, f32x16 bias, float* to) {
  store(to, to_float(shr<8 * I>(bytes) & splat_i(255)) * scale + bias);
}

// A line of codes, k after k of 16 rows of w, to `to`, a kWidth further for each k.
static inline void dequantize_line(const Matrix& w, i32x16 c, f32x16 scale, f32x16 bias,
                                   float* to) {
  if (w.fp8) {
    store(to, fp8_number<0>(c) * scale);
    store(to + kWidth, fp8_number<1>(c) * scale);
    store(to + 2 * kWidth, fp8_number<2>(c) * scale);
    store(to + 3 * kWidth, fp8_number<3>(c) * scale);
    return;
  }
  if (w.bits == 8) {
    dequantize_byte<0>(c, scale, bias, to);
    dequantize_byte<1>(c, scale, bias, to + kWidth);
    dequantize_byte<2>(c, scale, bias, to + 2 * kWidth);
    dequantize_byte<3>(c, scale, bias, to + 3 * kWidth);
    return;
  }
  const i32x16 mask = splat_i(0x0f0f0f0f);
  i32x16 even = c & mask, odd = shr<4>(c) & mask;
  if (w.fp4) {
    even = lookup(kFp4, even);
    odd = lookup(kFp4, odd);
  }
  dequantize_byte<0>(even, scale, bias, to);
  dequantize_byte<0>(odd, scale, bias, to + kWidth);
  dequantize_byte<1>(even, scale, bias, to + 2 * kWidth);
  dequantize_byte<1>(odd, scale, bias, to + 3 * kWidth);
  dequantize_byte<2>(even, scale, bias, to + 4 * kWidth);
  dequantize_byte<2>(odd, scale, bias, to + 5 * kWidth);
  dequantize_byte<3>(even, scale, bias, to + 6 * kWidth);
  dequantize_byte<3>(odd, scale, bias, to + 7 * kWidth);
}

// k0 .. k0+depth-1 of a block, whole groups -> float32, a kWidth further for each k.
static void dequantize(const Matrix& w, int block, int k0, int depth, float* to) {
  const uint8_t* p = w.data + block * w.block_bytes() + k0 / w.group * w.group_bytes();
  const size_t scales_bytes = kLanes * size_of(w.scales), codes = w.codes_bytes();
  const int step = w.bits == 8 ? 4 : 8;  // k of a line
  for (int k = 0; k < depth; k += w.group) {
    const uint8_t* s = p + codes;
    const f32x16 scale = load(s, w.scales), bias = load(s + scales_bytes, w.scales);
    for (; p < s; p += 64, to += step * kWidth) {
      prefetch(p + 8192);
      dequantize_line(w, load_i(p), scale, bias, to);
    }
    p = s + 2 * scales_bytes;
  }
}

// ROWS rows of x times kGridBlocks blocks of w over `depth` k. x: (depth, 16), w: (depth, kWidth).
template <int ROWS>
static inline void grid(const float* x, const float* w, int depth, bool first, float* sums) {
  for (int k = 0; k < depth; first = false) {
    f32x16 acc[ROWS][kGridBlocks];
    QRUN_UNROLL
    for (int r = 0; r < ROWS; r++) QRUN_UNROLL
    for (int b = 0; b < kGridBlocks; b++) acc[r][b] = splat(0);
    const int end = k + kSummed < depth ? k + kSummed : depth;
#pragma GCC unroll 4
    for (; k < end; k++) {
      f32x16 v[kGridBlocks];
      QRUN_UNROLL
      for (int b = 0; b < kGridBlocks; b++) v[b] = load(w + b * kLanes);
      QRUN_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const f32x16 number = splat(x[r]);
        QRUN_UNROLL
        for (int b = 0; b < kGridBlocks; b++) acc[r][b] = fma(v[b], number, acc[r][b]);
      }
      x += kUnitRows;
      w += kWidth;
    }
    QRUN_UNROLL
    for (int r = 0; r < ROWS; r++) QRUN_UNROLL
    for (int b = 0; b < kGridBlocks; b++) {
      float* to = sums + r * kWidth + b * kLanes;
      store(to, first ? acc[r][b] : acc[r][b] + load(to));
    }
  }
}

// The grids of a tile, one behind the other; those with spare rows alone are left out.
template <int AT = 0>
static inline void grids(const float* x, const float* w, int depth, bool first, int rows,
                         float (*sums)[kWidth]) {
  if constexpr (AT < kUnitRows) {
    constexpr int left = kUnitRows - AT, count = (left + kGridRows - 1) / kGridRows;
    constexpr int ROWS = (left + count - 1) / count;
    if (AT >= rows) return;
    grid<ROWS>(x + AT, w, depth, first, sums[AT]);
    grids<AT + ROWS>(x, w, depth, first, rows, sums);
  }
}

static void run(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int blocks,
                int tile0, int tiles, PanelSpace& s) {
  const int groups = (blocks + kGridBlocks - 1) / kGridBlocks;
  const auto rows = [&](int t) {
    const int left = x.m - (tile0 + t) * kUnitRows;
    return left < kUnitRows ? left : kUnitRows;
  };
  if (blocks < groups * kGridBlocks)  // a block that is not there: not whatever memory held before
    for (int k = 0; k < kPanel; k++) store(s.panels[groups - 1][k] + kWidth - kLanes, splat(0));
  for (int k = 0; k < x.k; k += kPanel) {
    const int depth = x.k - k < kPanel ? x.k - k : kPanel;
    for (int b = 0; b < blocks; b++)
      dequantize(w, block0 + b, k, depth, s.panels[b / kGridBlocks][0] + b % kGridBlocks * kLanes);
    for (int t = 0; t < tiles; t++) {
      const float* of = (const float*)tile_digits(x, tile0 + t) + (size_t)k * kUnitRows;
      for (int g = 0; g < groups; g++)
        grids(of, s.panels[g][0], depth, k == 0, rows(t), s.sums[t][g]);
    }
  }
  for (int t = 0; t < tiles; t++)
    for (int r = 0; r < rows(t); r++) {
      const size_t row = (size_t)(tile0 + t) * kUnitRows + r;
      const auto sum = [&](int b) {
        return load(s.sums[t][b / kGridBlocks][r] + b % kGridBlocks * kLanes);
      };
      for (int b = 0; b < blocks; b += 2)
        if (b + 1 < blocks)
          finish_two(e, w.n, block0 + b, row, sum(b), sum(b + 1));
        else
          finish(e, w.n, block0 + b, row, sum(b));
    }
}

void product_panels(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                    int tile0, int tile1) {
  const Lease lease(sizeof(PanelSpace));
  PanelSpace& own = *reinterpret_cast<PanelSpace*>(lease.data());
  for (int t = tile0; t < tile1; t += kTilesAtOnce)
    for (int b = block0; b < block1; b += kBlocksAtOnce)
      run(w, x, e, b, block1 - b < kBlocksAtOnce ? block1 - b : kBlocksAtOnce, t,
          tile1 - t < kTilesAtOnce ? tile1 - t : kTilesAtOnce, own);
}

}  // namespace qrun::QRUN_NS
