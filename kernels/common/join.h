// What the products of all kinds share: fp4 codes as whole numbers, sums of digits as a float.
#pragma once
#include "vec.h"

namespace qrun::QRUN_NS {

// e2m1, times two, plus twelve: 0 .5 1 1.5 2 3 4 6 and their negatives
alignas(16) static const uint8_t kFp4[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                             12, 11, 10, 9,  8,  6,  4,  0};

// The digits' sums, put together as one float32 each: at most 2^26 (4 bits) before rounding.
template <int D>
static inline f32x16 join(const i32x16* s) {
  if constexpr (D == 1) return to_float(s[0]);
  if constexpr (D == 2) return to_float(shl<8>(s[0]) + s[1]);
  return fma(to_float(s[0]), splat(65536), to_float(shl<8>(s[1]) + s[2]));
}

}  // namespace qrun::QRUN_NS
