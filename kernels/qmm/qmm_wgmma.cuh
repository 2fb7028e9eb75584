// qmm: y (M, N) = x (M, K) @ w (N, K)^T for many rows of x, 4-bit affine w, 16-bit x and scales of the same
// type, by wgmma: compute capability 9.0a. x comes from qmm_arrange.
//
// A block computes BN = 64 * WN rows of w by BM rows of x; each of its WN warpgroups has 64 rows of w and
// all BM rows of x. The sums stay in registers, and nothing but the tensor cores touches them until the
// end: w becomes 16-bit numbers, scale * q + bias rounded once, which are operand a in registers. A run is
// 128 k:
//
//   x   comes through a ring of STAGES runs in shared memory, in two bulk copies a run: operand b, the
//       order of its bytes is qmm_arrange's
//   w   comes from memory to registers AHEAD runs ahead: lane 4g+t of a warp holds k 32t .. 32t+31 of its rows 2g
//       and 2g+1 in 16 bytes each, all of one group, whose scale and bias it has too
//
// A word of w, codes n0 .. n7, is one lane's share of two wgmma: (n0, n4), (n2, n6) and (n1, n5), (n3, n7).
//
// A block has every so many'th tile. While the sums of one leave, the first runs of the next are on their way.
//
// gather_qmm: a row of x goes with one of `experts` matrices, and equal ones follow each other. Of a tile of BM
// rows a block computes all and writes those of its own matrix: of the tiles along m, those there are take the
// matrix of their first row, and `experts` more take one matrix each, if its first row is not a tile's first.
//
// Where the tiles are fewer than the SMs, the SPLITS blocks of a cluster share the runs of a tile. Each leaves
// its sums in its shared memory and adds up its share of the tile over all of them, in their order.
#pragma once

#include "../common/decode.cuh"
#include "../common/epilogue.cuh"
#include "../common/subnormal.cuh"
#include "../common/wgmma.cuh"

namespace qrun {

template <typename T, int GROUP, int BM, int WN, int STAGES, int SPLITS, int AHEAD>
struct QmmWgmma {
  static constexpr int THREADS = 128 * WN, BN = 64 * WN, RUN = 128;
  static constexpr int HALF = BM * 128, STAGE = 2 * HALF;  // bytes; a half run is 64 k

  const T* x;         // (runs, 2, PM, 64), arranged; PM a multiple of BM
  const unsigned* w;  // (N, K / 8)
  const T* scales;    // (N, K / GROUP)
  const T* biases;    // (N, K / GROUP)
  int m, n, k, pm;
  const int* expert = nullptr;  // (M,), ascending; w is (experts * N, K / 8)
  int experts = 0;

  // A tile: its first row of x and of w, and its matrix.
  struct Tile {
    int m0, n0, expert;
  };

  // A lane's share of a run: rows 2g and 2g+1 of its warp's 16.
  struct Piece {
    unsigned w[2][4];
    T scale[2], bias[2];
  };

  // Shared memory: the ring, which must lie at a multiple of 1024 for its swizzle; its barriers.
  char* ring;
  unsigned long long *full, *empty;

  __device__ __forceinline__ void place() {
    char* p = shared_memory();
    ring = p + (1024 - shared_address(p) % 1024) % 1024;
    full = reinterpret_cast<unsigned long long*>(ring + STAGES * STAGE);
    empty = full + STAGES;
  }
  // Of a tile's rows of w, the first of the lane's two.
  __device__ __forceinline__ int own_row() const { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2; }
  __device__ __forceinline__ int runs() const { return (k + RUN - 1) / RUN; }
  // Of this split: every split has one at least.
  __device__ __forceinline__ int split() const { return blockIdx.x % SPLITS; }
  __device__ __forceinline__ int first_run() const { return runs() * split() / SPLITS; }
  __device__ __forceinline__ int own_runs() const { return runs() * (split() + 1) / SPLITS - first_run(); }
  // A block's tiles are every blocks()-th. Those that follow each other read the same rows of w, and x stays in L2.
  __device__ __forceinline__ int blocks() const { return gridDim.x / SPLITS; }
  __device__ __forceinline__ int across() const { return (m + BM - 1) / BM + experts; }

