// sdpa for many new tokens by wgmma: compute capability 9.0a, D of 64 or 128 (after FlashAttention-3, Shah et
// al., 2024, without warps that only fetch). A block has BQ = 128 queries of one head, 64 a warpgroup, and walks
// over tiles of BK = 64 keys; three tiles of k and v are in shared memory.
//
//   scores (64, BK) = q (64, D) @ k (BK, D)^T     q in registers as operand a; k as operand b, its rows are columns
//   values (64, D) += p (64, BK) @ v (BK, D)      the scores' registers, packed, are operand a; v as operand b, its
//                                                 rows are k
//
// While the tensor cores make the values of a tile, the scores of the next become its p:
//
//   tensor cores   scores of i+1 | values of i           | scores of i+2 ..
//   the rest                     | scores to p, tile i+1 |
//
// A tile of k or v is [D / 64][BK] rows of 64 elements in chunks of 16 bytes; chunk c of row r lies at c ^ r % 8.
#pragma once

#include "../common/wgmma.cuh"
#include "softmax_tile.cuh"

namespace qrun {

template <typename T, int D>
struct SdpaWgmma {
  static constexpr int BQ = 128, BK = 64, THREADS = 256, STAGES = 3;
  static constexpr int TILE = BK * D * 2, STAGE = 2 * TILE, HALF = BK * 128;  // bytes

  const T* q;         // (B, H, L, D)
  const T* k_cache;   // (B, Hkv, capacity, D)
  const T* v_cache;   // (B, Hkv, capacity, D)
  const int* offset;  // (1,)
  T* y;               // (B * L, H * D)
  float scale, softcap;
  int window, heads, kv_heads, length, capacity;

  // Keys first .. first+BK-1 and their values on their way into shared memory; zeros from `end` on.
  __device__ __forceinline__ void fetch(char* stage, int first, int end) const {
    const int kv = blockIdx.x / (heads / kv_heads);
    const long long head = static_cast<long long>(blockIdx.z) * kv_heads + kv;
#pragma unroll
    for (int i = threadIdx.x; i < BK * (D / 8); i += THREADS) {
      const int row = i / (D / 8), chunk = i % (D / 8);
      const bool valid = first + row < end;
      const long long from = (head * capacity + (valid ? first + row : 0)) * D + chunk * 8;
      char* to = stage + chunk / 8 * HALF + row * 128 + (chunk % 8 ^ row % 8) * 16;
      copy_async(to, k_cache + from, valid);
      copy_async(to + TILE, v_cache + from, valid);
    }
    copy_async_commit();
  }

  // Grid: x H; y tiles of queries, the last one first, for it has the most keys; z B.
  __device__ __forceinline__ void run() const {
    start_next_kernel();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_query = (gridDim.y - 1 - blockIdx.y) * BQ;
    const int position = *offset + first_query;  // of the block's first query
    const int end = min(min(position + BQ, *offset + length), capacity);
    const int begin = window ? max(0, position - window + 1) / BK * BK : 0;
    if (begin >= end) return;  // a cache that does not reach this far
    char* shared = shared_memory();
    char* ring = shared + (1024 - shared_address(shared) % 1024) % 1024;

    const long long head = static_cast<long long>(blockIdx.z) * heads + blockIdx.x;
    unsigned queries[D / 16][4];  // operand a: rows g and g+8 of this warp's 16
    const int row[2] = {first_query + warp * 16 + g, first_query + warp * 16 + g + 8};
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const T* from = q + (head * length + row[i % 2]) * D + s * 16 + i / 2 * 8 + 2 * t;
        queries[s][i] = row[i % 2] < length ? *reinterpret_cast<const unsigned*>(from) : 0;
      }

    const int tiles = (end - begin + BK - 1) / BK;
    fetch(ring, begin, end);
    fetch(ring + STAGE, begin + BK, end);
    SoftmaxRows<T> rows{scale, softcap};
    float scores[8][4], values[D / 64][8][4], factor[2];
    unsigned share[BK / 16][4], next[BK / 16][4];
    // The scores of tile i, done, to p.
    const auto weigh = [&](int i, unsigned (&p)[BK / 16][4]) {
      const int first = begin + i * BK, lowest = position + warp * 16;
      rows.cap(scores);
      if (first + BK - 1 > lowest || (window && first + window <= lowest + 15))
        hide(scores, first, lowest + g, window);
      rows.weigh(p, scores, factor);
    };
    copy_async_wait<1>();
    fence_async();
    __syncthreads();
    begin_scores(scores, queries, ring);
    wgmma_wait(scores);
    weigh(0, share);
    // Values of tile i from `now`, and the p of tile i + 1 to `later`.
    const auto step = [&](int i, const unsigned (&now)[BK / 16][4], unsigned (&later)[BK / 16][4]) {
      copy_async_wait<0>();
      fence_async();
      __syncthreads();  // tile i + 1 is here, nobody needs tile i - 1
      if (i + 2 < tiles) fetch(ring + (i + 2) % STAGES * STAGE, begin + (i + 2) * BK, end);
      begin_scores(scores, queries, ring + (i + 1) % STAGES * STAGE);
      begin_values(values, now, ring + i % STAGES * STAGE + TILE, i > 0);
      wgmma_wait_but<1>(scores);
      weigh(i + 1, later);
#pragma unroll
      for (int h = 0; h < D / 64; h++) wgmma_wait(values[h]);
#pragma unroll
      for (int h = 0; h < D / 64; h++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) values[h][j][e] *= factor[e / 2];
    };
    const auto last = [&](const unsigned (&now)[BK / 16][4]) {
      begin_values(values, now, ring + (tiles - 1) % STAGES * STAGE + TILE, tiles > 1);
#pragma unroll
      for (int h = 0; h < D / 64; h++) wgmma_wait(values[h]);
    };
    for (int i = 0;; i += 2) {
      if (i + 1 == tiles) {
        last(share);
        break;
      }
      step(i, share, next);
      if (i + 2 == tiles) {
        last(next);
        break;
      }
      step(i + 1, next, share);
    }
    copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = rows.total(i);
      if (row[i] >= length) continue;
      const long long at = (static_cast<long long>(blockIdx.z) * length + row[i]) * heads + blockIdx.x;
#pragma unroll
      for (int h = 0; h < D / 64; h++)
#pragma unroll
        for (int j = 0; j < 8; j++)
          *reinterpret_cast<unsigned*>(y + at * D + h * 64 + j * 8 + 2 * t) =
              pack<T>(values[h][j][2 * i] / sum, values[h][j][2 * i + 1] / sum);
    }
  }

  // scores = q @ k^T, asynchronous.
  __device__ __forceinline__ void begin_scores(float (&scores)[8][4], const unsigned (&queries)[D / 16][4],
                                               const char* stage) const {
    const unsigned long long k = wgmma_rows(stage);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < D / 16; s++) wgmma(scores, queries[s], k + (s / 4 * HALF + s % 4 * 32) / 16, s > 0, T());
    wgmma_commit();
  }

  // values = p @ v, plus what they are if `add`, asynchronous.
  __device__ __forceinline__ void begin_values(float (&values)[D / 64][8][4], const unsigned (&p)[BK / 16][4],
                                               const char* tile, int add) const {
    const unsigned long long v = wgmma_rows(tile);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < BK / 16; s++)
#pragma unroll
      for (int h = 0; h < D / 64; h++)
        wgmma_along(values[h], p[s], v + (h * HALF + s * 16 * 128) / 16, s > 0 || add, T());
    wgmma_commit();
  }
};

}  // namespace qrun
