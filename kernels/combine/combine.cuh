// combine: the rows that a token's experts made, weighted and added to its residual.
#pragma once

#include "../common/ptx.cuh"

namespace qrun {

// x (R, N), place and share (M, TOP), residual and y (M, N). Grid: x over runs of VEC columns, y over tokens.
template <int TOP, int VEC, typename T>
__device__ __forceinline__ void combine(const T* x, const int* place, const float* share, const T* residual,
                                        T* y, int n) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * VEC;
  if (column >= n) return;
  const long long at = static_cast<long long>(blockIdx.y) * n + column;
  float sum[VEC], rest[VEC];
  load(rest, residual + at);
#pragma unroll
  for (int i = 0; i < VEC; i++) sum[i] = 0;
#pragma unroll
  for (int j = 0; j < TOP; j++) {
    float v[VEC];
    load(v, x + static_cast<long long>(place[blockIdx.y * TOP + j]) * n + column);
    const float s = share[blockIdx.y * TOP + j];
#pragma unroll
    for (int i = 0; i < VEC; i++) sum[i] = fmaf(s, v[i], sum[i]);
  }
#pragma unroll
  for (int i = 0; i < VEC; i++) sum[i] += rest[i];
  store(y + at, sum);
}

}  // namespace qrun
