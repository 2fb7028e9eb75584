// sdpa for many new tokens by mma.sync, where sdpa_wgmma.cuh does not serve (after FlashAttention-2, Dao, 2023).
// A block takes BQ = 64 queries of one head, 16 a warp, and walks over tiles of BK keys; two tiles of k and v are in
// shared memory, one being used, one on its way. Rows there are padded by 16 bytes so that the eight rows of an
// 8 x 8 matrix lie in different banks.
//
//   scores (16, BK) = q (16, D) @ k (BK, D)^T     q in registers as operand a, k as operand b
//   values (16, D) += p (16, BK) @ v (BK, D)      the scores' registers, packed, are operand a;
//                                                 v is operand b, transposed on the way
#pragma once

#include "../common/ptx.cuh"
#include "softmax_tile.cuh"

namespace qrun {

template <typename T, int D, int BK>
struct SdpaPrefill {
  static constexpr int WARPS = 4, BQ = 16 * WARPS, PITCH = D + 8, THREADS = 32 * WARPS;
  static constexpr int TILE = BK * PITCH;  // elements of a tile of k or v

  const T* q;         // (B, H, L, D)
  const T* k_cache;   // (B, Hkv, capacity, D)
  const T* v_cache;   // (B, Hkv, capacity, D)
  const int* offset;  // (1,)
  T* y;               // (B * L, H * D)
  float scale, softcap;
  int window, heads, kv_heads, length, capacity;

  // Keys first .. first+BK-1 and their values on their way into shared memory; zeros from `end` on.
  __device__ __forceinline__ void fetch(T* shared, int first, int end) const {
    const int kv = blockIdx.x / (heads / kv_heads);
    const long long head = static_cast<long long>(blockIdx.z) * kv_heads + kv;
    for (int i = threadIdx.x; i < BK * (D / 8); i += THREADS) {
      const int row = i / (D / 8), at = i % (D / 8) * 8;
      const bool valid = first + row < end;
      const long long from = (head * capacity + (valid ? first + row : 0)) * D + at;
      copy_async(shared + row * PITCH + at, k_cache + from, valid);
      copy_async(shared + TILE + row * PITCH + at, v_cache + from, valid);
    }
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
    T* shared = reinterpret_cast<T*>(shared_memory());  // [2][k, v][BK][PITCH]

    const long long head = static_cast<long long>(blockIdx.z) * heads + blockIdx.x;
    unsigned queries[D / 16][4];  // operand a: rows g and g+8 of this warp's 16
    const int row[2] = {first_query + warp * 16 + g, first_query + warp * 16 + g + 8};
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const T* p = q + (head * length + row[i % 2]) * D + s * 16 + i / 2 * 8 + 2 * t;
        queries[s][i] = row[i % 2] < length ? *reinterpret_cast<const unsigned*>(p) : 0;
      }

    SoftmaxRows<T> rows{scale, softcap};
    float values[D / 8][4] = {};
    fetch(shared, begin, end);
    copy_async_commit();
    for (int first = begin, stage = 0; first < end; first += BK, stage ^= 1) {
      fetch(shared + (stage ^ 1) * 2 * TILE, first + BK, end);
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      const T* k = shared + stage * 2 * TILE;
      float scores[BK / 8][4] = {};
      multiply_k(scores, queries, k);
      rows.cap(scores);
      const int lowest = position + warp * 16;  // of the warp's 16 queries
      if (first + BK - 1 > lowest || (window && first + window <= lowest + 15))
        hide(scores, first, lowest + g, window);
      unsigned p[BK / 16][4];
      float factor[2];
      rows.weigh(p, scores, factor);
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) values[n][e] *= factor[e / 2];
      multiply_v(values, p, k + TILE);
      __syncthreads();  // the tile may be overwritten
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = rows.total(i);
      if (row[i] >= length) continue;
      const long long at = (static_cast<long long>(blockIdx.z) * length + row[i]) * heads + blockIdx.x;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<unsigned*>(y + at * D + n * 8 + 2 * t) =
            pack<T>(values[n][2 * i] / sum, values[n][2 * i + 1] / sum);
    }
  }

  // scores (16, BK) = q @ k^T
  __device__ __forceinline__ void multiply_k(float (&scores)[BK / 8][4],
                                             const unsigned (&queries)[D / 16][4], const T* k) const {
    const int lane = threadIdx.x % 32;
    const T* row = k + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
      for (int n = 0; n < BK / 8; n += 2) {
        unsigned b[4];  // keys 8n ..: k 0-7, 8-15; keys 8n+8 ..: the same
        load_matrices(b, row + n * 8 * PITCH + s * 16);
        mma(scores[n], queries[s], b[0], b[1], T());
        mma(scores[n + 1], queries[s], b[2], b[3], T());
      }
  }

  // values (16, D) += p @ v
  __device__ __forceinline__ void multiply_v(float (&values)[D / 8][4], const unsigned (&p)[BK / 16][4],
                                             const T* v) const {
    const int lane = threadIdx.x % 32;
    const T* row = v + (lane / 8 % 2 * 8 + lane % 8) * PITCH + lane / 16 * 8;
#pragma unroll
    for (int s = 0; s < BK / 16; s++)
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        unsigned b[4];  // columns 8n ..: keys 0-7, 8-15; columns 8n+8 ..: the same
        load_matrices_transposed(b, row + s * 16 * PITCH + n * 8);
        mma(values[n], p[s], b[0], b[1], T());
        mma(values[n + 1], p[s], b[2], b[3], T());
      }
  }
};

}  // namespace qrun
