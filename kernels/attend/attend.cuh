// attend: one new token's rotation, its append to the caches, and its attention, in one launch. What rope
// and sdpa do in three (rope, splits, merge) costs more in starts and ends than in work.
//
// The queries that share a kv head are rows of a matrix, up to 8 of them; a cluster of SPLITS blocks takes
// them, each block one stretch of the keys. Chunks of 64 keys and values come into shared memory, the last
// ones first, and are under way before the kernel in front has ended: of what that one writes only qkv is
// read. Each block rotates the rows of q by itself; the one whose stretch ends with the new token also
// rotates its key and appends it and v. Of a chunk a pair of warps takes 16 keys, by tensor cores:
//
//   scores (8, 16)    = q (8, D) @ keys (16, D)^T         both warps of the pair
//   values (8, D / 2) += exp(scores) (8, 16) @ v (16, D)   each one half of D
//
// At the end the warps' sums meet in shared memory, and each block sends its own to the blocks that write
// y, by distributed shared memory. All of it is short code: a layer's kernels are fetched anew each time.
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../sdpa/softmax.cuh"

namespace qrun {

// T: type of qkv, y and the caches; QN, KN: of the norms' weights. HALF: pairs of a head that are rotated.
template <typename T, typename QN, typename KN, int D, int HALF, int ROWS, int STAGES, int SPLITS>
struct Attend {
  static constexpr int WARPS = 8, THREADS = 32 * WARPS, QUARTERS = WARPS / 2, KEYS = 16;
  static constexpr int CHUNK = QUARTERS * KEYS;                     // keys
  static constexpr int PD = (D + 31) / 32 * 32, PITCH = PD + 8;     // of a head in shared memory, elements
  static constexpr int MOST = (ROWS * D + SPLITS - 1) / SPLITS;     // elements of y that a block writes

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

  // Shared memory: the queries, (8, PITCH); STAGES chunks of keys, then values, (CHUNK, PITCH) each; the
  // quarters' sums, [quarter][row] of max, sum, D values; from all blocks, [split][row] of max and sum, and
  // [split] of the values that this one writes.
  static constexpr int SHARED = (8 + STAGES * 2 * CHUNK) * PITCH * 2 +
                                (QUARTERS * ROWS * (D + 2) + SPLITS * (ROWS * 2 + MOST)) * 4;
  __device__ __forceinline__ T* query(int row) const { return reinterpret_cast<T*>(shared_memory()) + row * PITCH; }
  __device__ __forceinline__ T* key(int stage, int row) const { return query(8 + stage * 2 * CHUNK + row); }
  __device__ __forceinline__ T* value(int stage, int row) const { return key(stage, CHUNK + row); }
  __device__ __forceinline__ float* sums(int quarter, int row) const {
    return reinterpret_cast<float*>(key(STAGES, 0)) + (quarter * ROWS + row) * (D + 2);
  }
  __device__ __forceinline__ float* heads_of(int split) const { return sums(QUARTERS, 0) + split * ROWS * 2; }
  __device__ __forceinline__ float* values_of(int split) const { return heads_of(SPLITS) + split * MOST; }

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

  // One head of the new token by a warp: normed, rotated, rounded, to shared memory and to `kept`, if any.
  template <typename W>
  __device__ __forceinline__ void rotate(const T* in, const W* weight, const Angles& angles, T* out, T* kept) const {
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
    const auto put = [&](float v, int i) {
      out[i] = from_float<T>(v);
      if (kept) kept[i] = from_float<T>(v);
    };
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      const int i = p * 32 + lane;
      if (i >= HALF) continue;
      const float first = normed(a[p], i), second = normed(b[p], i + HALF);
      put(first * angles.at[p].x - second * angles.at[p].y, i);
      put(second * angles.at[p].x + first * angles.at[p].y, i + HALF);
    }
#pragma unroll
    for (int p = 0; p < MORE; p++) {
      const int i = 2 * HALF + p * 32 + lane;
      if (i < D) put(normed(c[p], i), i);
    }
    for (int i = D + lane; i < PD; i += 32) out[i] = from_float<T>(0);
  }

