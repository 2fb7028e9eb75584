// sdpa for many new tokens, on tensor cores (after FlashAttention-2, Dao, 2023). A block takes BQ = 64
// queries of one head, 16 a warp, and walks over tiles of BK keys; two tiles of k and v are in shared
// memory, one being used, one on its way. Rows there are padded by 16 bytes so that the eight rows of
// an 8 x 8 matrix lie in different banks.
//
//   scores (16, BK) = q (16, D) @ k (BK, D)^T     q in registers as operand a, k as operand b
//   values (16, D) += p (16, BK) @ v (BK, D)      the scores' registers, packed, are operand a;
//                                                 v is operand b, transposed on the way
#pragma once

#include "../common/types.cuh"

#include "../common/ptx.cuh"

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

  static __device__ __forceinline__ float nothing() { return __int_as_float(0xff800000); }

  // Keys first .. first+BK-1 and their values on their way into shared memory; zeros from `end` on.
  __device__ __forceinline__ void fetch(T* shared, int first, int end) const {
    const int kv = blockIdx.y / (heads / kv_heads);
    const long long head = static_cast<long long>(blockIdx.z) * kv_heads + kv;
    for (int i = threadIdx.x; i < BK * (D / 8); i += THREADS) {
      const int row = i / (D / 8), at = i % (D / 8) * 8;
      const bool valid = first + row < end;
      const long long from = (head * capacity + (valid ? first + row : 0)) * D + at;
      copy_async(shared + row * PITCH + at, k_cache + from, valid);
      copy_async(shared + TILE + row * PITCH + at, v_cache + from, valid);
    }
  }

  // Grid: x tiles of queries, the last one first (it has the most keys); y H; z B.
  __device__ __forceinline__ void run() const {
    start_next_kernel();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int first_query = (gridDim.x - 1 - blockIdx.x) * BQ;
    const int position = *offset + first_query;  // of the block's first query
    const int end = min(min(position + BQ, *offset + length), capacity);
    const int begin = window ? max(0, position - window + 1) / BK * BK : 0;
    T* shared = reinterpret_cast<T*>(shared_memory());  // [2][k, v][BK][PITCH]

    const long long head = static_cast<long long>(blockIdx.z) * heads + blockIdx.y;
    unsigned queries[D / 16][4];  // operand a: rows g and g+8 of this warp's 16
    const int row[2] = {first_query + warp * 16 + g, first_query + warp * 16 + g + 8};
#pragma unroll
    for (int s = 0; s < D / 16; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const T* p = q + (head * length + row[i % 2]) * D + s * 16 + i / 2 * 8 + 2 * t;
        queries[s][i] = row[i % 2] < length ? *reinterpret_cast<const unsigned*>(p) : 0;
      }

    constexpr float LOG2 = 1.4426950408889634f;
    const bool curved = softcap != 0 || scale <= 0;  // else the scale is a factor of the exponents
    const float unit = curved ? LOG2 : scale * LOG2;
    float values[D / 8][4] = {}, highest[2] = {nothing(), nothing()}, sum[2] = {0, 0};
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
      if (curved) cap(scores);
      const int lowest = position + warp * 16;  // of the warp's 16 queries
      if (first + BK - 1 > lowest || (window && first + window <= lowest + 15)) mask(scores, first, lowest + g);
      unsigned p[BK / 16][4];
      softmax(p, scores, unit, highest, sum, values);
      multiply_v(values, p, k + TILE);
      __syncthreads();  // the tile may be overwritten
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      if (row[i] >= length) continue;
      const long long at = (static_cast<long long>(blockIdx.z) * length + row[i]) * heads + blockIdx.y;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<unsigned*>(y + at * D + n * 8 + 2 * t) =
            pack<T>(values[n][2 * i] / sum[i], values[n][2 * i + 1] / sum[i]);
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

  __device__ __forceinline__ void cap(float (&scores)[BK / 8][4]) const {
#pragma unroll
    for (int n = 0; n < BK / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[n][i] *= scale;
        if (softcap != 0) scores[n][i] = softcap * tanhf(scores[n][i] / softcap);
      }
  }

  // Takes out what a query may not see. place: position of row g.
  __device__ __forceinline__ void mask(float (&scores)[BK / 8][4], int first, int place) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < BK / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first + n * 8 + 2 * t + i % 2, at = place + i / 2 * 8;
        const bool seen = key <= at && (!window || key > at - window);
        if (!seen) scores[n][i] = nothing();
      }
  }

  // 2^(unit * scores) -> p as operand a; running maxima and sums, and the values so far brought to them.
  __device__ __forceinline__ void softmax(unsigned (&p)[BK / 16][4], const float (&scores)[BK / 8][4],
                                          float unit, float (&highest)[2], float (&sum)[2],
                                          float (&values)[D / 8][4]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float top = highest[i];
#pragma unroll
      for (int n = 0; n < BK / 8; n++) top = fmaxf(top, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float zero = top == nothing() ? 0.0f : top;  // a row that has seen no key yet
      const float factor = exp2_approx((highest[i] - zero) * unit), below = -zero * unit;
      highest[i] = top;
      sum[i] *= factor;
#pragma unroll
      for (int n = 0; n < D / 8; n++) values[n][2 * i] *= factor, values[n][2 * i + 1] *= factor;
#pragma unroll
      for (int n = 0; n < BK / 8; n++) {
        const float a = exp2_approx(scores[n][2 * i] * unit + below);
        const float b = exp2_approx(scores[n][2 * i + 1] * unit + below);
        sum[i] += a + b;
        p[n / 2][n % 2 * 2 + i] = pack<T>(a, b);
      }
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
