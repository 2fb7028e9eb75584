// qmm: y (M, N) = x (M, K) @ w (N, K)^T for many rows of x, 4-bit affine w, 16-bit x, by mma.sync: the
// kernel for compute capability 8, and for few rows on 9. x comes from qmm_prepare.
//
// A block computes BN rows of w by BM rows of x; its warps are WN x WM x WK, each with 32 rows of w, TM
// rows of x and every WK-th run of 64 k. The accumulators (2 x TM/8 of 16 x 8) stay in registers for the
// kernel's whole life. A stage is 64 * WK k; STAGES of them are in shared memory, all but one on their
// way there:
//
//   x     [WK][BM] rows of 64 elements in chunks of 16 bytes; chunk c of row m lies at c ^ m % 8, so that
//         the eight rows of an 8 x 8 matrix lie in different banks
//   w     [WK][BN] rows of 8 words in two chunks; chunk c of row n lies at c ^ n / 4 % 2, likewise
//   sums  [WK][UNITS][BM] of x over the units of a run
//
// Codes become operand a with a mask and a shift (subnormal.cuh, qmm_prepare.cuh). A unit's products are
// summed by the tensor cores; its scale and bias are applied to that sum in float32.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

template <typename T, typename S, int GROUP, int TM, int WN, int WM, int WK, int STAGES>
struct QmmMma {
  static constexpr int THREADS = 32 * WN * WM * WK, BN = 32 * WN, BM = TM * WM, RUN = 64;
  static constexpr int U = GROUP < RUN ? GROUP : RUN, UNITS = RUN / U;
  static constexpr int X_BYTES = WK * BM * RUN * 2, W_BYTES = WK * BN * RUN / 2;
  static constexpr int STAGE = X_BYTES + W_BYTES + WK * UNITS * BM * 4;
  static constexpr int PITCH = BN + 4;  // of the sums at the end, [WK][BM][PITCH] float32

  const T* x;         // (M, PK), prepared
  const float* sums;  // (PK / U, PM)
  const unsigned* w;  // (N, K / 8)
  const S* scales;    // (N, K / GROUP)
  const S* biases;    // (N, K / GROUP)
  int m, n, k, pk, pm;

  // Scale and bias of rows g, g+8, g+16, g+24 of the warp for the units of a run.
  struct Factors {
    S scale[UNITS][4], bias[UNITS][4];
  };

  __device__ __forceinline__ int warp_n() const { return threadIdx.x / 32 % WN; }
  __device__ __forceinline__ int warp_m() const { return threadIdx.x / 32 / WN % WM; }
  __device__ __forceinline__ int warp_k() const { return threadIdx.x / 32 / WN / WM; }
  __device__ __forceinline__ int first_n() const { return blockIdx.x * BN; }
  __device__ __forceinline__ int first_m() const { return blockIdx.y * BM; }

  // Stage `stage` of k on its way into its place. Nothing outside the arrays is read: zeros instead.
  __device__ __forceinline__ void fetch(int stage) const {
    char* to = shared_memory() + stage % STAGES * STAGE;
    const int k0 = stage * RUN * WK;
// Two copies at a time: all of them, unrolled, spill registers at TM = 64.
#pragma unroll 2
    for (int first = 0; first < WK * BM * 8; first += THREADS) {
      const int i = first + threadIdx.x;
      if (WK * BM * 8 % THREADS && i >= WK * BM * 8) break;
      const int run = i / (BM * 8), row = i / 8 % BM, c = i % 8, at = k0 + run * RUN + c * 8;
      const bool valid = first_m() + row < m && at < pk;
      const T* from = x + (valid ? static_cast<long long>(first_m() + row) * pk + at : 0);
      copy_async(to + ((run * BM + row) * 8 + (c ^ row % 8)) * 16, from, valid);
    }
    to += X_BYTES;
#pragma unroll 2
    for (int first = 0; first < WK * BN * 2; first += THREADS) {
      const int i = first + threadIdx.x;
      if (WK * BN * 2 % THREADS && i >= WK * BN * 2) break;
      const int run = i / (BN * 2), row = i / 2 % BN, c = i % 2, at = k0 + run * RUN + c * 32;
      const bool valid = first_n() + row < n && at < k;
      const unsigned* from = w + (valid ? static_cast<long long>(first_n() + row) * (k / 8) + at / 8 : 0);
      copy_async(to + ((run * BN + row) * 2 + (c ^ row / 4 % 2)) * 16, from, valid);
    }
    to += W_BYTES;
#pragma unroll 2
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
      for (int i = 0; i < 4; i++) {
        const int row = first_n() + warp_n() * 32 + i * 8 + g;
        const int at = (stage * WK + warp_k()) * RUN + u * U;
        f.scale[u][i] = f.bias[u][i] = from_float<S>(0.0f);
        if (row < n && at < k) {
          const long long group = static_cast<long long>(row) * (k / GROUP) + at / GROUP;
          f.scale[u][i] = scales[group], f.bias[u][i] = biases[group];
        }
      }
    return f;
  }

