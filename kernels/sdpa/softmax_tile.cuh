// What a tile of scores goes through on its way to the values, for a prompt's attention on tensor cores: a lane
// has rows g and g+8 of its warp's 16, columns 2t and 2t+1 of each eight.
#pragma once

#include "../common/ptx.cuh"

namespace qrun {

// The score of a key that is not seen.
__device__ __forceinline__ float nothing() { return __int_as_float(0xff800000); }

// Takes out what a query may not see. first: the tile's first key; place: the position of row g.
template <int COUNT>
__device__ __forceinline__ void hide(float (&scores)[COUNT][4], int first, int place, int window) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < COUNT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = first + n * 8 + 2 * t + i % 2, at = place + i / 2 * 8;
      if (key > at || (window && key <= at - window)) scores[n][i] = nothing();
    }
}

// The running maxima and sums of the lane's two rows.
template <typename T>
struct SoftmaxRows {
  float scale, softcap;
  bool curved = softcap != 0 || scale <= 0;  // else the scale is a factor of the exponents
  float unit = (curved ? 1 : scale) * 1.4426950408889634f;  // of a score in the exponent of 2
  float highest[2] = {nothing(), nothing()}, sum[2] = {0, 0};

  template <int COUNT>
  __device__ __forceinline__ void cap(float (&scores)[COUNT][4]) const {
    if (!curved) return;
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[n][i] *= scale;
        if (softcap != 0) scores[n][i] = softcap * tanhf(scores[n][i] / softcap);
      }
  }

  // 2^(unit * (scores - highest)) -> p as operand a; factor: what the values so far are to be multiplied by.
  template <int COUNT>
  __device__ __forceinline__ void weigh(unsigned (&p)[COUNT / 2][4], const float (&scores)[COUNT][4],
                                        float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = highest[i];
#pragma unroll
      for (int n = 0; n < COUNT; n++) top = fmaxf(top, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float zero = top == nothing() ? 0.0f : top;  // a row that has seen no key yet
      const float below = -zero * unit;
      factor[i] = exp2_approx((highest[i] - zero) * unit);
      highest[i] = top;
      sum[i] *= factor[i];
#pragma unroll
      for (int n = 0; n < COUNT; n++) {
        const float a = exp2_approx(scores[n][2 * i] * unit + below);
        const float b = exp2_approx(scores[n][2 * i + 1] * unit + below);
        sum[i] += a + b;
        p[n / 2][n % 2 * 2 + i] = pack<T>(a, b);
      }
    }
  }

  // Of a row, over the lanes that share it.
  __device__ __forceinline__ float total(int i) const {
    const float two = sum[i] + __shfl_xor_sync(0xffffffffu, sum[i], 1);
    return two + __shfl_xor_sync(0xffffffffu, two, 2);
  }
};

}  // namespace qrun
