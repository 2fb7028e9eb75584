// sdpa for many new tokens (prefill): out = softmax(q k^T) v, tile by tile, scores never stored.
//
// Bound by arithmetic. A threadgroup owns BQ = 8 * SIMDGROUPS queries of one head, a simdgroup 8
// of them. Keys come in tiles of BK, then the values of the same keys in the same memory:
//
//                 D                           BK                        D
//     q  8 x [ . . . . ]  @ k^T  =  scores 8 x [ . . ]   @ v  =  out 8 x [ . . . . ]
//           threadgroup  (tile)               registers   (tile)        registers
//
// A score fragment is changed in place between the two products: cap, mask, exp against the
// running maximum; what was the sum of the first product is the left factor of the second. A lane
// sees one row of queries only, so maximum, sum and rescaling are one number a lane each, and two
// exchanges reduce a row. Keys that no query of the tile can see are not visited.

#include "../common/attention.metal"
#include "../common/fragment.metal"
#include "../common/loader.metal"

template <typename T, int D, int BK, int SIMDGROUPS>
struct SdpaPrefill {
  CONST BQ = 8 * SIMDGROUPS;
  CONST THREADS = 32 * SIMDGROUPS;
  CONST VEC = 16 / sizeof(T);
  static_assert(D % 8 == 0 && BK % 8 == 0, "tiles are whole fragments");
  using Q = DenseLoader<T, BQ, D, THREADS, VEC, true>;
  using KV = DenseLoader<T, BK, D, THREADS, VEC, true>;
  CONST LD = Q::LD;
  // Is the next tile held in registers while this one is multiplied? Beside the sums of a wide head
  // (D / 4 registers) there is room for a run of 16 bytes or four, not for eight.
  CONST AHEAD = KV::STEPS <= 4;
  CONST TILES = (Q::BYTES + KV::BYTES) / 16;  // threadgroup memory, in uint4

  // q (B, H, L, D), caches (B, Hkv, C, D), out (B, L, H * D). place: (tile of queries, h, b).
  METAL_FUNC static void run(const device T* q, const device T* k_cache, const device T* v_cache,
                             const constant int* offset, device T* out, float scale, int window,
                             float cap, int H, int Hkv, int L, int C, threadgroup uint4* tiles,
                             uint3 place, uint simdgroup, uint lane) {
    threadgroup T* q_tile = (threadgroup T*)tiles;
    threadgroup T* kv_tile = (threadgroup T*)(tiles + Q::BYTES / 16);
    const int id = simdgroup * 32 + lane;
    const int row = fragment_row(lane);
    const int col = fragment_col(lane);
    const int q0 = place.x * BQ;
    const int l = q0 + int(simdgroup) * 8 + row;  // this lane's query
    const int position = offset[0] + l;
    const size_t kv_head = size_t(place.z) * Hkv + place.y / (H / Hkv);

    // Keys that some query of this tile sees.
    const int start = first_visible(offset[0] + q0, window);
    const int end = offset[0] + min(q0 + BQ, L);

    Q queries;
    KV keys;
    KV values;
    queries.begin(q + (size_t(place.z) * H + place.y) * L * D, L, D, q0, 0, id);
    keys.begin(k_cache + kv_head * C * D, end, D, start, 0, id);
    values.begin(v_cache + kv_head * C * D, end, D, start, 0, id);

    float2 sums[D / 8];  // 8 x D of the result
    UNROLL
    for (int d = 0; d < D / 8; d++) {
      sums[d] = float2(0);
    }
    float most = LOWEST;
    float total = 0;

    queries.copy(q_tile);
    if (AHEAD) {
      keys.fetch();
    }
    const threadgroup T* mine = q_tile + simdgroup * 8 * LD;
    for (int k0 = start; k0 < end; k0 += BK) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the last values have been read
      AHEAD ? keys.place(kv_tile) : keys.copy(kv_tile);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // keys (and queries) are there
      if (AHEAD) {
        values.fetch();
      }

      float2 score[BK / 8];
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        score[j] = float2(0);
      }
      UNROLL
      for (int d = 0; d < D; d += 8) {
        simdgroup_barrier(mem_flags::mem_none);  // for the registers: see BlockMMA
        const float2 a = fragment_load<LD, 1>(mine + d, row, col);
        UNROLL
        for (int j = 0; j < BK / 8; j++) {
          const float2 b = fragment_load<1, LD>(kv_tile + j * 8 * LD + d, row, col);
          score[j] = fragment_multiply(a, b, score[j]);
        }
      }

      float2 tile_most = float2(LOWEST);
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        const int key = k0 + j * 8 + col;
        score[j].x = visible(key, position, window) ? capped(score[j].x * scale, cap) : LOWEST;
        score[j].y = visible(key + 1, position, window) ? capped(score[j].y * scale, cap) : LOWEST;
        tile_most = max(tile_most, score[j]);
      }
      const float higher = max(most, fragment_row_max(tile_most));
      const float shrink = exp(most - higher);
      float2 tile_sum = float2(0);
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        // A query that has seen no key yet has higher = LOWEST, where exp(0) would be 1.
        score[j].x = score[j].x == LOWEST ? 0.0f : exp(score[j].x - higher);
        score[j].y = score[j].y == LOWEST ? 0.0f : exp(score[j].y - higher);
        tile_sum += score[j];
      }
      total = total * shrink + fragment_row_sum(tile_sum);
      most = higher;

      threadgroup_barrier(mem_flags::mem_threadgroup);  // the keys have been read
      AHEAD ? values.place(kv_tile) : values.copy(kv_tile);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // values are there
      values.next();
      keys.next();
      if (AHEAD) {
        keys.fetch();  // past the last tile this fetches zeros
      }
      UNROLL
      for (int d = 0; d < D / 8; d++) {
        simdgroup_barrier(mem_flags::mem_none);
        sums[d] *= shrink;
        UNROLL
        for (int j = 0; j < BK / 8; j++) {
          const float2 b = fragment_load<LD, 1>(kv_tile + j * 8 * LD + d * 8, row, col);
          sums[d] = fragment_multiply(score[j], b, sums[d]);
        }
      }
    }

    if (l < L) {
      out += ((size_t(place.z) * L + l) * H + place.y) * D + col;
      const float share = 1 / total;
      UNROLL
      for (int d = 0; d < D / 8; d++) {
        out[d * 8] = T(sums[d].x * share);
        out[d * 8 + 1] = T(sums[d].y * share);
      }
    }
  }
};
