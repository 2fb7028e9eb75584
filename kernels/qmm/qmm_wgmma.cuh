// qmm: y (M, N) = x (M, K) @ w (N, K)^T for many rows of x, 4-bit affine w, 16-bit x, by wgmma: compute
// capability 9.0a. x comes from qmm_prepare.
//
// A block computes BN = 64 * WN rows of w by BM rows of x; its warpgroups are WN x WK, each with 64 rows
// of w, all BM rows of x and every WK-th run of 64 k. w is the operand in registers, x the one in shared
// memory. A stage is 64 * WK k; STAGES of them are in shared memory, all but one on their way there:
//
//   x     [WK][BM] rows of 64 elements in chunks of 16 bytes; chunk c of row m lies at c ^ m % 8
//   w     [WK][BN] rows of 8 words in two chunks; chunk c of row n lies at c ^ n / 4 % 2
//   sums  [WK][UNITS][BM] of x over the units of a run
//
// Codes become operand a with a mask and a shift (subnormal.cuh, qmm_prepare.cuh). A unit's products are
// summed by the tensor cores in sums of their own, and its scale and bias are applied to those in
// float32, while the tensor cores work for the other warpgroups.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/subnormal.cuh"
#include "../common/wgmma.cuh"

namespace qrun {

template <typename T, typename S, int GROUP, int BM, int WN, int WK, int STAGES>
struct QmmWgmma {
  static constexpr int THREADS = 128 * WN * WK, BN = 64 * WN, RUN = 64;
  static constexpr int U = GROUP < RUN ? GROUP : RUN, UNITS = RUN / U;
  static constexpr int X_BYTES = WK * BM * RUN * 2, W_BYTES = WK * BN * RUN / 2;
  static constexpr int STAGE = (X_BYTES + W_BYTES + WK * UNITS * BM * 4 + 1023) / 1024 * 1024;
  static constexpr int PITCH = BN + 4;  // of the sums at the end, [WK][BM][PITCH] float32

  const T* x;         // (M, PK), prepared
  const float* sums;  // (PK / U, PM), PM a multiple of BM
  const unsigned* w;  // (N, K / 8)
  const S* scales;    // (N, K / GROUP)
  const S* biases;    // (N, K / GROUP)
  int m, n, k, pk, pm;

  // Scale and bias of rows g, g+8 of the warp for the units of a run.
  struct Factors {
    S scale[UNITS][2], bias[UNITS][2];
  };

  __device__ __forceinline__ static char* place() {  // the swizzle counts from multiples of 1024
    char* p = shared_memory();
    return p + (1024 - shared_address(p) % 1024) % 1024;
  }
  __device__ __forceinline__ static int group_n() { return threadIdx.x / 128 % WN; }
  __device__ __forceinline__ static int group_k() { return threadIdx.x / 128 / WN; }
  // The warp's first row of w in the block.
  __device__ __forceinline__ static int warp_n() { return group_n() * 64 + threadIdx.x / 32 % 4 * 16; }
  // m goes first: the blocks that run together read few rows of w, and x stays in L2.
  __device__ __forceinline__ int first_m() const { return blockIdx.x * BM; }
  __device__ __forceinline__ int first_n() const { return blockIdx.y * BN; }

  // Stage `stage` of k on its way into its place. Rows behind the last repeat it and are not written;
  // k behind the end is zero.
  __device__ __forceinline__ void fetch(char* shared, int stage) const {
    char* to = shared + stage % STAGES * STAGE;
    const int k0 = stage * RUN * WK;
#pragma unroll
    for (int first = 0; first < WK * BM * 8; first += THREADS) {
      const int i = first + threadIdx.x;
      if (WK * BM * 8 % THREADS && i >= WK * BM * 8) break;
      const int run = i / (BM * 8), row = i / 8 % BM, c = i % 8, at = k0 + run * RUN + c * 8;
      const bool valid = at < pk;
      const T* from = x + static_cast<long long>(min(first_m() + row, m - 1)) * pk + (valid ? at : 0);
      copy_async(to + ((run * BM + row) * 8 + (c ^ row % 8)) * 16, from, valid);
    }
    to += X_BYTES;
#pragma unroll
    for (int first = 0; first < WK * BN * 2; first += THREADS) {
      const int i = first + threadIdx.x;
      if (WK * BN * 2 % THREADS && i >= WK * BN * 2) break;
      const int run = i / (BN * 2), row = i / 2 % BN, c = i % 2, at = k0 + run * RUN + c * 32;
      const bool valid = at < k;
      const unsigned* from =
          w + static_cast<long long>(min(first_n() + row, n - 1)) * (k / 8) + (valid ? at / 8 : 0);
      copy_async(to + ((run * BN + row) * 2 + (c ^ row / 4 % 2)) * 16, from, valid);
    }
    to += W_BYTES;
#pragma unroll
    for (int first = 0; first < WK * UNITS * BM / 4; first += THREADS) {
      const int i = first + threadIdx.x;
      if (WK * UNITS * BM / 4 % THREADS && i >= WK * UNITS * BM / 4) break;
      const int unit = i / (BM / 4), at = i % (BM / 4) * 4, which = k0 / U + unit;
      const bool valid = which < pk / U;
      const float* from = sums + (valid ? static_cast<long long>(which) * pm + first_m() + at : 0);
      copy_async(to + i * 16, from, valid);
    }
  }

