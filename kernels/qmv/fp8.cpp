// y = x @ w.T where w's codes are e4m3 numbers (mxfp8). Their products are no small whole numbers,
// so x stays float32 and the march of qmv.cpp is done in floats:
//
//   lane    one row of w, four codes a dword
//   code    a float32 after two shifts, a mask and a multiply (fp8.h)
//   group   sum of code * x over 32 k, one sum for each byte of the dword; then acc += scale * sum
//
// Segments, tiles and the end of a row are qmv.cpp's. The order of additions depends on k alone.
#include "fp8.h"

#include "../common/epilogue.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

constexpr int kAhead = 8192;
constexpr int kBytes = 4;  // codes of a dword

template <int MT>
static void tile(const Matrix& w, const Digits& digits, const Epilogue& e, int block, int t) {
  const uint8_t* p = w.data + block * w.block_bytes();
  const float* x = (const float*)tile_digits(digits, t);
  const int groups = w.k / w.group, lines = w.group / kBytes;
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
    f32x16 s[MT][kBytes];
    QRUN_UNROLL
    for (int m = 0; m < MT; m++) QRUN_UNROLL
    for (int i = 0; i < kBytes; i++) s[m][i] = splat(0);
    for (int c = 0; c < lines; c++, p += 64) {
      prefetch(p + kAhead);
      const i32x16 codes = load_i(p);
      const f32x16 q[kBytes] = {fp8_number<0>(codes), fp8_number<1>(codes), fp8_number<2>(codes),
                                fp8_number<3>(codes)};
      const float* at = x + c % (kChunk / kBytes) * kBytes;
      QRUN_UNROLL
      for (int m = 0; m < MT; m++) QRUN_UNROLL
      for (int i = 0; i < kBytes; i++) s[m][i] = fma(q[i], splat(at[m * kChunk + i]), s[m][i]);
      if (c % (kChunk / kBytes) == kChunk / kBytes - 1) x += MT * kChunk;
    }
    const f32x16 scale = load(p, w.scales);
    p += 2 * kLanes * size_of(w.scales);
    QRUN_UNROLL
    for (int m = 0; m < MT; m++)
      acc[m] = fma(scale, (s[m][0] + s[m][1]) + (s[m][2] + s[m][3]), acc[m]);
  }
  QRUN_UNROLL
  for (int m = 0; m < MT; m++) {
    const int row = t * digits.tile + m;
    if (row < digits.m) finish(e, w.n, block, row, total[m] + acc[m]);
  }
}

void product_fp8(const Matrix& w, const Digits& x, const Epilogue& e, int block0, int block1,
                 int tile0, int tile1) {
  for (int b = block0; b < block1; b++)
    for (int t = tile0; t < tile1; t++) {
      const int rows = rows_in_tile(x, t);
      (rows == 1 ? tile<1> : rows == 2 ? tile<2> : tile<4>)(w, x, e, b, t);
    }
}

}  // namespace qrun::QRUN_NS
