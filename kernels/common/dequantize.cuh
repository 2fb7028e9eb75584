// What the packed numbers stand for, in float32; any width of code. Each row of w is one little-endian
// bit stream, so code k takes bits k*BITS .. k*BITS+BITS-1. The 4-bit kernels that feed tensor cores
// have ways of their own; this is everybody else's.
#pragma once

#include "types.cuh"

namespace qrun {

// Codes 8u .. 8u+7 of a row, code i at bits i*BITS of the result. They lie in one word or two, and the
// second is read only if they reach into it.
template <int BITS>
__device__ __forceinline__ unsigned long long eight_codes(const unsigned* row, int u) {
  const int at = u * 8 * BITS, word = at / 32, shift = at % 32;
  unsigned long long v = row[word];
  if (shift + 8 * BITS > 32) v |= static_cast<unsigned long long>(row[word + 1]) << 32;
  return v >> shift;
}

// OCP e4m3: sign, 4 exponent bits (bias 7), 3 of mantissa, no infinity.
__device__ __forceinline__ float e4m3(unsigned code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  float v = exponent ? ldexpf(static_cast<float>(8 + mantissa), exponent - 10)
                     : ldexpf(static_cast<float>(mantissa), -9);
  if ((code & 127) == 127) v = __int_as_float(0x7fc00000);
  return code & 128 ? -v : v;
}

// OCP e2m1: 0 0.5 1 1.5 2 3 4 6, and their negatives.
__device__ __forceinline__ float e2m1(unsigned code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const float v = exponent ? (2 + mantissa) * 0.5f * (1 << (exponent - 1)) : 0.5f * mantissa;
  return code & 8 ? -v : v;
}

// OCP e8m0: 2^(code - 127).
__device__ __forceinline__ float e8m0(unsigned code) {
  return code == 255 ? __int_as_float(0x7fc00000) : ldexpf(1.0f, static_cast<int>(code) - 127);
}

// value = scale * q + bias, one of each a group of GROUP codes.
template <typename S, int BITS, int GROUP>
struct Affine {
  const unsigned* w;  // (N, K * BITS / 32)
  const S* scales;    // (N, K / GROUP)
  const S* biases;    // (N, K / GROUP)
  int k;

  __device__ __forceinline__ void eight(float (&v)[8], long long row, int u) const {
    const unsigned long long codes = eight_codes<BITS>(w + row * (k * BITS / 32), u);
    const long long group = row * (k / GROUP) + u * 8 / GROUP;
    const float scale = to_float(scales[group]), bias = to_float(biases[group]);
#pragma unroll
    for (int i = 0; i < 8; i++)
      v[i] = fmaf(scale, static_cast<float>(codes >> i * BITS & ((1u << BITS) - 1)), bias);
  }
};

enum Micro { MXFP4, NVFP4, MXFP8 };

// Small floats with an 8-bit scale a group.
template <int MODE>
struct MicroScaled {
  static constexpr int BITS = MODE == MXFP8 ? 8 : 4, GROUP = MODE == NVFP4 ? 16 : 32;
  const unsigned* w;            // (N, K * BITS / 32)
  const unsigned char* scales;  // (N, K / GROUP)
  int k;

  __device__ __forceinline__ void eight(float (&v)[8], long long row, int u) const {
    const unsigned long long codes = eight_codes<BITS>(w + row * (k * BITS / 32), u);
    const unsigned code = scales[row * (k / GROUP) + u * 8 / GROUP];
    const float scale = MODE == NVFP4 ? e4m3(code) : e8m0(code);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const unsigned q = codes >> i * BITS & ((1u << BITS) - 1);
      v[i] = scale * (MODE == MXFP8 ? e4m3(q) : e2m1(q));
    }
  }
};

// Numbers that are not quantized at all.
template <typename W>
struct Dense {
  const W* w;  // (N, K)
  int k;

  __device__ __forceinline__ void eight(float (&v)[8], long long row, int u) const {
    load(v, w + row * k + u * 8);
  }
};

}  // namespace qrun
