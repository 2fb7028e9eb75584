// attend: one new token's rotation, its append to the caches, and its attention, in one launch. What rope
// and sdpa do in three (rope, splits, merge) costs more in starts and ends than in work.
//
// The queries that share a kv head are rows; a cluster of SPLITS blocks takes ROWS of them, each block one
// stretch of the keys. Keys and values are under way before the kernel in front has ended: of what that
// one writes only qkv is read. Each block rotates its rows of q by itself; the one whose stretch ends with
// the new token also rotates its key and appends it and v. Eight lanes share a key, as in
// sdpa_decode.cuh. At the end the blocks' sums meet through distributed shared memory.
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../sdpa/softmax.cuh"

namespace qrun {

// T: type of qkv, y and the caches; QN, KN: of the norms' weights. HALF: pairs of a head that are rotated.
template <typename T, typename QN, typename KN, int D, int HALF, int ROWS, int WARPS, int SPLITS>
struct Attend {
  static constexpr int VEC = 8, LANES = 8, THREADS = 32 * WARPS;
  static constexpr int RUNS = (D + LANES * VEC - 1) / (LANES * VEC);  // runs of VEC elements a lane
  static constexpr int OWN = RUNS * VEC, UNROLL = OWN <= 16 ? 2 : 1;
  static constexpr int AT_ONCE = 32 / LANES * WARPS * UNROLL;  // keys a block works on at once

  const T* qkv;        // (B, (H + 2 * Hkv) * D)
  const int* offset;   // (1,)
  const float* table;  // (capacity or more, HALF, 2)
  const QN* q_norm;    // (D,) or null
  const KN* k_norm;    // (D,) or null
  float eps, scale, softcap;
  int window;
  T* y;         // (B, H * D)
  T* k_cache;   // (B, Hkv, capacity, D)
  T* v_cache;   // (B, Hkv, capacity, D)
  int heads, kv_heads, capacity;

  // Shared memory: the rotated queries, the new key, the new value, (ROWS + 2, D); the warps' sums,
  // [warp][row] of max, sum, D values; the block's, [row] of the same.
  static constexpr int SHARED = ((ROWS + 2) * D + (WARPS + 1) * ROWS * (D + 2)) * 4;
  __device__ __forceinline__ float* head(int row) const {
    return reinterpret_cast<float*>(shared_memory()) + row * D;
  }
  __device__ __forceinline__ float* sums(int warp, int row) const {
    return head(ROWS + 2) + (warp * ROWS + row) * (D + 2);
  }

  // The angles of a position for a lane's pairs lane, lane + 32, ..
  static constexpr int PAIRS = HALF == 0 ? 1 : (HALF + 31) / 32;
  struct Angles {
    float2 at[PAIRS];
  };

  __device__ __forceinline__ Angles angles(int position) const {
    Angles a;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int i = p * 32 + threadIdx.x % 32;
      const float* from = table + (static_cast<long long>(position) * HALF + i) * 2;
      a.at[p] = i < HALF ? *reinterpret_cast<const float2*>(from) : make_float2(1, 0);
    }
    return a;
  }

  // One head of the new token by a warp: normed, rotated, to shared memory in float32.
  template <typename W>
  __device__ __forceinline__ void rotate(const T* in, const W* weight, const Angles& angles, float* out) const {
    constexpr int REST = D - 2 * HALF, MORE = REST == 0 ? 1 : (REST + 31) / 32;
    const int lane = threadIdx.x % 32;
    float a[PAIRS], b[PAIRS], c[MORE], sum = 0;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int i = p * 32 + lane;
      a[p] = i < HALF ? to_float(in[i]) : 0.0f, b[p] = i < HALF ? to_float(in[i + HALF]) : 0.0f;
      sum += a[p] * a[p] + b[p] * b[p];
    }
#pragma unroll
    for (int p = 0; p < MORE; p++) {
      const int i = 2 * HALF + p * 32 + lane;
      c[p] = i < D ? to_float(in[i]) : 0.0f;
      sum += c[p] * c[p];
    }
    const float r = weight ? rsqrtf(warp_sum(sum) / D + eps) : 1.0f;
    const auto normed = [&](float v, int i) { return weight ? v * r * to_float(weight[i]) : v; };
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int i = p * 32 + lane;
      if (i >= HALF) continue;
      const float first = normed(a[p], i), second = normed(b[p], i + HALF);
      out[i] = first * angles.at[p].x - second * angles.at[p].y;
      out[i + HALF] = second * angles.at[p].x + first * angles.at[p].y;
    }
