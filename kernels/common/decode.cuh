// 4-bit codes -> 16-bit weights as tensor-core operands: scale * q + bias, rounded once. Of a word with codes
// n0 .. n7, low() makes (n0, n4), or (n2, n6) of the word shifted by 8 bits, and high() (n1, n5) or (n3, n7).
#pragma once

#include "ptx.cuh"

namespace qrun {

template <typename T>
struct Decode;

// A nibble in place is the subnormal q * 2^-133 (16 times that at bits 4-7). The result is w * 2^-64, so
// that the scale's factor stays in range; x carries 2^64.
template <>
struct Decode<bf16> {
  unsigned even, odd, bias;  // two equal halves each

  __device__ __forceinline__ void set(bf16 scale, bf16 b) {
    constexpr unsigned two_69 = 0x62006200u, two_65 = 0x60006000u, two_m64 = 0x1f801f80u, none = 0x80008000u;
    even = fma_pair(twice(scale), two_69, none, bf16());
    odd = fma_pair(twice(scale), two_65, none, bf16());
    bias = fma_pair(twice(b), two_m64, none, bf16());
  }
  __device__ __forceinline__ unsigned low(unsigned w) const { return fma_pair(w & 0x000f000fu, even, bias, bf16()); }
  __device__ __forceinline__ unsigned high(unsigned w) const { return fma_pair(w & 0x00f000f0u, odd, bias, bf16()); }
};

// 1024 + q is a number whose lowest bits are q; 1024 is taken off exactly.
template <>
struct Decode<f16> {
  unsigned scale, bias;

  __device__ __forceinline__ void set(f16 s, f16 b) { scale = twice(s), bias = twice(b); }
  __device__ __forceinline__ unsigned low(unsigned w) const {
    const unsigned q = fma_pair((w & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe400e400u, f16());
    return fma_pair(q, scale, bias, f16());
  }
  __device__ __forceinline__ unsigned high(unsigned w) const {  // 1024 + 16 q
    const unsigned q = fma_pair((w & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd400d400u, f16());
    return fma_pair(q, scale, bias, f16());
  }
};

}  // namespace qrun