  // Of a stretch from .. to: chunk c is the CHUNK keys in front of c chunks in front of `to`.
  struct Stretch {
    int from, to, position;
    __device__ __forceinline__ int first(int chunk) const { return to - (chunk + 1) * CHUNK; }
    __device__ __forceinline__ int chunks() const { return from < to ? (to - from + CHUNK - 1) / CHUNK : 0; }
    __device__ __forceinline__ bool has(int key) const { return from <= key && key < to; }
  };

  // A chunk on its way into its stage: zeros where there is no key, nothing where the new one goes.
  __device__ __forceinline__ void fetch(const Stretch& stretch, int chunk, const T* keys, const T* values) const {
    constexpr int UNITS = PD / 8;
    if (chunk < stretch.chunks())
#pragma unroll 4
      for (int i = threadIdx.x; i < CHUNK * UNITS; i += THREADS) {
        const int row = i / UNITS, d = i % UNITS * 8, at = stretch.first(chunk) + row;
        if (at == stretch.position && d < D) continue;
        const bool valid = stretch.has(at) && d < D;
        const long long from = valid ? static_cast<long long>(at) * D + d : 0;
        copy_async(key(chunk % STAGES, row) + d, keys + from, valid);
        copy_async(value(chunk % STAGES, row) + d, values + from, valid);
      }
    copy_async_commit();
  }

  // A lane's sums: of row lane / 4, of every eighth of its warp's half of D two elements.
  struct State {
    float max = NOTHING, sum = 0, values[PD / 16][4] = {};
  };

  __device__ __forceinline__ void work(State& state, const Stretch& stretch, int chunk) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp / 2 * KEYS, half = warp % 2;
    const int stage = chunk % STAGES;
    float scores[2][4] = {};
#pragma unroll
    for (int d = 0; d < PD; d += 32) {
      unsigned q[4];
      load_matrices(q, query(lane % 8) + d + lane / 8 * 8);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        unsigned k[4];
        load_matrices(k, key(stage, first + n * 8 + lane % 8) + d + lane / 8 * 8);
        mma(scores[n], {q[0], 0, q[1], 0}, k[0], k[1], T());
        mma(scores[n], {q[2], 0, q[3], 0}, k[2], k[3], T());
      }
    }
    float s[4], top = state.max;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v = scores[i / 2][i % 2] * scale;
      if (softcap != 0) v = softcap * tanhf(v / softcap);
      s[i] = stretch.has(stretch.first(chunk) + first + i / 2 * 8 + lane % 4 * 2 + i % 2) ? v * LOG2E : NOTHING;
      top = fmaxf(top, s[i]);
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float before = factor(state.max, top);
    state.max = top, state.sum *= before;
    const unsigned p[4] = {pack<T>(factor(s[0], top), factor(s[1], top)), 0,
                           pack<T>(factor(s[2], top), factor(s[3], top)), 0};
    const float2 a = unpack<T>(p[0]), b = unpack<T>(p[2]);
    state.sum += a.x + a.y + b.x + b.y;
