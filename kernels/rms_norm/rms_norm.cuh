// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight + residual over rows of K, or over a part of each row.
// A block takes a row's part. Centered: of x - mean(x).
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"

namespace qrun {

// Columns begin .. end-1 of x, residual (or null) and y (M, K), with weight (end - begin,); without one they
// stay as they are. VEC divides begin, end and K. Grid: x over M.
template <int VEC, bool CENTERED, typename T, typename G>
__device__ __forceinline__ void rms_norm(const T* x, const G* weight, const T* residual, T* y, float eps,
                                         int k, int begin, int end) {
  start_next_kernel();
  wait_for_previous_kernel();
  const long long row = static_cast<long long>(blockIdx.x) * k;
  float mean = 0, scale = 1;
  // Sums of x less its first number: a large mean would take the digits of what lies around it.
  const float first = CENTERED ? to_float(x[row + begin]) : 0.0f;
  if (CENTERED) {
    float sum = 0;
    for (int i = begin + threadIdx.x * VEC; i < end; i += blockDim.x * VEC) {
      float v[VEC];
      load(v, x + row + i);
#pragma unroll
      for (int e = 0; e < VEC; e++) sum += v[e] - first;
    }
    mean = block_sum(sum) / (end - begin);
  }
  if (weight) {
    float sum = 0;
    for (int i = begin + threadIdx.x * VEC; i < end; i += blockDim.x * VEC) {
      float v[VEC];
      load(v, x + row + i);
#pragma unroll
      for (int e = 0; e < VEC; e++) sum += (v[e] - first - mean) * (v[e] - first - mean);
    }
    scale = rsqrtf(block_sum(sum) / (end - begin) + eps);
  }
  for (int i = begin + threadIdx.x * VEC; i < end; i += blockDim.x * VEC) {
    float v[VEC], g[VEC], r[VEC];
    load(v, x + row + i);
    if (weight) load(g, weight + i - begin);
    if (residual) load(r, residual + row + i);
#pragma unroll
    for (int e = 0; e < VEC; e++) {
      if (weight) v[e] = (v[e] - first - mean) * (scale * g[e]);
      if (residual) v[e] += r[e];
    }
    store(y + row + i, v);
  }
}

}  // namespace qrun
