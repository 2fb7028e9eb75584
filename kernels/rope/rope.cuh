// rope: rotates q and k by their positions and appends k and v to the caches, in place. A warp takes one
// head of one token; the norm of a head needs no more than its lanes.
//
//   pair i of a head: elements i and i + R/2, rotated by table[position, i] = (cos, sin)
//   elements R .. D-1 pass as they are
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"

namespace qrun {

// T: type of qkv and q; C: of the caches; QN, KN: of the norms' weights.
template <typename T, typename C, typename QN, typename KN>
struct Rope {
  const T* qkv;        // (B * L, (H + 2 * Hkv) * D)
  const int* offset;   // (1,)
  const float* table;  // (capacity or more, R / 2, 2)
  const QN* q_norm;    // (D,) or null
  const KN* k_norm;    // (D,) or null
  float eps;
  T* q;         // (B, H, L, D)
  C* k_cache;   // (B, Hkv, capacity, D)
  C* v_cache;   // (B, Hkv, capacity, D)
  int heads, kv_heads, length, d, half, capacity;

  template <typename O, typename W>
  __device__ __forceinline__ void rotate(const T* in, const W* weight, const float* angles, O* out) const {
    const int lane = threadIdx.x % 32;
    float scale = 1;
    if (weight) {
      float sum = 0;
      for (int i = lane; i < d; i += 32) sum += to_float(in[i]) * to_float(in[i]);
      scale = rsqrtf(warp_sum(sum) / d + eps);
    }
    auto element = [&](int i) {
      return weight ? to_float(in[i]) * scale * to_float(weight[i]) : to_float(in[i]);
    };
    for (int i = lane; i < half; i += 32) {
      const float c = angles[2 * i], s = angles[2 * i + 1], a = element(i), b = element(i + half);
      out[i] = from_float<O>(a * c - b * s);
      out[i + half] = from_float<O>(b * c + a * s);
    }
    for (int i = 2 * half + lane; i < d; i += 32) out[i] = from_float<O>(element(i));
  }

  // Grid: x over heads of q, k, v, one a warp; y over tokens.
  __device__ __forceinline__ void run() const {
    start_next_kernel();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % 32, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= heads + 2 * kv_heads) return;
    const int batch = blockIdx.y / length, l = blockIdx.y % length, position = *offset + l;
    if (position >= capacity) return;  // the caller's fault; nothing outside the caches is written
    const T* in = qkv + (static_cast<long long>(blockIdx.y) * (heads + 2 * kv_heads) + head) * d;
    const float* angles = table + static_cast<long long>(position) * half * 2;
    if (head < heads) {
      rotate(in, q_norm, angles, q + ((static_cast<long long>(batch) * heads + head) * length + l) * d);
      return;
    }
    const int kv = (head - heads) % kv_heads;
    const long long row = (static_cast<long long>(batch) * kv_heads + kv) * capacity + position;
    if (head < heads + kv_heads) {
      rotate(in, k_norm, angles, k_cache + row * d);
    } else {
      for (int i = lane; i < d; i += 32) v_cache[row * d + i] = from_float<C>(to_float(in[i]));
    }
  }
};

}  // namespace qrun
