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
//   w   comes from memory to registers AHEAD runs ahead: lane 4g+t of a warp holds k 32t .. 32t+31 of rows g and
//       g+8 in 16 bytes each, all of one group, whose scale and bias it has too
//
// A word of w, codes n0 .. n7, is one lane's share of two wgmma: (n0, n4), (n2, n6) and (n1, n5), (n3, n7).
//
// gather_qmm: a row of x goes with one of E matrices, and equal ones follow each other. Of a tile of BM
// rows a block computes all and writes those of its own matrix: block i < tiles takes the matrix of the
// tile's first row, block tiles + e takes matrix e, if its first row is not a tile's first.
//
// Where the tiles are fewer than the SMs, the SPLITS blocks of a cluster share the runs of a tile. Each leaves
// its sums in its shared memory and adds up its share of the tile over all of them, in their order.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/subnormal.cuh"
#include "../common/wgmma.cuh"

namespace qrun {

// Codes of a word -> operand a, two a register: scale * q + bias, rounded once.
template <typename T>
struct Decode;

// A nibble in place is the subnormal q * 2^-133 (16 times that at bits 4-7). The result is w * 2^-64, so
// that the scale's factor stays in range; x carries 2^64.
template <>
struct Decode<bf16> {
  unsigned even, odd, bias;  // two equal halves each

  __device__ __forceinline__ void set(bf16 scale, bf16 b) {
    constexpr unsigned two_69 = 0x62006200u, two_65 = 0x60006000u, two_m64 = 0x1f801f80u, none = 0x80008000u;
    even = fma_pair(twice(scale), two_69, none, bf16());
    odd = fma_pair(twice(scale), two_65, none, bf16());
    bias = fma_pair(twice(b), two_m64, none, bf16());
  }
  __device__ __forceinline__ unsigned low(unsigned w) const { return fma_pair(w & 0x000f000fu, even, bias, bf16()); }
  __device__ __forceinline__ unsigned high(unsigned w) const { return fma_pair(w & 0x00f000f0u, odd, bias, bf16()); }
};

// 1024 + q is a number whose lowest bits are q; 1024 is taken off exactly.
template <>
struct Decode<f16> {
  unsigned scale, bias;