  __device__ __forceinline__ Factors load_factors(int stage) const {
    const int g = threadIdx.x % 32 / 4;
    Factors f;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = min(first_n() + warp_n() + i * 8 + g, n - 1);
        const int at = (stage * WK + group_k()) * RUN + u * U;
        f.scale[u][i] = f.bias[u][i] = from_float<S>(0.0f);
        if (at < k) {
          const long long group = static_cast<long long>(row) * (k / GROUP) + at / GROUP;
          f.scale[u][i] = scales[group], f.bias[u][i] = biases[group];
        }
      }
    return f;
  }

  // acc (64, BM) += this warpgroup's run of the stage.
  __device__ __forceinline__ void multiply(char* shared, float (&acc)[BM / 8][4], const Factors& f,
                                           int stage) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const char* from = shared + stage % STAGES * STAGE;
    const char* xs = from + group_k() * BM * RUN * 2;
    const unsigned* ws =
        reinterpret_cast<const unsigned*>(from + X_BYTES) + (group_k() * BN + warp_n() + g) * 8;
    const float* totals = reinterpret_cast<const float*>(from + X_BYTES + W_BYTES) +
                          group_k() * UNITS * BM + 2 * t;
    unsigned a[4][4];  // k 16s ..
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int chunk = c ^ g / 4 % 2;  // row g + 8 lies alike
      const unsigned lo = ws[chunk * 4 + t], hi = ws[8 * 8 + chunk * 4 + t];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        a[2 * c + h][0] = lo >> 8 * h & 0x000f000fu;
        a[2 * c + h][1] = hi >> 8 * h & 0x000f000fu;
        a[2 * c + h][2] = lo >> (8 * h + 4) & 0x000f000fu;
        a[2 * c + h][3] = hi >> (8 * h + 4) & 0x000f000fu;
      }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      float d[BM / 8][4];
      constexpr int COUNT = 4 / UNITS;
      wgmma_fence();
#pragma unroll
      for (int s = u * COUNT; s < (u + 1) * COUNT; s++)
        wgmma(d, a[s], wgmma_rows(xs, s), s > u * COUNT, T());
      wgmma_commit();
      const float scale[2] = {to_float(f.scale[u][0]), to_float(f.scale[u][1])};
      const float bias[2] = {to_float(f.bias[u][0]), to_float(f.bias[u][1])};
#pragma unroll
      for (int j = 0; j < BM / 8; j++) {  // while the tensor cores work
        const float2 total = *reinterpret_cast<const float2*>(totals + u * BM + j * 8);
#pragma unroll
        for (int e = 0; e < 4; e++)
          acc[j][e] = fmaf(bias[e / 2], e % 2 ? total.y : total.x, acc[j][e]);
      }
      wgmma_wait(d);
#pragma unroll
      for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[j][e] = fmaf(scale[e / 2], d[j][e], acc[j][e]);
    }
  }

  template <typename E>
  __device__ __forceinline__ void run(const E& epilogue) const {
    char* shared = place();
    const int stages = (pk + RUN * WK - 1) / (RUN * WK);
    float acc[BM / 8][4] = {};
    start_next_kernel();
    Factors next = load_factors(0);
    wait_for_previous_kernel();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      fetch(shared, s);
      copy_async_commit();
    }
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
      copy_async_wait<STAGES - 2>();
      fence_async();
      __syncthreads();  // the stage has come for all, and the one before has been used by all
      fetch(shared, stage + STAGES - 1);
      copy_async_commit();
      const Factors now = next;
      next = load_factors(stage + 1);
      multiply(shared, acc, now, stage);
    }
    copy_async_wait<0>();
    __syncthreads();  // the stages' place takes the sums
    finish(reinterpret_cast<float*>(shared), acc, epilogue);
  }

  // The warps' sums through shared memory, so that the result is written along its rows.
  template <typename E>
  __device__ __forceinline__ void finish(float* shared, const float (&acc)[BM / 8][4],
                                         const E& epilogue) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = shared + group_k() * BM * PITCH + warp_n() + g;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) mine[(j * 8 + 2 * t + e % 2) * PITCH + e / 2 * 8] = acc[j][e];
    __syncthreads();
    constexpr int COLUMNS = BN / E::ROWS;
#pragma unroll 1
    for (int i = threadIdx.x; i < BM * COLUMNS; i += THREADS) {
      const int row = i / COLUMNS, column = i % COLUMNS, at = first_n() / E::ROWS + column;
      if (first_m() + row >= m || at >= epilogue.columns()) continue;
      float v[E::ROWS] = {};
#pragma unroll
      for (int s = 0; s < WK; s++)
#pragma unroll
        for (int e = 0; e < E::ROWS; e++)
          v[e] += shared[(s * BM + row) * PITCH + column * E::ROWS + e];
      epilogue.write(first_m() + row, at, v[0] * Subnormal<T>::UNDO,
                     E::ROWS == 2 ? v[E::ROWS - 1] * Subnormal<T>::UNDO : 0.0f);
    }
  }
};

}  // namespace qrun
