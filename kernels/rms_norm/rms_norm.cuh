// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight over rows of K. A block takes a row.
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"

namespace qrun {

// x, y (M, K), weight (K,); VEC divides K. Grid: M blocks.
template <int VEC, typename T, typename G>
__device__ __forceinline__ void rms_norm(const T* x, const G* weight, T* y, float eps, int k) {
  start_next_kernel();
  wait_for_previous_kernel();
  x += static_cast<long long>(blockIdx.x) * k;
  y += static_cast<long long>(blockIdx.x) * k;
  float sum = 0;
  for (int i = threadIdx.x * VEC; i < k; i += blockDim.x * VEC) {
    float v[VEC];
    load(v, x + i);
#pragma unroll
    for (int e = 0; e < VEC; e++) sum += v[e] * v[e];
  }
  const float scale = rsqrtf(block_sum(sum) / k + eps);
  for (int i = threadIdx.x * VEC; i < k; i += blockDim.x * VEC) {
    float v[VEC], g[VEC];
    load(v, x + i);
    load(g, weight + i);
#pragma unroll
    for (int e = 0; e < VEC; e++) v[e] *= scale * g[e];
    store(y + i, v);
  }
}

}  // namespace qrun