#pragma unroll
    for (int p = 0; p < MORE; p++) {
      const int i = 2 * HALF + p * 32 + lane;
      if (i < D) out[i] = normed(c[p], i);
    }
  }

  // A head of the new token, rounded, into a cache and to where `newest` finds it, by a warp.
  __device__ __forceinline__ void append(float* from, T* to) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (D + 31) / 32; i++) {
      const int d = i * 32 + threadIdx.x % 32;
      const T v = from_float<T>(d < D ? from[d] : 0.0f);
      __syncwarp();
      if (d < D) reinterpret_cast<T*>(from)[d] = v;  // half as long: what is still to be read stays
      if (d < D && blockIdx.z == 0) to[d] = v;
    }
  }

  // A lane's share of UNROLL keys or values, as it lies in memory.
  struct Raw {
    uint4 at[UNROLL][RUNS];
  };

  __device__ __forceinline__ void fetch(Raw& raw, const T* cache, int base, int to) const {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int i = 0; i < RUNS; i++) {
        const int key = base + (u * THREADS + threadIdx.x) / LANES, d = (i * LANES + lane) * VEC;
        raw.at[u][i] = make_uint4(0, 0, 0, 0);
        if (key < to && d < D)
          raw.at[u][i] = *reinterpret_cast<const uint4*>(cache + static_cast<long long>(key) * D + d);
      }
  }

  // The new token's, if it is one of them.
  __device__ __forceinline__ void newest(Raw& raw, const float* head, int base, int position) const {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int i = 0; i < RUNS; i++) {
        const int key = base + (u * THREADS + threadIdx.x) / LANES, d = (i * LANES + lane) * VEC;
        if (key == position && d < D)
          raw.at[u][i] = *reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(head) + d);
      }
  }

  __device__ __forceinline__ static void unpack_own(float (&v)[OWN], const uint4 (&raw)[RUNS]) {
#pragma unroll
    for (int i = 0; i < RUNS; i++) {
      float e[VEC];
      load(e, reinterpret_cast<const T*>(&raw[i]));
#pragma unroll
      for (int j = 0; j < VEC; j++) v[i * VEC + j] = e[j];
    }
  }

  // A lane's share of a head in shared memory.
  __device__ __forceinline__ void load_own(float (&v)[OWN], const float* from) const {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int d = (i / VEC * LANES + threadIdx.x % LANES) * VEC + i % VEC;
      v[i] = d < D ? from[d] : 0.0f;
    }
  }

  // The score of a key that eight lanes share; in units of log 2, NOTHING where there is none.
  __device__ __forceinline__ float score(const float (&query)[OWN], const float (&key)[OWN], bool seen) const {
    float dot = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) dot = fmaf(query[i], key[i], dot);
    dot = warp_sum<LANES>(dot) * scale;
    if (softcap != 0) dot = softcap * tanhf(dot / softcap);
    return seen ? dot * LOG2E : NOTHING;
  }

  // Grid: x SPLITS (a cluster), y B * Hkv, z the rows of a kv head / ROWS.
  __device__ __forceinline__ void run() const {
    start_next_kernel();
    const int group = heads / kv_heads, batch = blockIdx.y / kv_heads, kv = blockIdx.y % kv_heads;
    const int first = blockIdx.z * ROWS, rows = min(ROWS, group - first);
    const int warp = threadIdx.x / 32, split = blockIdx.x, position = *offset;
    if (position >= capacity) return;  // the caller's fault; nothing outside the caches is written
    const int begin = window ? max(0, position - window + 1) : 0;
    const int each = (position - begin + SPLITS) / SPLITS;  // the new one counts too
    const int from = begin + split * each, to = min(position + 1, from + each);

    const long long cache = static_cast<long long>(blockIdx.y) * capacity * D;
    Raw keys, values;
    fetch(keys, k_cache + cache, from, min(to, position));
    fetch(values, v_cache + cache, from, min(to, position));
    const bool last = from <= position && position < to;
    const Angles turn = angles(position);
    wait_for_previous_kernel();

    const T* token = qkv + static_cast<long long>(batch) * (heads + 2 * kv_heads) * D;
    if (warp < rows) {
      rotate(token + (kv * group + first + warp) * D, q_norm, turn, head(warp));
    } else if (last && warp == ROWS) {
      rotate(token + (heads + kv) * D, k_norm, turn, head(ROWS));
      append(head(ROWS), k_cache + cache + static_cast<long long>(position) * D);
    } else if (last && warp == ROWS + 1) {
      for (int i = threadIdx.x % 32; i < D; i += 32)
        head(ROWS + 1)[i] = to_float(token[(heads + kv_heads + kv) * D + i]);
      append(head(ROWS + 1), v_cache + cache + static_cast<long long>(position) * D);
    }
    __syncthreads();

    float queries[ROWS][OWN];
    Softmax<OWN> state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) load_own(queries[r], head(min(r, rows - 1)));
    // All lanes of a warp go round equally often: they exchange sums.
    for (int base = from; base < to; base += AT_ONCE) {
      Raw now_keys = keys, now_values = values;
      if (base + AT_ONCE < to) {
        fetch(keys, k_cache + cache, base + AT_ONCE, min(to, position));
        fetch(values, v_cache + cache, base + AT_ONCE, min(to, position));
      }
      if (last) {
        newest(now_keys, head(ROWS), base, position);
        newest(now_values, head(ROWS + 1), base, position);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const bool seen = base + (u * THREADS + int(threadIdx.x)) / LANES < to;
        float key[OWN], value[OWN];
        unpack_own(key, now_keys.at[u]);
        unpack_own(value, now_values.at[u]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) state[r].add(score(queries[r], key, seen), value);
      }
    }
    collect(state, rows, batch * heads + kv * group + first);
  }

  // max, sum and values of several parts, `part(i)` of them, joined for element d.
  struct Joined {
    float max = NOTHING, sum = 0, value = 0;
  };
  template <int COUNT, typename F>
  __device__ __forceinline__ static Joined join(int d, F part) {
    float top[COUNT], sum[COUNT], value[COUNT];
    Joined all;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      top[i] = part(i, 0), sum[i] = part(i, 1), value[i] = part(i, 2 + d);
      all.max = fmaxf(all.max, top[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float f = Softmax<1>::factor(top[i], all.max);
      all.sum = fmaf(sum[i], f, all.sum), all.value = fmaf(value[i], f, all.value);
    }
    return all;
  }

  // The lanes' sums -> the warps', the block's, the cluster's, y. row0: of y, (B * H, D).
  __device__ __forceinline__ void collect(Softmax<OWN> (&state)[ROWS], int rows, int row0) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      state[r].merge(8);
      state[r].merge(16);
      float* out = sums(warp, r);
      if (lane >= LANES) continue;
      if (lane == 0) out[0] = state[r].max, out[1] = state[r].sum;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int d = (i / VEC * LANES + lane) * VEC + i % VEC;
        if (d < D) out[2 + d] = state[r].values[i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * D; i += THREADS) {
      const int r = i / D, d = i % D;
      const Joined all = join<WARPS>(d, [&](int w, int at) { return sums(w, r)[at]; });
      float* out = sums(WARPS, r);
      out[2 + d] = all.value;
      if (d == 0) out[0] = all.max, out[1] = all.sum;
    }
    cluster_barrier();
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < rows * D; i += SPLITS * THREADS) {
      const int r = i / D, d = i % D;
      const Joined all =
          join<SPLITS>(d, [&](int s, int at) { return cluster_load(sums(WARPS, r) + at, s); });
      y[static_cast<long long>(row0 + r) * D + d] = from_float<T>(all.value / all.sum);
    }
    cluster_barrier();  // no block ends while another reads its sums
  }
};

}  // namespace qrun