  // By one thread. m0: the first row of x.
  __device__ __forceinline__ void fetch(int stage, int run, int m0) const {
    barrier_expect(full + stage, STAGE);
#pragma unroll
    for (int h = 0; h < 2; h++)
      copy_bulk(ring + stage * STAGE + h * HALF,
                x + (((first_run() + run) * 2 + h) * static_cast<long long>(pm) + m0) * 64, HALF, full + stage);
  }

  // Rows and k behind the end repeat what lies before: the rows are not written, x is zero there.
  __device__ __forceinline__ Piece load_piece(int n0, int run) const {
    const int lane = threadIdx.x % 32, at = min((first_run() + run) * RUN + lane % 4 * 32, k - 32);
    Piece p;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned row = min(n0 + own_row() + i, n - 1);
      load_stream(p.w[i], w + (row * (unsigned(k) / 8) + at / 8));
      const unsigned group = row * (unsigned(k) / GROUP) + at / GROUP;
      p.scale[i] = scales[group], p.bias[i] = biases[group];
    }
    return p;
  }

  // The first row of x whose matrix is not before e; every warp looks for itself, 32 places at a time.
  __device__ __forceinline__ int lower_bound(int e) const {
    int from = 0, to = m;
    while (from < to) {
      const int step = (to - from + 31) / 32, at = from + threadIdx.x % 32 * step;
      const int before = __popc(__ballot_sync(0xffffffffu, at < to && expert[at] < e));
      to = min(to, from + before * step);
      if (before) from += (before - 1) * step + 1;
    }
    return from;
  }

  // Whether there is such a tile. Of several matrices a block has one tile.
  __device__ __forceinline__ bool choose(Tile& tile, int index) {
    const int across = this->across(), block = index % across;
    tile = {block * BM, index / across * BN, 0};
    if (tile.n0 >= n) return false;
    if (!expert) return true;
    const int e = block - (across - experts);
    if (e >= 0) {
      const int row = lower_bound(e);
      if (row == m || expert[row] != e || row % BM == 0) return false;
      tile.m0 = row / BM * BM, tile.expert = e;
    } else {
      tile.expert = expert[tile.m0];
    }
    const long long first = static_cast<long long>(tile.expert) * n;
    w += first * (k / 8), scales += first * (k / GROUP), biases += first * (k / GROUP);
    return true;
  }

