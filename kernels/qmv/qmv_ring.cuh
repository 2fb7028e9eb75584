// qmv for compute capability 9.0: y (M, N) = norm(x) (M, K) @ w (N, K)^T for M <= 16, 4-bit affine w, 16-bit
// x. Bound by memory, so memory never waits: the tiles of w come through a ring in shared memory by bulk
// copies, which need no registers and no thread's attention, and begin before the kernel in front has
// finished.
//
// One block an SM (two kernels share it, if there is place: the next one fills its ring meanwhile). x is
// prepared in shared memory once. The block's tiles are 16 rows of w: tile blockIdx.x, then every
// gridDim.x-th; K is cut into parts, for each of which x has its place. An item is one part of one tile; it
// has a stage of the ring:
//
//   codes    [16 rows] PART / 2 bytes      a row's pitch is 64 bytes more than a multiple of 128, so that
//                                          two rows do not meet in the banks
//   scales   [16 rows] PART / GROUP        pitch: 16 bytes more
//   biases   [16 rows] PART / GROUP
//
// The block's warps form TEAMS, which take items in turn; the WARPS of a team take TAKE steps of 128 k of
// the item in turn, and their sums meet in shared memory. In a step a warp holds 16 x 128 codes:
//
//   lane 4g+t:   row g    k 32t .. 32t+31    16 bytes, words j = 0..3, 8 codes each
//                row g+8  the same k         16 more
//
// The tile is operand a of mma.m16n8k16, x is operand b: k may come in any order as long as both agree.
// A word holds codes n0 .. n7, and its nibbles are operands nearly where they lie (subnormal.cuh):
//
//   w      & 000f000f   (n0, n4)               even: a[0], a[1]
//   w >> 8 & 000f000f   (n2, n6)               even: a[2], a[3]
//   w      & 00f000f0   (n1, n5) times 16      odd:  a[0], a[1]
//   w >> 8 & 00f000f0   (n3, n7) times 16      odd:  a[2], a[3]
//
// Even and odd nibbles are two chains of sums; odd / 16 is added in float32. The four lanes of a quad (t)
// hold BANDS = 128 / GROUP groups. Their sums stay apart because the 8 columns of b are BANDS bands of
// COLS columns of x each, and a band is zero where t belongs to another group. What a lane gets in d is
// then of its own group. The biases multiply the group sums of x, in float32.
//
// A norm in front: x * weight becomes two columns, its upper and lower 16 bits, so that nothing is rounded;
// 1 / rms multiplies the sums at the end.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

// K is a multiple of PART, PART of 128 * TAKE; PART's factors of a row take a multiple of 16 bytes.
template <typename T, typename S, int GROUP, int M, bool NORM, int PART, int WARPS, int TEAMS,
          int TAKE, int STAGES>
struct QmvRing {
  static constexpr int THREADS = 32 * WARPS * TEAMS, ROWS = 16, STEP = 128;
  static constexpr int BANDS = STEP / GROUP, COLS = 8 / BANDS;
  static constexpr int COLUMNS = NORM ? 2 * M : M;               // of x
  static constexpr int PASSES = (COLUMNS + COLS - 1) / COLS;     // mma on one tile of w
  static constexpr int SUMS = PASSES * COLS;                     // COLUMNS, rounded up
  // Bytes: the ring's barriers, a row's codes, its factors, a stage.
  static constexpr int BARRIERS = (STAGES * 8 + 127) / 128 * 128;
  static constexpr int CODES = PART / 2, CODE_PITCH = (CODES + 127) / 128 * 128 + 64;
  static constexpr int FACTORS = PART / GROUP * sizeof(S), FACTOR_PITCH = FACTORS + 16;
  static constexpr int STAGE = ROWS * (CODE_PITCH + 2 * FACTOR_PITCH);

  const T* x;         // (M, K)
  const unsigned* w;  // (N, K / 8)
  const S* scales;    // (N, K / GROUP)
  const S* biases;    // (N, K / GROUP)
  int n, k;

  struct alignas(TAKE * BANDS * sizeof(S) < 16 ? TAKE * BANDS * sizeof(S) : 16) Factors {
    S at[TAKE * BANDS];
  };

  __device__ __forceinline__ int tiles() const {  // of this block
    return ((n + ROWS - 1) / ROWS - blockIdx.x + gridDim.x - 1) / gridDim.x;
  }

