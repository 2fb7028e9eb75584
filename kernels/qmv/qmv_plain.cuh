// qmv for everything that qmv.cuh does not take: float32 x, other widths of code, the micro-scaled
// modes. A warp computes two neighbouring rows of w (a gate and its up) with up to TM rows of x;
// lanes take 8 codes each, in float32 throughout.
#pragma once

#include "../common/dequantize.cuh"
#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "../common/reduce.cuh"

namespace qrun {

// Grid: x over pairs of rows of w, WARPS a block; y over rows of x, TM a block.
// x (M, K); scheme: Affine or MicroScaled.
template <int TM, typename T, typename Scheme, typename E>
__device__ __forceinline__ void qmv_plain(const T* x, const Scheme& scheme, const E& epilogue, int rows,
                                          int n, int k) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int lane = threadIdx.x % 32, first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 2;
  const int m0 = blockIdx.y * TM;
  if (first >= n) return;
  const bool second = first + 1 < n;
  float sums[2][TM] = {};
  for (int u = lane; u < k / 8; u += 32) {
    float a[8], b[8] = {};
    scheme.eight(a, first, u);
    if (second) scheme.eight(b, first + 1, u);
#pragma unroll
    for (int m = 0; m < TM; m++) {
      if (m0 + m >= rows) break;
      float v[8];
      load(v, x + static_cast<long long>(m0 + m) * k + u * 8);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        sums[0][m] = fmaf(a[i], v[i], sums[0][m]);
        sums[1][m] = fmaf(b[i], v[i], sums[1][m]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < TM; m++) {
    const float a = warp_sum(sums[0][m]), b = warp_sum(sums[1][m]);
    if (lane != 0 || m0 + m >= rows) continue;
    if constexpr (E::ROWS == 2) {
      epilogue.write(m0 + m, first / 2, a, b);
    } else {
      epilogue.write(m0 + m, first, a);
      if (second) epilogue.write(m0 + m, first + 1, b);
    }
  }
}

}  // namespace qrun
