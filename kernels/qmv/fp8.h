// e4m3 codes as float32: s eeee mmm, moved to the places of a float32's sign, lowest exponent bits
// and highest mantissa bits, is the number times 2^-120, subnormal codes included.
#pragma once
#include "../common/vec.h"

namespace qrun::QRUN_NS {

// Byte I of each lane as a number. The NaN codes are not seen here: pack.cpp makes scales of them.
template <int I>
static inline f32x16 fp8_number(i32x16 codes) {
  i32x16 top = codes;
  if constexpr (I < 3) top = shl<24 - 8 * I>(codes);
  return float_of(sra<4>(top) & splat_i((int)0x87f00000)) * splat(0x1p120f);
}

}  // namespace qrun::QRUN_NS
