// sdpa for few new tokens (decode): out = softmax(q k^T) v over the cached keys.
//
// Bound by memory: keys and values are read once. The QUERIES rows of q that use the same key
// (heads of one group, tokens of one step) are served together: for one key/value head they lie
// one after the other, row n = head_in_group * L + l. The context is split three ways:
//
//   SPLITS threadgroups        |   first keys   |     ...     |   last keys   |
//   SIMDGROUPS in each         | 0 1 2 3 0 1 2 3 ...   one key each, in turn
//   a key's D dims             over the 32 lanes
//
// Each simdgroup keeps a running maximum, sum and weighted value per query; they are merged once
// at the end: over simdgroups in threadgroup memory, over SPLITS by sdpa_merge. The number of
// splits comes from the cache's capacity, their length on the device from the offset, so one
// launch fits every step.

#include <metal_simdgroup>

#include "../common/attention.metal"
#include "../common/memory.metal"

template <typename T, int D, int QUERIES, int SIMDGROUPS, int SPLITS>
struct SdpaDecode {
  // Dims of a lane: neighbours where that makes whole vectors, else 32 apart.
  CONST EACH = (D + 31) / 32;
  CONST WIDE = D % 32 == 0 && (EACH == 2 || EACH % 4 == 0) ? (EACH == 2 ? 2 : 4) : 1;
  CONST SHARED = SIMDGROUPS * (D + 2 * QUERIES);  // floats of threadgroup memory

  METAL_FUNC static int dim(uint lane, int e) { return WIDE > 1 ? lane * EACH + e : lane + 32 * e; }

  METAL_FUNC static void load(const device T* row, uint lane, thread float (&to)[EACH]) {
    UNROLL
    for (int e = 0; e < EACH; e += WIDE) {
      if (dim(lane, e) < D) {
        Wide<WIDE>::load(row + dim(lane, e), to + e);
      } else {
        to[e] = 0;
      }
    }
  }

