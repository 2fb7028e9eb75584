// embedding: rows of a quantized matrix by index, dequantized in float32 and rounded once. Any format.
#pragma once

#include "../common/dequantize.cuh"
#include "../common/ptx.cuh"

namespace qrun {

// ids (L,), y (L, K). A thread writes 8 elements. An id outside 0 .. n-1 gives a row of zeros.
// Grid: x over runs of 8 elements, y over L.
template <typename T, typename Scheme, typename Id>
__device__ __forceinline__ void embedding(const Id* ids, const Scheme& scheme, T* y, float scale, int n,
                                          int k) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int u = blockIdx.x * blockDim.x + threadIdx.x;
  if (u >= k / 8) return;
  const long long row = ids[blockIdx.y];
  float v[8] = {};
  if (row >= 0 && row < n) scheme.eight(v, row, u);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= scale;
  store(y + static_cast<long long>(blockIdx.y) * k + u * 8, v);
}

}  // namespace qrun
