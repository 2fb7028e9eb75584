// 4-bit codes as tensor-core operands without a conversion: a nibble masked where it lies is a 16-bit
// subnormal, q * 2^-133 in bf16 and q * 2^-24 in fp16 (16 times that, if it lies at bits 4-7), and
// tensor cores multiply subnormals exactly. x in bf16 is multiplied by 2^64 so that no product falls
// below float32's range (|x| < 2^63 does not overflow). All factors are powers of two, hence exact.
#pragma once

#include "types.cuh"

namespace qrun {

template <typename T>
struct Subnormal;
template <>
struct Subnormal<bf16> {
  static constexpr float X = 0x1p64f, UNDO = 0x1p69f;  // 2^-133 * 2^64 * 2^69 = 1
};
template <>
struct Subnormal<f16> {
  static constexpr float X = 1.0f, UNDO = 0x1p24f;
};

}  // namespace qrun