  // Shared memory: the ring's barriers, its stages; x of a part as operand b, [step][j][column][t] of 8
  // elements; its group sums, [group][SUMS]; the warps' sums, [team][2][warp][m][row]; if there are
  // several parts, the sums so far, [tile][m][row]; sums of squares, [two steps][m]; 1 / rms, [team][m].
  unsigned long long* full;
  char* ring;
  uint4* shared_x;
  float *shared_sums, *shared_out, *shared_held, *shared_squares, *shared_rms;

  __device__ __forceinline__ void place() {
    full = reinterpret_cast<unsigned long long*>(shared_memory());
    ring = shared_memory() + BARRIERS;
    shared_x = reinterpret_cast<uint4*>(ring + STAGES * STAGE);
    shared_sums = reinterpret_cast<float*>(shared_x + PART / 8 * COLUMNS);
    shared_out = shared_sums + PART / GROUP * SUMS;
    shared_held = shared_out + TEAMS * 2 * WARPS * M * ROWS;
    shared_squares = shared_held + (PART < k ? tiles() * M * ROWS : 0);
    shared_rms = shared_squares + (NORM ? (k + 255) / 256 * M : 0);
  }

  // By a whole warp: item `item` on its way into its stage. Rows behind the last stay as they are: their
  // sums are not written.
  __device__ __forceinline__ void fetch(int item) const {
    const int of_block = tiles(), p = item / of_block, stage = item % STAGES;
    if (p * PART >= k) return;
    const int row0 = (blockIdx.x + item % of_block * gridDim.x) * ROWS, lane = threadIdx.x % 32;
    const int rows = min(ROWS, n - row0), row = lane % ROWS;
    char* to = ring + stage * STAGE;
    if (lane == 0) copy_barrier_expect(full + stage, rows * (CODES + 2 * FACTORS));
    __syncwarp();
    if (row >= rows) return;
    if (lane < ROWS) {
      const unsigned at = (row0 + row) * (unsigned(k) / 8) + p * (PART / 8);  // words: below 2^32
      copy_bulk(to + row * CODE_PITCH, w + at, CODES, full + stage);
    } else {
      const unsigned at = (row0 + row) * (unsigned(k) / GROUP) + p * (PART / GROUP);
      to += ROWS * CODE_PITCH + row * FACTOR_PITCH;
      copy_bulk(to, scales + at, FACTORS, full + stage);
      copy_bulk(to + ROWS * FACTOR_PITCH, biases + at, FACTORS, full + stage);
    }
  }