  __device__ __forceinline__ void set(f16 s, f16 b) { scale = twice(s), bias = twice(b); }
  __device__ __forceinline__ unsigned low(unsigned w) const {
    const unsigned q = fma_pair((w & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe400e400u, f16());
    return fma_pair(q, scale, bias, f16());
  }
  __device__ __forceinline__ unsigned high(unsigned w) const {  // 1024 + 16 q
    const unsigned q = fma_pair((w & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd400d400u, f16());
    return fma_pair(q, scale, bias, f16());
  }
};

template <typename T, int GROUP, int BM, int WN, int STAGES, int SPLITS, int AHEAD>
struct QmmWgmma {
  static constexpr int THREADS = 128 * WN, BN = 64 * WN, RUN = 128;
  static constexpr int HALF = BM * 128, STAGE = 2 * HALF;  // bytes; a half run is 64 k
  static constexpr int PITCH = BN + 4;                     // of the sums at the end, [BM][PITCH] float32

  const T* x;         // (runs, 2, PM, 64), arranged; PM a multiple of BM
  const unsigned* w;  // (N, K / 8)
  const T* scales;    // (N, K / GROUP)
  const T* biases;    // (N, K / GROUP)
  int m, n, k, pm;
  const int* expert = nullptr;  // (M,), ascending; w is (E * N, K / 8)
  int m0 = 0, own = 0;          // the block's first row of x, and its matrix

  // A lane's share of a run: rows g and g+8.
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
  // m goes first: the blocks that run together read few rows of w, and x stays in L2.
  __device__ __forceinline__ int first_m() const { return m0; }
  __device__ __forceinline__ int first_n() const { return blockIdx.y * BN; }
  __device__ __forceinline__ int runs() const { return (k + RUN - 1) / RUN; }
  // Of this split: every split has one at least.
  __device__ __forceinline__ int split() const { return blockIdx.x % SPLITS; }
  __device__ __forceinline__ int first_run() const { return runs() * split() / SPLITS; }
  __device__ __forceinline__ int own_runs() const { return runs() * (split() + 1) / SPLITS - first_run(); }

  // By one thread. Runs are counted from the split's first.
  __device__ __forceinline__ void fetch(int own) const {
    const int stage = own % STAGES, run = first_run() + own;
    barrier_expect(full + stage, STAGE);
#pragma unroll
    for (int h = 0; h < 2; h++)
      copy_bulk(ring + stage * STAGE + h * HALF, x + ((run * 2 + h) * static_cast<long long>(pm) + first_m()) * 64,
                HALF, full + stage);
  }

  // Rows and k behind the end repeat what lies before: the rows are not written, x is zero there.
  __device__ __forceinline__ Piece load_piece(int own) const {
    const int lane = threadIdx.x % 32, at = min((first_run() + own) * RUN + lane % 4 * 32, k - 32);
    Piece p;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned row = min(first_n() + int(threadIdx.x) / 32 * 16 + lane / 4 + 8 * i, n - 1);
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

  // Whether there is work for this block.
  __device__ __forceinline__ bool choose() {
    const int tiles = (m + BM - 1) / BM, block = blockIdx.x / SPLITS;
    m0 = block * BM;
    if (!expert) return true;
    if (block >= tiles) {
      const int row = lower_bound(block - tiles);
      if (row == m || expert[row] != block - tiles || row % BM == 0) return false;
      m0 = row / BM * BM, own = block - tiles;
    } else {
      own = expert[m0];
    }
    const long long first = static_cast<long long>(own) * n;
    w += first * (k / 8), scales += first * (k / GROUP), biases += first * (k / GROUP);
    return true;
  }

  template <typename E>
  __device__ __forceinline__ void run(const E& epilogue) {
    start_next_kernel();
    if (expert) wait_for_previous_kernel();
    if (!choose()) return;
    place();
    const int all = own_runs();
    Piece held[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) held[a] = load_piece(min(a, all - 1));
    if (threadIdx.x == 0)
      for (int s = 0; s < STAGES; s++) barrier_init(full + s, 1), barrier_init(empty + s, THREADS / 32);
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x == 0)
      for (int s = 0; s < min(STAGES, all); s++) fetch(s);
    const unsigned long long rows = wgmma_rows(ring);
    float acc[BM / 8][4];
#pragma unroll 1
    for (int round = 0; round < all; round += AHEAD) {
#pragma unroll
      for (int a = 0; a < AHEAD; a++) {
        const int r = round + a;
        if (r >= all) break;
        const Piece now = held[a];
        if (r + AHEAD < all) held[a] = load_piece(r + AHEAD);
        Decode<T> row[2];
        row[0].set(now.scale[0], now.bias[0]);
        row[1].set(now.scale[1], now.bias[1]);
        const unsigned long long stage = rows + r % STAGES * (STAGE / 16);
        barrier_wait(full + r % STAGES, r / STAGES % 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const unsigned lo = now.w[0][j], hi = now.w[1][j];
          const unsigned even[4] = {row[0].low(lo), row[1].low(hi), row[0].low(lo >> 8), row[1].low(hi >> 8)};
          const unsigned odd[4] = {row[0].high(lo), row[1].high(hi), row[0].high(lo >> 8), row[1].high(hi >> 8)};
          wgmma_fence();
          wgmma(acc, even, stage + (j / 2 * HALF + j % 2 * 64) / 16, r + j > 0, T());
          wgmma(acc, odd, stage + (j / 2 * HALF + j % 2 * 64 + 32) / 16, 1, T());
          wgmma_commit();
          wgmma_wait_but<1>();  // the operands before these may be overwritten
          if (j == 0 && r > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + (r - 1) % STAGES);
          // The stage before goes to a run to come, by a thread of each warpgroup in turn.
          if (j == 2 && r > 0 && r - 1 + STAGES < all && threadIdx.x == r % WN * 128) {
            barrier_wait(empty + (r - 1) % STAGES, (r - 1) / STAGES % 2);
            fetch(r - 1 + STAGES);
          }
          __syncwarp();  // wgmma wants all lanes at once
        }
      }
    }
    wgmma_wait(acc);
    __syncthreads();  // the stages' place takes the sums
    finish(reinterpret_cast<float*>(ring), acc, epilogue);
  }

  // The sums through shared memory, so that the result is written along its rows.
  template <typename E>
  __device__ __forceinline__ void finish(float* shared, const float (&acc)[BM / 8][4],
                                         const E& epilogue) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* mine = shared + threadIdx.x / 32 * 16 + g;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) mine[(j * 8 + 2 * t + e % 2) * PITCH + e / 2 * 8] = acc[j][e];
    if (SPLITS > 1)
      cluster_arrive(), cluster_wait();
    else
      __syncthreads();
    constexpr int COLUMNS = BN / E::ROWS;
#pragma unroll 4
    for (int i = split() * THREADS + threadIdx.x; i < BM * COLUMNS; i += SPLITS * THREADS) {
      const int row = i / COLUMNS, column = i % COLUMNS, at = first_n() / E::ROWS + column;
      if (first_m() + row >= m || at >= epilogue.columns()) continue;
      if (expert && expert[first_m() + row] != own) continue;
      const float* v = shared + row * PITCH + column * E::ROWS;
      epilogue.write(first_m() + row, at, sum(v), E::ROWS == 2 ? sum(v + E::ROWS - 1) : 0.0f);
    }
    if (SPLITS > 1) cluster_arrive(), cluster_wait();  // nobody reads from a block that is gone
  }

  // Over the splits, in their order, of what lies in that place of each one's shared memory.
  __device__ __forceinline__ float sum(const float* v) const {
    if (SPLITS == 1) return *v;
    float total = 0;
#pragma unroll
    for (int s = 0; s < SPLITS; s++) total += cluster_load(v, s);
    return total;
  }
};

}  // namespace qrun
