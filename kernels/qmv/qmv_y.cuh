// The last thing that a block of qmv.cuh does with a tile: the sums that its lanes hold meet in shared memory, the
// epilogue follows, and y is written. With SPLITS they stay there, and y comes from those of the whole cluster.
#pragma once

#include "../common/ptx.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

// Q: Qmv of one tile.
template <typename Q, typename T, int M, int WARPS, int TEAMS, int SPLITS>
struct QmvY {
  const Q& q;

  // Lanes' sums -> the warp's place in a buffer, the groups of a quad added.
  __device__ __forceinline__ void share(float (&sums)[Q::PASSES][4], int buffer) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* out = q.shared_out + (buffer * (TEAMS * WARPS) + int(threadIdx.x) / 32) * (M * Q::OUT);
#pragma unroll
    for (int p = 0; p < Q::PASSES; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float v = sums[p][i];
        sums[p][i] = 0;
        if (M == 1 && i % 2) continue;
#pragma unroll
        for (int bit = 4 / Q::BANDS; bit < 4; bit *= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);
        const int m = p * Q::COLS + 2 * t % Q::COLS + i % 2;
        if (t * Q::BANDS / 4 == 0 && m < M) out[m * Q::OUT + g + i / 2 * 8] = v;
      }
  }

  __device__ __forceinline__ float total(int buffer, int m, int row) const {
    const float* in = q.shared_out + ((buffer * TEAMS + Q::team()) * WARPS * M + m) * Q::OUT + row;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += in[i * M * Q::OUT];
    return Q::DEQUANTIZED ? sum : sum * Subnormal<T>::UNDO;
  }

  // A tile is multiplied. count: of tiles before it, modulo 2 * WARPS: warp count % WARPS and as many behind it as it
  // takes write y. normed: the norm's r is still to come.
  template <typename E>
  __device__ __forceinline__ void finish(float (&sums)[Q::PASSES][4], int tile, int count, bool normed,
                                         float eps, const E& epilogue) const {
    constexpr int COLUMNS = Q::ROWS / E::ROWS, ITEMS = M * COLUMNS;  // of y; a lane takes every (32 * WARPS)-th
    constexpr int EACH = (ITEMS + 32 * WARPS - 1) / (32 * WARPS), STRIDE = 32 * WARPS / COLUMNS;
    const int buffer = count % 2;
    const unsigned mine = unsigned(Q::warp() + 2 * WARPS - count) % WARPS * 32 + threadIdx.x % 32;
    const int m = mine / COLUMNS, row = blockIdx.y * M + m;
    const int column = tile * COLUMNS + mine % COLUMNS, first = mine % COLUMNS * E::ROWS;
    const int left = column < epilogue.columns() ? min(M - m, q.rows - row) : 0;  // rows of y, STRIDE apart
    share(sums, buffer);
    typename E::Behind behind[EACH];  // under way while the others finish
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * STRIDE < left) behind[i] = epilogue.ahead(row + i * STRIDE, column);
    barrier(1 + Q::team(), 32 * WARPS);  // whoever fills this buffer again has passed the next tile's
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (i * STRIDE >= left) continue;
      const float r = normed ? q.norm_factor(m + i * STRIDE, eps) : 1.0f;
      epilogue.write(row + i * STRIDE, column, total(buffer, m + i * STRIDE, first) * r,
                     E::ROWS == 2 ? total(buffer, m + i * STRIDE, first + 1) * r : 0.0f, behind[i]);
    }
  }

  // The same with SPLITS: the sums of this part of K stay here.
  __device__ __forceinline__ void keep(float (&sums)[Q::PASSES][4], int tile, int count) const {
    share(sums, count % 2);
    barrier(1 + Q::team(), 32 * WARPS);
    for (int i = threadIdx.x % (32 * WARPS); i < M * Q::ROWS; i += 32 * WARPS)
      q.shared_tiles[tile / Q::clusters() * (M * Q::ROWS) + i] = total(count % 2, i / Q::ROWS, i % Q::ROWS);
  }

  // All tiles are multiplied: a block adds up its share of them, four rows of w a thread, and writes y.
  template <typename E>
  __device__ __forceinline__ void add_up(int tiles, const E& epilogue) const {
    constexpr int QUADS = M * Q::ROWS / 4;
    cluster_arrive(), cluster_wait();
    for (int i = blockIdx.x % SPLITS * Q::THREADS + threadIdx.x; ; i += SPLITS * Q::THREADS) {
      const int tile = i / QUADS * Q::clusters() + Q::cluster(), row = blockIdx.y * M + i % QUADS / 4;
      if (tile >= tiles) break;
      float sum[4] = {};
#pragma unroll
      for (int split = 0; split < SPLITS; split++) {
        const float4 v = cluster_load(reinterpret_cast<const float4*>(q.shared_tiles) + i, split);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
#pragma unroll
      for (int c = 0; c < 4 / E::ROWS; c++) {
        const int column = (tile * Q::ROWS + i % 4 * 4) / E::ROWS + c;
        if (row < q.rows && column < epilogue.columns())
          epilogue.write(row, column, sum[c * E::ROWS], sum[c * E::ROWS + E::ROWS - 1]);
      }
    }
    cluster_arrive(), cluster_wait();  // nobody reads from a block that is gone
  }
};

}  // namespace qrun