  template <typename E>
  __device__ __forceinline__ void run(const E& epilogue) {
    start_next_kernel();
    if (expert) wait_for_previous_kernel();
    Tile tile;
    int index = blockIdx.x / SPLITS;
    if (!choose(tile, index)) return;
    place();
    const int all = own_runs();
    Piece held[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) held[a] = load_piece(tile.n0, min(a, all - 1));
    if (threadIdx.x == 0)
      for (int s = 0; s < STAGES; s++) barrier_init(full + s, 1), barrier_init(empty + s, THREADS / 32);
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x == 0)
      for (int s = 0; s < min(STAGES, all); s++) fetch(s, s, tile.m0);
    // The stage of the run, the phase of its barriers, its rows of x; the stage of the run before.
    int at = 0, phase = 0, last = 0, last_phase = 0;
    unsigned long long rows = wgmma_rows(ring);
    float acc[BM / 8][4];
    for (bool first = true;; first = false) {
      Tile next;
      index += blocks();
      const bool more = SPLITS == 1 && choose(next, index);
#pragma unroll 1
      for (int round = 0; round < all; round += AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
          const int r = round + a, later = r - 1 + STAGES;
          if (r >= all) break;
          const Piece now = held[a];
          if (r + AHEAD < all) held[a] = load_piece(tile.n0, r + AHEAD);
          Decode<T> row[2];
          row[0].set(now.scale[0], now.bias[0]);
          row[1].set(now.scale[1], now.bias[1]);
          barrier_wait(full + at, phase);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const unsigned lo = now.w[0][j], hi = now.w[1][j];
            const unsigned even[4] = {row[0].low(lo), row[1].low(hi), row[0].low(lo >> 8), row[1].low(hi >> 8)};
            const unsigned odd[4] = {row[0].high(lo), row[1].high(hi), row[0].high(lo >> 8), row[1].high(hi >> 8)};
            wgmma_fence();
            wgmma(acc, even, rows + (j / 2 * HALF + j % 2 * 64) / 16, r + j > 0, T());
            wgmma(acc, odd, rows + (j / 2 * HALF + j % 2 * 64 + 32) / 16, 1, T());
            wgmma_commit();
            wgmma_wait_but<1>();  // the operands before these may be overwritten
            if (j == 0 && r > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + last);
            // The stage before goes to a run to come, of the next tile perhaps, by a thread of each warpgroup in turn.
            if (j == 2 && (r > 0 || !first) && (later < all || more) && threadIdx.x == r % WN * 128) {
              barrier_wait(empty + last, last_phase);
              fetch(last, later < all ? later : later - all, later < all ? tile.m0 : next.m0);
            }
            __syncwarp();  // wgmma wants all lanes at once
          }
          last = at, last_phase = phase, at++, rows += STAGE / 16;
          if (at == STAGES) at = 0, phase ^= 1, rows -= STAGES * (STAGE / 16);
        }
      }
      wgmma_wait(acc);
      if (more) {  // the first runs of the next tile are on their way while the sums leave
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + last);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) held[a] = load_piece(next.n0, min(a, all - 1));
      }
      if (n % 2 == 0)
        finish<true>(tile, acc, epilogue);
      else
        finish<false>(tile, acc, epilogue);
      if (!more) return;
      tile = next;
    }
  }

  // The sums, over the splits if there are some, to y. A lane has two rows of w and two of each eight of x; eight
  // lanes write 32 bytes next to each other, all that L2 wants at a time.
  // EVEN: N is.
  template <bool EVEN, typename E>
  __device__ __forceinline__ void finish(const Tile& tile, const float (&acc)[BM / 8][4], const E& epilogue) const {
    float4* shared = reinterpret_cast<float4*>(ring) + threadIdx.x;
    if (SPLITS > 1) {
      __syncthreads();  // the stages are not needed any more
#pragma unroll
      for (int j = 0; j < BM / 8; j++) shared[j * THREADS] = make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
      cluster_arrive(), cluster_wait();
    }
    const int at = tile.n0 + own_row(), first = tile.m0 + threadIdx.x % 4 * 2, left = at < n ? m - first : 0;
    const auto wanted = [&](int i) { return i < left && (!expert || expert[first + i] == tile.expert); };
    const auto two = epilogue.template two<EVEN>(first, at);
    const auto write = [&](int i, const float (&sum)[4], unsigned behind, unsigned next) {
      two.write(i, sum[0], sum[2], behind, wanted(i));
      two.write(i + 1, sum[1], sum[3], next, wanted(i + 1));
    };
    const auto behind = [&](int i) { return epilogue.residual && wanted(i) ? two.behind(i) : 0; };
    if constexpr (SPLITS > 1) {
#pragma unroll 4
      for (int j = split(); j < BM / 8; j += SPLITS) {
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < SPLITS; s++) {
          const float4 v = cluster_load(shared + j * THREADS, s);
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
        write(j * 8, sum, behind(j * 8), behind(j * 8 + 1));
      }
      cluster_arrive(), cluster_wait();  // nobody reads from a block that is gone
    } else {
      // The residual comes ahead, as much at a time as there are registers for.
      constexpr int PART = THREADS > 256 && BM > 64 ? 8 : BM / 8;
#pragma unroll
      for (int part = 0; part < BM / 8; part += PART) {
        unsigned residual[PART][2];
#pragma unroll
        for (int j = 0; j < PART; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) residual[j][e] = behind((part + j) * 8 + e);
#pragma unroll
        for (int j = 0; j < PART; j++) write((part + j) * 8, acc[part + j], residual[j][0], residual[j][1]);
      }
    }
  }
};

}  // namespace qrun
