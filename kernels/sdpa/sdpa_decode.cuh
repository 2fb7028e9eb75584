// sdpa for few new tokens, and for any type and head size: attention split over the context.
//
// The queries that share a kv head (H / Hkv heads times L tokens) are rows; a block takes ROWS of them
// and one of `splits` equal stretches of the keys that they may see. Eight lanes share a key, each with
// every eighth VEC elements of D; so a warp works on four keys at once, UNROLL times. Every such group
// of lanes keeps softmax sums of its own; they meet at the end of the block, and the splits' sums in
// sdpa_merge.
#pragma once

#include "../common/types.cuh"

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "softmax.cuh"

namespace qrun {

template <typename T, typename C, int D, int VEC, int ROWS, int WARPS>
struct SdpaDecode {
  static constexpr int LANES = 8, KEYS = 32 / LANES * WARPS;     // keys a block works on at once
  static constexpr int RUNS = (D + LANES * VEC - 1) / (LANES * VEC);  // runs of VEC elements a lane
  static constexpr int OWN = RUNS * VEC, UNROLL = OWN <= 16 ? 2 : 1;

  const T* q;         // (B, H, L, D)
  const C* k_cache;   // (B, Hkv, capacity, D)
  const C* v_cache;   // (B, Hkv, capacity, D)
  const int* offset;  // (1,)
  float scale, softcap;
  int window, heads, kv_heads, length, capacity, splits;

  // Where a row of this block comes from: head and token.
  __device__ __forceinline__ int group() const { return heads / kv_heads; }
  __device__ __forceinline__ int first_row() const { return blockIdx.z * ROWS; }
  __device__ __forceinline__ int token(int row) const { return row / group(); }
  __device__ __forceinline__ long long query(int row) const {  // index over (B, H, L)
    const int batch = blockIdx.y / kv_heads, kv = blockIdx.y % kv_heads;
    const int head = kv * group() + row % group();
    return (static_cast<long long>(batch) * heads + head) * length + token(row);
  }

  __device__ __forceinline__ void load_own(float (&v)[OWN], const C* p) const {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < RUNS; i++) {
      float r[VEC] = {};
      const int at = (i * LANES + lane) * VEC;
      if (at < D) load(r, p + at);
#pragma unroll
      for (int e = 0; e < VEC; e++) v[i * VEC + e] = r[e];
    }
  }

  // values (B * H * L, splits, D) and stats (B * H * L, splits, 2), or y (B * L, H * D) if splits is 1.
  // Grid: x splits, y B * Hkv, z rows / ROWS.
  __device__ __forceinline__ void run(T* y, float* values, float* stats) const {
    start_next_kernel();
    wait_for_previous_kernel();
    const int lane = threadIdx.x % LANES, rows = min(ROWS, group() * length - first_row());
    const int seen_first = token(first_row()), seen_last = token(first_row() + rows - 1);
    const int begin = window ? max(0, *offset + seen_first - window + 1) : 0;
    const int end = min(*offset + seen_last + 1, capacity);
    const int per_split = max((end - begin + splits - 1) / splits, 0);
    const int from = begin + blockIdx.x * per_split, to = min(end, from + per_split);
    if (from >= to) {
      if (splits > 1 && threadIdx.x < rows) {
        float* s = stats + (query(first_row() + threadIdx.x) * splits + blockIdx.x) * 2;
        s[0] = NOTHING, s[1] = 0;
      }
      return;
    }

    float queries[ROWS][OWN];
    int newest[ROWS];
    Softmax<OWN> state[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = first_row() + min(r, rows - 1);  // rows beyond the last repeat it
      const T* p = q + query(row) * D;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int at = (i / VEC * LANES + lane) * VEC + i % VEC;
        queries[r][i] = at < D ? to_float(p[at]) * scale : 0.0f;
      }
      newest[r] = *offset + token(row);
    }