#pragma unroll
    for (int j = 0; j < PD / 32; j++) {
      unsigned v[4];
      load_matrices_transposed(v, value(stage, first + lane % 16) + half * (PD / 2) + j * 16 + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float(&sum)[4] = state.values[2 * j + n];
        sum[0] *= before, sum[1] *= before;
        mma(sum, p, v[2 * n], v[2 * n + 1], T());
      }
    }
  }

  // Grid: x SPLITS (a cluster), y B * Hkv, z the rows of a kv head / ROWS.
  __device__ __forceinline__ void run() const {
    start_next_kernel();
    const int group = heads / kv_heads, batch = blockIdx.y / kv_heads, kv = blockIdx.y % kv_heads;
    const int first = blockIdx.z * ROWS, rows = min(ROWS, group - first);
    const int warp = threadIdx.x / 32, split = blockIdx.x, position = *offset;
    if (position >= capacity) return;  // the caller's fault; nothing outside the caches is written
    cluster_arrive();                  // this block is there: others may write to its shared memory
    const int begin = window ? max(0, position - window + 1) : 0;
    const int each = (position - begin + SPLITS) / SPLITS;  // the new one counts too
    const int from = begin + split * each;
    const Stretch stretch = {from, min(position + 1, from + each), position};

    const long long cache = static_cast<long long>(blockIdx.y) * capacity * D;
#pragma unroll
    for (int c = 0; c < STAGES - 1; c++) fetch(stretch, c, k_cache + cache, v_cache + cache);
    const Angles turn = angles(position);
    if (q_norm && threadIdx.x * 32 < D) prefetch(q_norm + threadIdx.x * 32), prefetch(k_norm + threadIdx.x * 32);
    wait_for_previous_kernel();

    const T* token = qkv + static_cast<long long>(batch) * (heads + 2 * kv_heads) * D;
    const long long place = cache + static_cast<long long>(position) * D;
    const bool appends = blockIdx.z == 0;
    // The rows of q, then the new key and value, which are the last of the first chunk.
    for (int row = warp; row < rows + (stretch.has(position) ? 2 : 0); row += WARPS) {
      if (row < rows) {
        rotate(token + (kv * group + first + row) * D, q_norm, turn, query(row), static_cast<T*>(nullptr));
      } else if (row == rows) {
        rotate(token + (heads + kv) * D, k_norm, turn, key(0, CHUNK - 1), appends ? k_cache + place : nullptr);
      } else {
        for (int i = threadIdx.x % 32; i < D; i += 32) {
          const T v = token[(heads + kv_heads + kv) * D + i];
          value(0, CHUNK - 1)[i] = v;
          if (appends) v_cache[place + i] = v;
        }
      }
    }

    State state;
    for (int c = 0; c < stretch.chunks(); c++) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();  // the chunk is there, and everybody is through with the one before
      fetch(stretch, c + STAGES - 1, k_cache + cache, v_cache + cache);
      work(state, stretch, c);
    }
    collect(state, rows, batch * heads + kv * group + first);
  }

  // max, sum and a value of several parts, `part(i)` of them, joined.
  struct Part {
    float max, sum, value;
  };
  template <int COUNT, typename F>
  __device__ __forceinline__ static Part join(F part) {
    Part parts[COUNT], all = {NOTHING, 0, 0};
#pragma unroll
    for (int i = 0; i < COUNT; i++) parts[i] = part(i), all.max = fmaxf(all.max, parts[i].max);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float f = factor(parts[i].max, all.max);
      all.sum = fmaf(parts[i].sum, f, all.sum), all.value = fmaf(parts[i].value, f, all.value);
    }
    return all;
  }

  // The warps' sums -> the block's, the cluster's, y. row0: of y, (B * H, D). Block s writes elements
  // s * own .. of the rows.
  __device__ __forceinline__ void collect(State& state, int rows, int row0) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, half = warp % 2;
    state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 1);
    state.sum += __shfl_xor_sync(0xffffffffu, state.sum, 2);
    if (row < rows) {
      float* out = sums(warp / 2, row);
      if (warp % 2 == 0 && lane % 4 == 0) out[0] = state.max, out[1] = state.sum;
#pragma unroll
      for (int j = 0; j < PD / 16; j++) {
        const int d = half * (PD / 2) + j * 8 + lane % 4 * 2;
        if (d < D) out[2 + d] = state.values[j][0], out[3 + d] = state.values[j][1];
      }
    }
    __syncthreads();
    cluster_wait();  // for all blocks to have started
    const int all = rows * D, own = (all + SPLITS - 1) / SPLITS, split = blockIdx.x;
    for (int i = threadIdx.x; i < all; i += THREADS) {
      const int r = i / D, d = i % D;
      const Part block = join<QUARTERS>([&](int q) { return Part{sums(q, r)[0], sums(q, r)[1], sums(q, r)[2 + d]}; });
      cluster_store(values_of(split) + i % own, i / own, block.value);
      if (d < SPLITS) {
        cluster_store(heads_of(split) + r * 2, d, block.max);
        cluster_store(heads_of(split) + r * 2 + 1, d, block.sum);
      }
    }
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < own && split * own + i < all; i += THREADS) {
      const int at = split * own + i, r = at / D;
      const Part sum = join<SPLITS>([&](int s) {
        return Part{heads_of(s)[r * 2], heads_of(s)[r * 2 + 1], values_of(s)[i]};
      });
      y[static_cast<long long>(row0) * D + at] = from_float<T>(sum.value / sum.sum);
    }
  }

  static __device__ __forceinline__ float factor(float max, float next) { return Softmax<1>::factor(max, next); }
};

}  // namespace qrun