  // acc (32, TM) += this warp's run of the stage.
  __device__ __forceinline__ void multiply(float (&acc)[TM / 8][2][4], const Factors& f, int stage) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const char* from = shared_memory() + stage % STAGES * STAGE;
    const char* xs = from + (warp_k() * BM + warp_m() * TM) * RUN * 2;
    const unsigned* ws = reinterpret_cast<const unsigned*>(from + X_BYTES) + (warp_k() * BN + warp_n() * 32) * 8;
    const float* totals = reinterpret_cast<const float*>(from + X_BYTES + W_BYTES) +
                          warp_k() * UNITS * BM + warp_m() * TM + 2 * t;
    unsigned a[2][4][4];  // rows 16i .. of w, k 16s ..
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int chunk = c ^ g / 4 % 2;  // row g + 8 lies alike
        const unsigned lo = ws[(i * 16 + g) * 8 + chunk * 4 + t], hi = ws[(i * 16 + g + 8) * 8 + chunk * 4 + t];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          a[i][2 * c + h][0] = lo >> 8 * h & 0x000f000fu;
          a[i][2 * c + h][1] = hi >> 8 * h & 0x000f000fu;
          a[i][2 * c + h][2] = lo >> (8 * h + 4) & 0x000f000fu;
          a[i][2 * c + h][3] = hi >> (8 * h + 4) & 0x000f000fu;
        }
      }
#pragma unroll
    for (int j = 0; j < TM / 8; j++) {
      unsigned b[2][4];  // k 32c .., operands of two mma each
#pragma unroll
      for (int c = 0; c < 2; c++)
        load_matrices(b[c], xs + ((j * 8 + lane % 8) * 8 + ((4 * c + lane / 8) ^ lane % 8)) * 16);
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        const float2 total = *reinterpret_cast<const float2*>(totals + u * BM + j * 8);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float d[4] = {};
#pragma unroll
          for (int s = u * 4 / UNITS; s < (u + 1) * 4 / UNITS; s++)
            mma(d, a[i][s], b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1], T());
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = 2 * i + e / 2;
            acc[j][i][e] = fmaf(to_float(f.scale[u][row]), d[e], acc[j][i][e]);
            acc[j][i][e] = fmaf(to_float(f.bias[u][row]), e % 2 ? total.y : total.x, acc[j][i][e]);
          }
        }
      }
    }
  }

  template <typename E>
  __device__ __forceinline__ void run(const E& epilogue) const {
    const int stages = (pk + RUN * WK - 1) / (RUN * WK);
    float acc[TM / 8][2][4] = {};
    start_next_kernel();
    Factors next = load_factors(0);
    wait_for_previous_kernel();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      fetch(s);
      copy_async_commit();
    }
    for (int stage = 0; stage < stages; stage++) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();  // the stage has come for all, and the one before has been used by all
      fetch(stage + STAGES - 1);
      copy_async_commit();
      const Factors now = next;
      next = load_factors(stage + 1);
      multiply(acc, now, stage);
    }
    copy_async_wait<0>();
    __syncthreads();  // the stages' place takes the sums
    finish(acc, epilogue);
  }

  // The warps' sums through shared memory, so that the result is written along its rows.
  template <typename E>
  __device__ __forceinline__ void finish(const float (&acc)[TM / 8][2][4], const E& epilogue) const {
    float* shared = reinterpret_cast<float*>(shared_memory());
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = shared + (warp_k() * BM + warp_m() * TM) * PITCH + warp_n() * 32;
#pragma unroll
    for (int j = 0; j < TM / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          mine[(j * 8 + 2 * t + e % 2) * PITCH + i * 16 + e / 2 * 8 + g] = acc[j][i][e];
    __syncthreads();
    constexpr int COLUMNS = BN / E::ROWS;
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