    const C* k = k_cache + static_cast<long long>(blockIdx.y) * capacity * D;
    const C* v = v_cache + static_cast<long long>(blockIdx.y) * capacity * D;
    // All lanes of a warp go round equally often: they exchange sums.
    for (int base = from; base < to; base += KEYS * UNROLL) {
      float keys[UNROLL][OWN] = {}, vals[UNROLL][OWN] = {}, scores[UNROLL][ROWS];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int key = base + u * KEYS + threadIdx.x / LANES;
        if (key < to) {
          load_own(keys[u], k + static_cast<long long>(key) * D);
          load_own(vals[u], v + static_cast<long long>(key) * D);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int key = base + u * KEYS + threadIdx.x / LANES;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float dot = 0;
#pragma unroll
          for (int i = 0; i < OWN; i++) dot = fmaf(queries[r][i], keys[u][i], dot);
          dot = warp_sum<LANES>(dot);
          if (softcap != 0) dot = softcap * tanhf(dot / softcap);
          const bool seen = key < to && key <= newest[r] && (!window || key > newest[r] - window);
          scores[u][r] = seen ? dot * LOG2E : NOTHING;
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float highest = scores[0][r];
#pragma unroll
        for (int u = 1; u < UNROLL; u++) highest = fmaxf(highest, scores[u][r]);
        state[r].raise(highest);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
          const float p = Softmax<1>::factor(scores[u][r], state[r].max);
          state[r].sum += p;
#pragma unroll
          for (int i = 0; i < OWN; i++) state[r].values[i] = fmaf(p, vals[u][i], state[r].values[i]);
        }
      }
    }
    collect(state, rows, y, values, stats);
  }

  // The sums of all groups of lanes -> the block's result. Shared: per warp and row max, sum, D values.
  __device__ __forceinline__ void collect(Softmax<OWN> (&state)[ROWS], int rows, T* y, float* values,
                                          float* stats) const {
    float* shared = reinterpret_cast<float*>(shared_memory());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      state[r].merge(8);
      state[r].merge(16);
      float* out = shared + (warp * ROWS + r) * (D + 2);
      if (lane >= LANES) continue;
      if (lane == 0) out[0] = state[r].max, out[1] = state[r].sum;
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int at = (i / VEC * LANES + lane) * VEC + i % VEC;
        if (at < D) out[2 + at] = state[r].values[i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * D; i += blockDim.x) {
      const int r = i / D, d = i % D, row = first_row() + r;
      const float* in = shared + r * (D + 2);
      float highest = NOTHING, sum = 0, value = 0;
      for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, in[w * ROWS * (D + 2)]);
      for (int w = 0; w < WARPS; w++) {
        const float* part = in + w * ROWS * (D + 2);
        const float f = Softmax<1>::factor(part[0], highest);
        sum = fmaf(part[1], f, sum), value = fmaf(part[2 + d], f, value);
      }
      if (splits == 1) {
        const int head = blockIdx.y % kv_heads * group() + row % group();
        const long long at = static_cast<long long>(blockIdx.y / kv_heads) * length + token(row);
        y[(at * heads + head) * D + d] = from_float<T>(value / sum);
      } else {
        const long long at = query(row) * splits + blockIdx.x;
        values[at * D + d] = value;
        if (d == 0) stats[at * 2] = highest, stats[at * 2 + 1] = sum;
      }
    }
  }
};

// What the splits left -> y (B * L, H * D). Grid: B * H * L blocks, a thread for each of D (at most 1024).
template <int D, typename T>
__device__ __forceinline__ void sdpa_merge(const float* values, const float* stats, T* y, int splits,
                                           int heads, int length) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int d = threadIdx.x, l = blockIdx.x % length, head = blockIdx.x / length % heads;
  const int batch = blockIdx.x / length / heads;
  if (d >= D) return;
  values += static_cast<long long>(blockIdx.x) * splits * D;
  stats += static_cast<long long>(blockIdx.x) * splits * 2;
  float highest = NOTHING, sum = 0, value = 0;
  for (int s = 0; s < splits; s++) highest = fmaxf(highest, stats[2 * s]);
  for (int s = 0; s < splits; s++) {
    const float f = Softmax<1>::factor(stats[2 * s], highest);
    if (f == 0) continue;  // a split without keys has written no values
    sum = fmaf(stats[2 * s + 1], f, sum), value = fmaf(values[s * D + d], f, value);
  }
  y[((static_cast<long long>(batch) * length + l) * heads + head) * D + d] = from_float<T>(value / sum);
}

}  // namespace qrun
