// What qmm_wgmma wants of x: normed if there is a norm in front, rounded to T, and in the order of bytes in
// which the tensor cores read it, so that a tile of a run of 128 k is two copies.
//
//   out   [run][half][m] rows of 64 elements in chunks of 16 bytes; chunk c of row m lies at c ^ m % 8 (the
//         128-byte swizzle)
//
// In a run, lane t of a quad of qmm_wgmma has k 32t .. 32t+31 of w in words j = 0 .. 3. A unit is the 8
// elements v0 .. v7 that meet one word; those of the four t of one j make four chunks, and t's share of
// each is two elements:
//
//   half j / 2, chunk j % 2 * 4 + (0, 1, 2, 3)   <-   (v0, v4), (v2, v6), (v1, v5), (v3, v7)
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

// x (M, K), weight (K,) or null -> out. source (M,) or null: row m comes from row source[m] of x. K is a
// multiple of 32; zeros behind it. Rows behind M stay as they are. Grid: (M, parts of K); a thread has one unit.
template <typename T, typename G>
__device__ __forceinline__ void qmm_arrange(const T* x, const int* source, const G* weight, float eps,
                                            T* out, int k, int pm) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int m = blockIdx.x, t = threadIdx.x % 4;
  x += static_cast<long long>(source ? source[m] : m) * k;
  float rms = 1;
  if (weight) {  // of the whole row, in every part of it
    float sum = 0;
#pragma unroll 4
    for (int u = threadIdx.x; u < k / 8; u += blockDim.x) {
      float v[8];
      load(v, x + u * 8);
#pragma unroll
      for (int i = 0; i < 8; i++) sum += v[i] * v[i];
    }
    rms = rsqrtf(block_sum(sum) / k + eps);
  }
  // Neighbours are the four t of one j: what they load is 64 bytes apart, what they store is adjacent.
  const int unit = blockIdx.y * blockDim.x + threadIdx.x;
  const int run = unit / 16, j = unit / 4 % 4, at = run * 128 + t * 32 + j * 8;
  float v[8] = {};
  if (at < k) load(v, x + at);
  if (weight && at < k) {
    float g[8];
    load(g, weight + at);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = to_float(from_float<T>(v[i] * rms * g[i]));
  }
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= Subnormal<T>::X;
  unsigned share[4] = {pack<T>(v[0], v[4]), pack<T>(v[2], v[6]), pack<T>(v[1], v[5]), pack<T>(v[3], v[7])};
  // Lane t gets chunk t: a 4 x 4 transposition over the quad.
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const bool upper = t & bit;
      const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? share[i] : share[i | bit], bit);
      if (upper)
        share[i] = got;
      else
        share[i | bit] = got;
    }
  if (run * 128 >= k) return;
  const int chunk = j % 2 * 4 + t;
  uint4* to = reinterpret_cast<uint4*>(out) + ((run * 2 + j / 2) * static_cast<long long>(pm) + m) * 8;
  to[chunk ^ m % 8] = make_uint4(share[0], share[1], share[2], share[3]);
}

}  // namespace qrun