  // x of k0 .. k0+PART-1 into shared memory, permuted; its group sums and, for the norm, its squares' sums.
  // A unit is 8 elements: the k of one word of w. A warp takes 32 units of one row, two steps, lane
  // (step, j, t): so its stores meet few bank conflicts; and it has BATCH of those under way.
  template <typename G>
  __device__ __forceinline__ void prepare_x(const G* weight, int k0) const {
    constexpr int BATCH = NORM ? 2 : 4, ALL_WARPS = WARPS * TEAMS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int t = lane % 4, j = lane / 4 % 4, steps = PART / STEP;
    const int all = (steps + 1) / 2 * M;
#pragma unroll 1
    for (int first = warp; first < all; first += BATCH * ALL_WARPS) {
      uint4 raw[BATCH];
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int i = first + b * ALL_WARPS, step = i / M * 2 + lane / 16;
        raw[b] = make_uint4(0, 0, 0, 0);
        if (i < all && step < steps)
          raw[b] = *reinterpret_cast<const uint4*>(x + static_cast<long long>(i % M) * k + k0 + step * STEP +
                                                   t * 32 + j * 8);
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int i = first + b * ALL_WARPS, m = i % M, step = i / M * 2 + lane / 16;
        if (i >= all) break;
        float v[8];
        load(v, reinterpret_cast<const T*>(&raw[b]));
        if constexpr (NORM) {
          float g[8] = {}, squares = 0;
          if (step < steps) load(g, weight + k0 + step * STEP + t * 32 + j * 8);
#pragma unroll
          for (int e = 0; e < 8; e++) squares += v[e] * v[e], v[e] *= g[e];
          squares = warp_sum(squares);
          if (lane == 0) shared_squares[(k0 / 256 + i / M) * M + m] = squares;
        }
        float sum = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) sum += v[e], v[e] *= Subnormal<T>::X;
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        if (BANDS <= 2) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (BANDS == 1) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (step >= steps) continue;
        uint4* to = shared_x + ((step * 4 + j) * COLUMNS + (NORM ? 2 * m : m)) * 4 + t;
        *to = operand(v);
        float* sums = shared_sums + (step * BANDS + t * BANDS / 4) * SUMS + (NORM ? 2 * m : m);
        const bool first_of_group = j == 0 && t % (4 / BANDS) == 0;
        if (first_of_group) *sums = sum * (1 / Subnormal<T>::UNDO);
        if constexpr (NORM) {
#pragma unroll
          for (int e = 0; e < 8; e++) v[e] -= to_float(from_float<T>(v[e]));
          to[4] = operand(v);
          if (first_of_group) sums[1] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ static uint4 operand(const float (&v)[8]) {
    return make_uint4(pack<T>(v[0], v[4]), pack<T>(v[2], v[6]), pack<T>(v[1], v[5]), pack<T>(v[3], v[7]));
  }

  // Each team for itself: the squares' sums -> 1 / rms.
  __device__ __forceinline__ void prepare_rms(float eps) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / 32 / WARPS;
    for (int m = warp; m < M; m += WARPS) {
      float sum = 0;
      for (int i = lane; i < (k + 255) / 256; i += 32) sum += shared_squares[i * M + m];
      sum = warp_sum(sum);
      if (lane == 0) shared_rms[team * M + m] = rsqrtf(sum / k + eps);
    }
  }

  // The lane's own of the factors of step s.
  __device__ __forceinline__ static float factor(const Factors& f, int s, int band) {
    if constexpr (sizeof(S) == 2 && BANDS > 1) {
      const unsigned* words = reinterpret_cast<const unsigned*>(&f) + s * (BANDS / 2);
      const unsigned word = BANDS == 4 && band >= 2 ? words[1] : words[0];
      return half_of<S>(word, band % 2);
    } else {
      S mine = f.at[s * BANDS];
#pragma unroll
      for (int q = 1; q < BANDS; q++)
        if (band == q) mine = f.at[s * BANDS + q];
      return to_float(mine);
    }
  }

  // sums[pass] += take `take` of the item's tile @ x, for this lane's rows g, g+8 and two columns of x.
  __device__ __forceinline__ void multiply(float (&sums)[PASSES][4], const char* stage, int take) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, band = t * BANDS / 4;
    const bool mine = g / COLS == band;  // column g of b carries the group of k 32t ..
    const char* codes = stage + g * CODE_PITCH + take * (TAKE * STEP / 2) + t * 16;
    const char* factors = stage + ROWS * CODE_PITCH + g * FACTOR_PITCH + take * int(sizeof(Factors));
    Factors scale[2], bias[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      scale[i] = *reinterpret_cast<const Factors*>(factors + i * 8 * FACTOR_PITCH);
      bias[i] = *reinterpret_cast<const Factors*>(factors + (ROWS + i * 8) * FACTOR_PITCH);
    }
#pragma unroll
    for (int s = 0; s < TAKE; s++) {
      const int step = take * TAKE + s;
      const uint4 low = *reinterpret_cast<const uint4*>(codes + s * (STEP / 2));
      const uint4 high = *reinterpret_cast<const uint4*>(codes + 8 * CODE_PITCH + s * (STEP / 2));
      float even[PASSES][4] = {}, odd[PASSES][4] = {};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const unsigned lo = (&low.x)[j], hi = (&high.x)[j];
        const unsigned a[4] = {lo & 0x000f000fu, hi & 0x000f000fu, lo >> 8 & 0x000f000fu,
                               hi >> 8 & 0x000f000fu};
        const unsigned b[4] = {lo & 0x00f000f0u, hi & 0x00f000f0u, lo >> 8 & 0x00f000f0u,
                               hi >> 8 & 0x00f000f0u};
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
          const int c = min(p * COLS + g % COLS, COLUMNS - 1);  // those beyond repeat: nobody looks
          uint4 v = make_uint4(0, 0, 0, 0);
          if (mine) v = shared_x[((step * 4 + j) * COLUMNS + c) * 4 + t];
          mma(even[p], a, v.x, v.y, T());
          mma(odd[p], b, v.z, v.w, T());
        }
      }
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const float2 total = *reinterpret_cast<const float2*>(
            shared_sums + (step * BANDS + band) * SUMS + p * COLS + 2 * t % COLS);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float product = fmaf(odd[p][i], 1.0f / 16, even[p][i]);
          sums[p][i] = fmaf(factor(scale[i / 2], s, band), product, sums[p][i]);
          sums[p][i] = fmaf(factor(bias[i / 2], s, band), i % 2 ? total.y : total.x, sums[p][i]);
        }
      }
    }
  }

  // Lanes' sums -> the team's buffer, the groups of a quad added.
  __device__ __forceinline__ void share(const float (&sums)[PASSES][4], float* out) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (NORM && i % 2) continue;
        float v = NORM ? sums[p][i] + sums[p][i + 1] : sums[p][i];
