// qmv: y (M, N) = norm(x) (M, K) @ w (N, K)^T for M <= 16, 4-bit affine w, 16-bit x. Bound by memory:
// each packed word of w is read once, 16 bytes a lane, and goes to the tensor cores nearly as it is.
//
// A block computes 16 rows of w. A step is 128 successive k; the steps are dealt to the block's warps,
// whose sums meet in shared memory at the end; the loads of AHEAD steps are under way together. In one step a warp holds a 16 x 128 tile of codes:
//
//   lane 4g+t:   row g    k 32t .. 32t+31    one 16-byte load, words j = 0..3, 8 codes each
//                row g+8  the same k         one more
//
// The tile is operand a of mma.m16n8k16, x is operand b: k may come in any order as long as both agree.
// A word holds codes n0 .. n7, and its nibbles are operands nearly where they lie (subnormal.cuh):
//
//   w      & 000f000f   (n0, n4)               even: a[0], a[1]
//   w >> 8 & 000f000f   (n2, n6)               even: a[2], a[3]
//   w      & 00f000f0   (n1, n5) times 16      odd:  a[0], a[1]
//   w >> 8 & 00f000f0   (n3, n7) times 16      odd:  a[2], a[3]
//
// Even and odd nibbles are two chains of sums; odd / 16 is added in float32.
//
// The four lanes of a quad (t) hold PARTS = 128 / GROUP groups. Their sums stay apart because the 8
// columns of b are PARTS bands of COLS rows of x each, and a band is zero where t belongs to another
// group. What a lane gets in d is then of its own group, whose scale it has in a register.
//
//   band of column c: c / COLS      row of x: pass * COLS + c % COLS      group of lane t: t*PARTS/4
//
// The biases multiply the group sums of x, in float32.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

template <typename T, typename S, int GROUP, int M, int WARPS, int AHEAD>
struct Qmv {
  static constexpr int THREADS = 32 * WARPS, ROWS = 16, STEP = 128;
  static constexpr int PARTS = STEP / GROUP;               // groups in a step
  static constexpr int COLS = 8 / PARTS;                   // rows of x in one mma
  static constexpr int PASSES = (M + COLS - 1) / COLS;     // mma on one tile of w
  static constexpr int SUMS = PASSES * COLS;               // M, rounded up

  const T* x;       // (M, K)
  const unsigned* w;  // (N, K / 8)
  const S* scales;  // (N, K / GROUP)
  const S* biases;  // (N, K / GROUP)
  int n, k;
  int chunk;  // k for which x fits into shared memory at a time, a multiple of STEP

  // One lane's share of a step: 32 codes of two rows, and their group's scale and bias.
  struct Tile {
    uint4 w[2];
    S scale[2], bias[2];
  };

  // Shared memory: x of a chunk as operand b, [step][j][m][t] of 8 elements; its group sums,
  // [group][SUMS]; then 1 / rms of each row. The warps' sums at the end reuse the front.
  uint4* shared_x;
  float* shared_sums;
  float* shared_rms;

  __device__ __forceinline__ void place() {
    shared_x = reinterpret_cast<uint4*>(shared_memory());
    shared_sums = reinterpret_cast<float*>(shared_x + chunk / 8 * M);
    shared_rms = shared_sums + chunk / GROUP * SUMS;
  }