  // q (B, H, L, D), caches (B, Hkv, C, D). SPLITS 1: out (B, L, H * D). Else what sdpa_merge
  // wants: values (B, H, L, SPLITS, D) and stats (B, H, L, SPLITS, 2), maximum and sum.
  // place: (chunk of QUERIES, split, b * Hkv + key/value head).
  METAL_FUNC static void run(const device T* q, const device T* k_cache, const device T* v_cache,
                             const constant int* offset, device T* out, device float* values,
                             device float* stats, float scale, int window, float cap, int H,
                             int Hkv, int L, int C, threadgroup float* shared, uint3 place,
                             uint simdgroup, uint lane) {
    const int all = H / Hkv * L;  // queries that share this head's keys
    const int n0 = place.x * QUERIES;
    const size_t head = place.z;
    q += (head * all + n0) * D;
    k_cache += head * C * D;
    v_cache += head * C * D;

    float query[QUERIES][EACH];
    float value[QUERIES][EACH];
    float most[QUERIES];
    float sum[QUERIES];
    int position[QUERIES];
    UNROLL
    for (int n = 0; n < QUERIES; n++) {
      load(q + min(n, all - 1 - n0) * D, lane, query[n]);
      position[n] = offset[0] + (n0 + n) % L;
      most[n] = LOWEST;
      sum[n] = 0;
      UNROLL
      for (int e = 0; e < EACH; e++) {
        query[n][e] *= scale;
        value[n][e] = 0;
      }
    }

    // This split's share of the keys that any query sees.
    const int first = first_visible(offset[0], window);
    const int last = offset[0] + L;
    const int share = (last - first + SPLITS - 1) / SPLITS;
    const int start = first + int(place.y) * share;
    const int end = min(last, start + share);
    for (int j = start + int(simdgroup); j < end; j += SIMDGROUPS) {
      float key[EACH];
      float held[EACH];
      load(k_cache + size_t(j) * D, lane, key);
      load(v_cache + size_t(j) * D, lane, held);
      UNROLL
      for (int n = 0; n < QUERIES; n++) {
        float dot = 0;
        UNROLL
        for (int e = 0; e < EACH; e++) {
          dot += query[n][e] * key[e];
        }
        const float score = capped(simd_sum(dot), cap);
        const bool seen = visible(j, position[n], window);
        const float higher = seen ? max(most[n], score) : most[n];
        const float shrink = exp(most[n] - higher);
        const float weight = seen ? exp(score - higher) : 0.0f;
        most[n] = higher;
        sum[n] = sum[n] * shrink + weight;
        UNROLL
        for (int e = 0; e < EACH; e++) {
          value[n][e] = value[n][e] * shrink + weight * held[e];
        }
      }
    }

    // Merge the simdgroups, query by query: every one scales its share to the common maximum.
    threadgroup float* mosts = shared;
    threadgroup float* sums = shared + SIMDGROUPS * QUERIES;
    threadgroup float* shares = shared + 2 * SIMDGROUPS * QUERIES;
    if (lane == 0) {
      UNROLL
      for (int n = 0; n < QUERIES; n++) {
        mosts[n * SIMDGROUPS + simdgroup] = most[n];
        sums[n * SIMDGROUPS + simdgroup] = sum[n];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // maxima and sums are there
    UNROLL
    for (int n = 0; n < QUERIES; n++) {
      float top = LOWEST;
      for (int s = 0; s < SIMDGROUPS; s++) {
        top = max(top, mosts[n * SIMDGROUPS + s]);
      }
      float total = 0;
      for (int s = 0; s < SIMDGROUPS; s++) {
        total += sums[n * SIMDGROUPS + s] * exp(mosts[n * SIMDGROUPS + s] - top);
      }
      const float shrink = exp(most[n] - top);
      UNROLL
      for (int e = 0; e < EACH; e++) {
        if (dim(lane, e) < D) {
          shares[simdgroup * D + dim(lane, e)] = value[n][e] * shrink;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all shares of query n are there
      const int row = n0 + n;
      const size_t query_row = head * all + row;  // of (B, H, L)
      for (int d = simdgroup * 32 + lane; row < all && d < D; d += SIMDGROUPS * 32) {
        float y = 0;
        for (int s = 0; s < SIMDGROUPS; s++) {
          y += shares[s * D + d];
        }
        if (SPLITS == 1) {
          const size_t b = head / Hkv;
          const size_t h = head % Hkv * (H / Hkv) + row / L;
          out[((b * L + row % L) * H + h) * D + d] = T(y / total);
        } else {
          values[(query_row * SPLITS + place.y) * D + d] = y;
        }
      }
      if (SPLITS > 1 && row < all && simdgroup == 0 && lane == 0) {
        stats[(query_row * SPLITS + place.y) * 2] = top;
        stats[(query_row * SPLITS + place.y) * 2 + 1] = total;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // shares have been read
    }
  }
};

// One simdgroup a query: lane s weighs split s. SPLITS is at most 32.
template <int D, int SPLITS, typename T>
METAL_FUNC void sdpa_merge(const device float* values, const device float* stats, device T* out,
                           int H, int L, uint l, uint h, uint b, uint lane) {
  const size_t query_row = (size_t(b) * H + h) * L + l;
  values += query_row * SPLITS * D;
  stats += query_row * SPLITS * 2;
  out += ((size_t(b) * L + l) * H + h) * D;

  const float most = lane < SPLITS ? stats[lane * 2] : LOWEST;
  const float sum = lane < SPLITS ? stats[lane * 2 + 1] : 0.0f;
  const float weight = exp(most - simd_max(most));
  const float total = simd_sum(weight * sum);
  // Every lane takes part in the exchanges, so the loop runs over whole simdgroups of dims.
  for (int d0 = 0; d0 < D; d0 += 32) {
    const int d = d0 + lane;
    float y = 0;
    for (int s = 0; s < SPLITS; s++) {
      const float share = simd_broadcast(weight, ushort(s));
      y += d < D ? share * values[s * D + d] : 0.0f;
    }
    if (d < D) {
      out[d] = T(y / total);
    }
  }
}