#pragma unroll
        for (int bit = 4 / BANDS; bit < 4; bit *= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);
        const int c = p * COLS + 2 * t % COLS + i % 2, m = NORM ? c / 2 : c;
        if (t * BANDS / 4 == 0 && m < M) out[m * ROWS + g + i / 2 * 8] = v;
      }
  }

  // The warps' sums of row `row` of the tile; the parts before are in `held`, if there are several.
  __device__ __forceinline__ float total(const float* out, const float* held, int m, int row) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += out[(i * M + m) * ROWS + row];
    return held ? held[m * ROWS + row] + sum : sum;
  }

  template <typename E>
  __device__ __forceinline__ void write(int row0, const float* out, const float* held,
                                        const E& epilogue) const {
    const int thread = threadIdx.x % (32 * WARPS), team = threadIdx.x / (32 * WARPS);
    for (int i = thread; i < M * ROWS / E::ROWS; i += 32 * WARPS) {
      const int m = i / (ROWS / E::ROWS), row = i % (ROWS / E::ROWS) * E::ROWS;
      const int column = (row0 + row) / E::ROWS;
      if (column >= epilogue.columns()) continue;
      const float factor = Subnormal<T>::UNDO * (NORM ? shared_rms[team * M + m] : 1.0f);
      epilogue.write(m, column, total(out, held, m, row) * factor,
                     E::ROWS == 2 ? total(out, held, m, row + 1) * factor : 0.0f);
    }
  }

  // G: type of the norm's weight (K,), of use if NORM.
  template <typename G, typename E>
  __device__ __forceinline__ void run(const G* weight, float eps, const E& epilogue) {
    start_next_kernel();
    place();
    const int warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / 32 / WARPS;
    const int of_block = tiles(), parts = k / PART;
    if (threadIdx.x < 32) {
      if (threadIdx.x < STAGES) copy_barrier_init(full + threadIdx.x, 1);
      __syncwarp();
      for (int item = 0; item < STAGES; item++) fetch(item);
    }
    wait_for_previous_kernel();
    int buffer = 0;
#pragma unroll 1
    for (int p = 0; p < parts; p++) {
      if (p > 0) __syncthreads();  // the last part's x has been used
      prepare_x(weight, p * PART);
      __syncthreads();
      if (NORM && p == parts - 1) prepare_rms(eps);
#pragma unroll 1
      for (int i = (team + TEAMS - p * of_block % TEAMS) % TEAMS; i < of_block; i += TEAMS) {
        const int item = p * of_block + i, stage = item % STAGES;
        copy_barrier_wait(full + stage, item / STAGES % 2);
        float sums[PASSES][4] = {};
#pragma unroll 1
        for (int take = warp; take < PART / (STEP * TAKE); take += WARPS)
          multiply(sums, ring + stage * STAGE, take);
        float* out = shared_out + (team * 2 + buffer) * WARPS * M * ROWS;
        buffer ^= 1;
        share(sums, out + warp * M * ROWS);
        // One barrier an item: whoever fills this buffer again has passed the next item's.
        barrier(1 + team, 32 * WARPS);
        if (warp == 0) fetch(item + STAGES);
        float* held = parts > 1 ? shared_held + i * M * ROWS : nullptr;
        if (p == parts - 1) {
          write((blockIdx.x + i * gridDim.x) * ROWS, out, held, epilogue);
        } else {
          for (int e = threadIdx.x % (32 * WARPS); e < M * ROWS; e += 32 * WARPS)
            held[e] = total(out, p ? held : nullptr, e / ROWS, e % ROWS);
        }
      }
    }
  }
};

}  // namespace qrun
