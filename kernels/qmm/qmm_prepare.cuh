// What the qmm kernels want of x: normed if there is a norm in front, rounded to T, its columns permuted
// to the order in which nibbles become operands, and summed over units of U = min(GROUP, 64) columns (the
// sums multiply the biases).
//
// In each run of 32 columns, lane t of a quad holds one word of w, columns 8t .. 8t+7, and mma h = 0, 1
// takes of it, in this order of k:
//
//   place 16h + 2t + (0, 1, 8, 9)  <-  column 8t + 2h + (0, 4, 1, 5)
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

// x (M, K), weight (K,) or null -> out (M, PK), sums (PK / U, PM) / UNDO. K is a multiple of 32, PK of 64:
// zeros behind K. Grid: M blocks; whole warps.
template <int U, typename T, typename G>
__device__ __forceinline__ void qmm_prepare(const T* x, const G* weight, float eps, T* out, float* sums,
                                            int k, int pk, int pm) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int m = blockIdx.x;
  x += static_cast<long long>(m) * k;
  float rms = 1;
  if (weight) {
    float sum = 0;
    for (int u = threadIdx.x; u < k / 8; u += blockDim.x) {
      float v[8];
      load(v, x + u * 8);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    }
    rms = rsqrtf(block_sum(sum) / k + eps);
  }
  unsigned* words = reinterpret_cast<unsigned*>(out + static_cast<long long>(m) * pk);
  const int all = (pk / 8 + 31) / 32 * 32;  // whole warps go round: their lanes exchange sums
  for (int u = threadIdx.x; u < all; u += blockDim.x) {
    float v[8] = {}, sum = 0;
    if (u < k / 8) load(v, x + u * 8);
    if (weight && u < k / 8) {
      float g[8];
      load(g, weight + u * 8);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = to_float(from_float<T>(v[i] * rms * g[i]));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[i], v[i] *= Subnormal<T>::X;
    sum = warp_sum<U / 8>(sum);
    if (u >= pk / 8) continue;
    unsigned* to = words + u / 4 * 16 + u % 4;  // words of two columns
#pragma unroll
    for (int h = 0; h < 2; h++) {
      to[h * 8] = pack<T>(v[2 * h], v[2 * h + 4]);
      to[h * 8 + 4] = pack<T>(v[2 * h + 1], v[2 * h + 5]);
    }
    if (u % (U / 8) == 0)
      sums[static_cast<long long>(u / (U / 8)) * pm + m] = sum * (1 / Subnormal<T>::UNDO);
  }
}

}  // namespace qrun
