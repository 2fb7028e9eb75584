// qmv: y (M, N) = norm(x) (M, K) @ w (N, K)^T for M <= 16, 4-bit affine w, 16-bit x. Bound by memory:
// each packed word of w is read once, 16 bytes a lane, and goes to the tensor cores nearly as it is.
//
// A block prepares x in shared memory once, then goes through tiles of 16 rows of w: tile blockIdx.x,
// then every gridDim.x-th. A step is 128 successive k, and a warp takes TAKE successive steps together:
// all their loads are under way at once, and their scales are one wide load a row instead of a 2-byte
// load each. The takes are dealt to the block's warps, whose sums meet in shared memory at the end of a
// tile; by then the loads of the next tile are under way. In one step a warp holds 16 x 128 codes:
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

// TAKE > 1 wants K to be a multiple of 128 * TAKE.
template <typename T, typename S, int GROUP, int M, int WARPS, int TAKE>
struct Qmv {
  static constexpr int THREADS = 32 * WARPS, ROWS = 16, STEP = 128;
  static constexpr int PARTS = STEP / GROUP;               // groups in a step
  static constexpr int COLS = 8 / PARTS;                   // rows of x in one mma
  static constexpr int PASSES = (M + COLS - 1) / COLS;     // mma on one tile of w
  static constexpr int SUMS = PASSES * COLS;               // M, rounded up
  static constexpr int FACTORS = TAKE == 1 ? 1 : TAKE * PARTS;  // of a row that a lane loads

  const T* x;       // (M, K)
  const unsigned* w;  // (N, K / 8)
  const S* scales;  // (N, K / GROUP)
  const S* biases;  // (N, K / GROUP)
  int n, k;
  int chunk;    // k for which x fits into shared memory at a time, a multiple of STEP * TAKE
  int buffers;  // of sums: two, or one for each of the block's tiles if there are several chunks

  struct alignas(FACTORS * sizeof(S) < 16 ? FACTORS * sizeof(S) : 16) Factors {
    S at[FACTORS];
  };

  // One lane's share of a take: 32 codes a step of two rows, and those rows' scales and biases.
  struct Tile {
    uint4 w[TAKE][2];
    Factors scale[2], bias[2];
  };

  // Shared memory: x of a chunk as operand b, [step][j][m][t] of 8 elements; its group sums,
  // [group][SUMS]; the warps' sums, [buffer][warp][m][row]; 1 / rms of each row of x.
  uint4* shared_x;
  float* shared_sums;
  float* shared_out;
  float* shared_rms;

  __device__ __forceinline__ void place() {
    shared_x = reinterpret_cast<uint4*>(shared_memory());
    shared_sums = reinterpret_cast<float*>(shared_x + chunk / 8 * M);
    shared_out = shared_sums + chunk / GROUP * SUMS;
    shared_rms = shared_out + buffers * WARPS * M * ROWS;
  }