  // Codes at 32t of step `step` counted from k0. Nothing outside the arrays is read: zeros instead.
  // Offsets are 32 bits wide, for w counts words and N * K / 8 < 2^32: registers are short.
  __device__ __forceinline__ Tile load_tile(int k0, int step, int steps) const {
    const int lane = threadIdx.x % 32, row = blockIdx.x * ROWS + lane / 4;
    const unsigned at = k0 + step * STEP + lane % 4 * 32;
    const bool inside = step < steps && at < k;
    Tile tile;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      tile.w[i] = make_uint4(0, 0, 0, 0);
      tile.scale[i] = tile.bias[i] = from_float<S>(0.0f);
      if (inside && row + 8 * i < n) {
        const unsigned group = (row + 8 * i) * (unsigned(k) / GROUP) + at / GROUP;
        tile.w[i] = load_stream(w + ((row + 8 * i) * (unsigned(k) / 8) + at / 8));
        tile.scale[i] = scales[group];
        tile.bias[i] = biases[group];
      }
    }
    return tile;
  }

  // 1 / rms of every row of x, for the norm in front.
  __device__ __forceinline__ void prepare_rms(float eps) const {
#pragma unroll 1
    for (int m = 0; m < M; m++) {
      float sum = 0;
#pragma unroll 1  // registers are taken: the first codes of w are under way
      for (int u = threadIdx.x; u < k / 8; u += THREADS) {
        float v[8];
        load(v, x + static_cast<long long>(m) * k + u * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i] * v[i];
      }
      sum = block_sum(sum);
      if (threadIdx.x == 0) shared_rms[m] = rsqrtf(sum / k + eps);
    }
    __syncthreads();
  }

  // x of k0 .. into shared memory, normed, rounded to T, permuted; and the sums of its groups.
  // weight: of the norm, (K,), or null.
  template <typename G>
  __device__ __forceinline__ void prepare_x(const G* weight, int k0, int steps) const {
    const int units = steps * (STEP / 8);  // of 8 elements: the k of one word of w
    const int all = (M * units + THREADS - 1) / THREADS * THREADS;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += THREADS) {  // all lanes stay: they exchange sums
      const int m = i / units, u = i % units, at = k0 + u * 8;
      float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, sum = 0;
      if (m < M && at < k) load(v, x + static_cast<long long>(m) * k + at);
      if (weight && m < M && at < k) {
        float g[8];
        load(g, weight + at);
        const float r = shared_rms[m];
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = to_float(from_float<T>(v[e] * r * g[e]));
      }
#pragma unroll
      for (int e = 0; e < 8; e++) sum += v[e], v[e] *= Subnormal<T>::X;
      sum = warp_sum<GROUP / 8>(sum);
      if (m < M) {
        const int step = u / 16, t = u / 4 % 4, j = u % 4;
        shared_x[((step * 4 + j) * M + m) * 4 + t] =
            make_uint4(pack<T>(v[0], v[4]), pack<T>(v[2], v[6]), pack<T>(v[1], v[5]),
                       pack<T>(v[3], v[7]));
        if (u % (GROUP / 8) == 0)
          shared_sums[u / (GROUP / 8) * SUMS + m] = sum * (1 / Subnormal<T>::UNDO);
      }
    }
  }

  // sums[pass] += tile @ x of that step, for this lane's rows g, g+8 and two rows of x.
  __device__ __forceinline__ void multiply(float (&sums)[PASSES][4], const Tile& tile, int step) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, part = t * PARTS / 4;
    const bool mine = g / COLS == part;  // column g of b carries the group of k 32t ..
    float even[PASSES][4] = {}, odd[PASSES][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const unsigned lo = (&tile.w[0].x)[j], hi = (&tile.w[1].x)[j];
      const unsigned a[4] = {lo & 0x000f000fu, hi & 0x000f000fu, lo >> 8 & 0x000f000fu,
                             hi >> 8 & 0x000f000fu};
      const unsigned b[4] = {lo & 0x00f000f0u, hi & 0x00f000f0u, lo >> 8 & 0x00f000f0u,
                             hi >> 8 & 0x00f000f0u};
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const int m = min(p * COLS + g % COLS, M - 1);  // columns beyond M repeat: nobody looks
        uint4 v = make_uint4(0, 0, 0, 0);
        if (mine) v = shared_x[((step * 4 + j) * M + m) * 4 + t];
        mma(even[p], a, v.x, v.y, T());
        mma(odd[p], b, v.z, v.w, T());
      }
    }
    const float s[2] = {to_float(tile.scale[0]), to_float(tile.scale[1])};
    const float z[2] = {to_float(tile.bias[0]), to_float(tile.bias[1])};
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
      const float* xs = shared_sums + (step * PARTS + part) * SUMS + p * COLS + 2 * t % COLS;
      const float2 total = *reinterpret_cast<const float2*>(xs);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float product = fmaf(odd[p][i], 1.0f / 16, even[p][i]);
        sums[p][i] = fmaf(s[i / 2], product, sums[p][i]);
        sums[p][i] = fmaf(z[i / 2], i % 2 ? total.y : total.x, sums[p][i]);
      }
    }
  }

  // Lanes' sums -> [warp][m][row] in shared memory, the groups of a quad added.
  __device__ __forceinline__ void share(float (&sums)[PASSES][4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float* out = reinterpret_cast<float*>(shared_x) + warp * M * ROWS;
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float v = sums[p][i];
#pragma unroll
        for (int bit = 4 / PARTS; bit < 4; bit *= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);
        const int m = p * COLS + 2 * t % COLS + i % 2;
        if (t * PARTS / 4 == 0 && m < M) out[m * ROWS + g + i / 2 * 8] = v;
      }
  }

  __device__ __forceinline__ float total(int m, int row) const {
    const float* in = reinterpret_cast<const float*>(shared_x) + m * ROWS + row;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += in[i * M * ROWS];
    return sum * Subnormal<T>::UNDO;
  }

  // The block's 16 rows. G: type of the norm's weight (K,), null without a norm.
  template <typename G, typename E>
  __device__ __forceinline__ void run(const G* weight, float eps, const E& epilogue) {
    place();
    const int warp = threadIdx.x / 32;
    float sums[PASSES][4] = {};
    for (int k0 = 0; k0 < k; k0 += chunk) {
      const int steps = (min(chunk, k - k0) + STEP - 1) / STEP;
      Tile tiles[AHEAD];  // the first loads are under way while x is prepared
#pragma unroll
      for (int i = 0; i < AHEAD; i++) tiles[i] = load_tile(k0, warp + i * WARPS, steps);
      if (k0 > 0) __syncthreads();  // the last chunk's x has been used
      if (weight && k0 == 0) prepare_rms(eps);
      prepare_x(weight, k0, steps);
      __syncthreads();
      for (int step = warp;;) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
          if (step + i * WARPS < steps) multiply(sums, tiles[i], step + i * WARPS);
        step += AHEAD * WARPS;
        if (step >= steps) break;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) tiles[i] = load_tile(k0, step + i * WARPS, steps);
      }
    }
    __syncthreads();  // x has been used: its place takes the sums
    share(sums);
    __syncthreads();
    for (int i = threadIdx.x; i < M * ROWS / E::ROWS; i += THREADS) {
      const int m = i / (ROWS / E::ROWS), row = i % (ROWS / E::ROWS) * E::ROWS;
      const int column = (blockIdx.x * ROWS + row) / E::ROWS;
      if (column < epilogue.columns())
        epilogue.write(m, column, total(m, row), E::ROWS == 2 ? total(m, row + 1) : 0.0f);
    }
  }
};

}  // namespace qrun