  // Take `take` counted from k0. Nothing outside the arrays is read: what lies behind their end is
  // replaced by what lies before it, for x is zero there, and rows behind the last are not written.
  // Offsets are 32 bits wide, for w counts words and N * K / 8 < 2^32: registers are short.
  __device__ __forceinline__ void load_tile(Tile& tile, int rows, int k0, int take) const {
    const int lane = threadIdx.x % 32;
    const unsigned first = k0 + take * (TAKE * STEP), mine = first + lane % 4 * 32;
    const unsigned at = TAKE == 1 ? min(mine, unsigned(k) - 32) : mine;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned row = min(rows + lane / 4 + 8 * i, n - 1);
      const unsigned* from = w + (row * (unsigned(k) / 8) + at / 8);
#pragma unroll
      for (int s = 0; s < TAKE; s++) tile.w[s][i] = load_stream(from + s * (STEP / 8));
      const unsigned group = row * (unsigned(k) / GROUP) + (TAKE == 1 ? at : first) / GROUP;
      tile.scale[i] = *reinterpret_cast<const Factors*>(scales + group);
      tile.bias[i] = *reinterpret_cast<const Factors*>(biases + group);
    }
  }

  // 1 / rms of every row of x, for the norm in front.
  __device__ __forceinline__ void prepare_rms(float eps) const {
#pragma unroll 1
    for (int m = 0; m < M; m++) {
      float sum = 0;
#pragma unroll 2
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
  // A unit is 8 elements: the k of one word of w. A warp takes 32 units of one row, two steps, lane
  // (step, j, t): so its stores meet few bank conflicts; and it has BATCH of those under way.
  // weight: of the norm, (K,), or null.
  template <typename G>
  __device__ __forceinline__ void prepare_x(const G* weight, int k0, int steps) const {
    constexpr int BATCH = M == 1 ? 2 : 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int t = lane % 4, j = lane / 4 % 4;
    const int all = (steps + 1) / 2 * M;
#pragma unroll 1
    for (int first = warp; first < all; first += BATCH * WARPS) {
      uint4 raw[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int i = first + b * WARPS, m = i % M, at = k0 + (i / M * 2 + lane / 16) * STEP + t * 32 + j * 8;
        raw[b] = make_uint4(0, 0, 0, 0);
        if (i < all && at < k)
          raw[b] = *reinterpret_cast<const uint4*>(x + static_cast<long long>(m) * k + at);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int i = first + b * WARPS, m = i % M, step = i / M * 2 + lane / 16;
        const int at = k0 + step * STEP + t * 32 + j * 8;
        if (i >= all) break;
        float v[8];
        load(v, reinterpret_cast<const T*>(&raw[b]));
        if (weight && at < k) {
          float g[8];
          load(g, weight + at);
          const float r = shared_rms[m];
#pragma unroll
          for (int e = 0; e < 8; e++) v[e] = to_float(from_float<T>(v[e] * r * g[e]));
        }
        float sum = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) sum += v[e], v[e] *= Subnormal<T>::X;
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        if (PARTS <= 2) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (PARTS == 1) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (step < steps)
          shared_x[((step * 4 + j) * M + m) * 4 + t] =
              make_uint4(pack<T>(v[0], v[4]), pack<T>(v[2], v[6]), pack<T>(v[1], v[5]),
                         pack<T>(v[3], v[7]));
        if (step < steps && j == 0 && t % (4 / PARTS) == 0)
          shared_sums[(step * PARTS + t * PARTS / 4) * SUMS + m] = sum * (1 / Subnormal<T>::UNDO);
      }
    }
  }

  // The lane's own of the factors of step s.
  __device__ __forceinline__ static float factor(const Factors& f, int s, int part) {
    if constexpr (TAKE == 1) return to_float(f.at[0]);
    S mine = f.at[s * PARTS];
#pragma unroll
    for (int q = 1; q < PARTS; q++)
      if (part == q) mine = f.at[s * PARTS + q];
    return to_float(mine);
  }

  // sums[pass] += tile @ x of that take, for this lane's rows g, g+8 and two rows of x.
  __device__ __forceinline__ void multiply(float (&sums)[PASSES][4], const Tile& tile, int take) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, part = t * PARTS / 4;
    const bool mine = g / COLS == part;  // column g of b carries the group of k 32t ..
#pragma unroll
    for (int s = 0; s < TAKE; s++) {
      const int step = take * TAKE + s;
      float even[PASSES][4] = {}, odd[PASSES][4] = {};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const unsigned lo = (&tile.w[s][0].x)[j], hi = (&tile.w[s][1].x)[j];
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
      const float scale[2] = {factor(tile.scale[0], s, part), factor(tile.scale[1], s, part)};
      const float bias[2] = {factor(tile.bias[0], s, part), factor(tile.bias[1], s, part)};
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const float* xs = shared_sums + (step * PARTS + part) * SUMS + p * COLS + 2 * t % COLS;
        const float2 total = *reinterpret_cast<const float2*>(xs);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float product = fmaf(odd[p][i], 1.0f / 16, even[p][i]);
          sums[p][i] = fmaf(scale[i / 2], product, sums[p][i]);
          sums[p][i] = fmaf(bias[i / 2], i % 2 ? total.y : total.x, sums[p][i]);
        }
      }
    }
  }

  // Lanes' sums -> the buffer, the groups of a quad added; on top of what is there if there is.
  __device__ __forceinline__ void share(float (&sums)[PASSES][4], int buffer, bool more) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float* out = shared_out + (buffer * WARPS + warp) * (M * ROWS);
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float v = sums[p][i];
        sums[p][i] = 0;
#pragma unroll
        for (int bit = 4 / PARTS; bit < 4; bit *= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);
        const int m = p * COLS + 2 * t % COLS + i % 2;
        float* at = out + m * ROWS + g + i / 2 * 8;
        if (t * PARTS / 4 == 0 && m < M) *at = more ? *at + v : v;
      }
  }

  __device__ __forceinline__ float total(int buffer, int m, int row) const {
    const float* in = shared_out + buffer * (WARPS * M * ROWS) + m * ROWS + row;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += in[i * M * ROWS];
    return sum * Subnormal<T>::UNDO;
  }

  template <typename E>
  __device__ __forceinline__ void write(int rows, int buffer, const E& epilogue) const {
    for (int i = threadIdx.x; i < M * ROWS / E::ROWS; i += THREADS) {
      const int m = i / (ROWS / E::ROWS), row = i % (ROWS / E::ROWS) * E::ROWS;
      const int column = (rows + row) / E::ROWS;
      if (column < epilogue.columns())
        epilogue.write(m, column, total(buffer, m, row),
                       E::ROWS == 2 ? total(buffer, m, row + 1) : 0.0f);
    }
  }

  // G: type of the norm's weight (K,), null without a norm.
  template <typename G, typename E>
  __device__ __forceinline__ void run(const G* weight, float eps, const E& epilogue) {
    start_next_kernel();
    place();
    const int warp = threadIdx.x / 32, stride = gridDim.x * ROWS;
    float sums[PASSES][4] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < k; k0 += chunk) {
      const int steps = (min(chunk, k - k0) + STEP - 1) / STEP, takes = steps / TAKE;
      int rows = blockIdx.x * ROWS, take = warp, buffer = 0;
      Tile tile;  // the first loads are under way while x is prepared
      if (take < takes) load_tile(tile, rows, k0, take);
      if (k0 == 0)
        wait_for_previous_kernel();
      else
        __syncthreads();  // the last chunk's x has been used
      if (weight && k0 == 0) prepare_rms(eps);
      prepare_x(weight, k0, steps);
      __syncthreads();
#pragma unroll 1
      while (rows < n) {
        if (take < takes) multiply(sums, tile, take);
        take += WARPS;
        const int done = rows;
        const bool last = take >= takes;
        if (last) take = warp, rows += stride;
        if (rows < n && take < takes) load_tile(tile, rows, k0, take);
        if (!last) continue;
        share(sums, buffer, k0 > 0);
        // One barrier a tile: whoever fills this buffer again has passed the next tile's.
        __syncthreads();
        if (k0 + chunk >= k) write(done, buffer, epilogue);
        if (++buffer == buffers) buffer = 0;
      }
    }
  }
};

}  // namespace qrun
