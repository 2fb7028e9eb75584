// qmv: y (M, N) = norm(x) (M, K) @ w (N, K)^T for few rows, 4-bit affine w, 16-bit x. Bound by memory:
// each packed word of w is read once, 16 bytes a lane, and goes to the tensor cores nearly as it is.
//
// A block is TEAMS teams of WARPS warps. A team goes through tiles of 16 rows of w, every
// (TEAMS * gridDim.x)-th. A step is STEP successive k, a take is TAKE successive steps, and a warp has the same
// takes in every tile (warp, warp + WARPS, ... ROUNDS of them). So x comes into shared memory once (qmv_x.cuh).
// All loads of a take are under way at once. AHEAD: those of the next take follow step by step, each into the
// registers of the step that is just done; else all together, behind the last one. In one step a warp holds
// 16 x STEP codes:
//
//   lane 4g+t:   row g    k 32*t ..    one load of 4 words j, 8 codes each
//                row g+8  the same k   one more
//
// The tile is operand a of mma.m16n8k16, x is operand b: k may come in any order as long as both agree.
// A word holds codes n0 .. n7, and its nibbles are operands nearly where they lie (subnormal.cuh):
//
//   w      & 000f000f   (n0, n4)               even: a[0], a[1]
//   w >> 8 & 000f000f   (n2, n6)               even: a[2], a[3]
//   w      & 00f000f0   (n1, n5) times 16      odd:  a[0], a[1]
//   w >> 8 & 00f000f0   (n3, n7) times 16      odd:  a[2], a[3]
//
// Even and odd nibbles are two chains of sums; odd / 16 is added in float32. The four lanes of a quad (t) hold
// PARTS = STEP / GROUP groups, whose sums must stay apart, in BANDS = PARTS bands of the 8 columns of b, COLS rows of
// x each. A band is zero where t belongs to another group, so what a lane gets in d is of its own group.
//
//   band of column c: c / COLS    row of x: pass * COLS + c % COLS    group of lane t: t*PARTS/4
//
// Scales multiply a group's sums in float32, biases the group sums of x.
//
// DEQUANTIZED: for rows of x that would take several passes. Operand a is scale * q + bias, rounded once (decode.cuh):
// more instructions a word, but one chain of sums for all groups, and all 8 columns carry rows of x.
//
// SPLITS: for long rows of x. A cluster of so many blocks has the same tiles, each block its own part of K, and so of
// x. The sums of all its tiles stay in shared memory; at the end each block adds up its share of them over the cluster.
//
// A norm in front is x * weight * r, r one number a row. In bf16, which has float32's range, r comes behind
// the product: no warp has to wait for the squares of the others. fp16 could overflow: there r comes first.
//
// At the end of a tile the sums of a team's warps meet in shared memory; as many warps as it takes, others in each
// tile, add them up and write, while the rest goes on.
#pragma once

#include "../common/decode.cuh"
#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "../common/subnormal.cuh"
#include "qmv_x.cuh"
#include "qmv_y.cuh"

namespace qrun {

// M: rows of x of a block, blockIdx.y * M .. K is a multiple of STEP * TAKE where TAKE > 1, and has SPLITS * TAKES takes
// if AHEAD. DEQUANTIZED: S is T. SPLITS > 1: no norm, one matrix.
template <typename T, typename S, int GROUP, int M, int TAKE, int WARPS, int ROUNDS, int TEAMS, bool AHEAD,
          bool WEIGHTS = false, int SPLITS = 1>
struct Qmv {
  static constexpr bool DEQUANTIZED = WEIGHTS;  // for qmv_x.cuh and qmv_y.cuh, too
  static constexpr int WORDS = 4, ROWS = 16, STEP = 32 * WORDS, SPAN = TAKE * STEP;
  static constexpr int THREADS = 32 * WARPS * TEAMS;
  static constexpr int PARTS = STEP / GROUP;               // groups in a step
  static constexpr int BANDS = DEQUANTIZED ? 1 : PARTS;    // groups whose sums are apart
  static constexpr int COLS = 8 / BANDS;                   // rows of x in one mma
  static constexpr int PASSES = (M + COLS - 1) / COLS;     // mma on one tile of w
  static constexpr int FACTORS = TAKE > 1 ? TAKE * PARTS : 1;  // of a row that a lane loads
  static constexpr int SLICE = TAKE * WORDS * M * 4;       // 16 bytes each: x of a take
  static constexpr int TAKES = WARPS * ROUNDS;             // of a block: at least as many as its part of K has
  static constexpr int OUT = M > 1 && COLS == 8 ? ROWS + 4 : ROWS;  // of a row of x's sums: lanes in 4 banks
  static constexpr bool BEHIND = Subnormal<T>::X != 1;     // the norm's r

  const T* x;         // (rows, K)
  const unsigned* w;  // (N, K / 8)
  const S* scales;    // (N, K / GROUP)
  const S* biases;    // (N, K / GROUP)
  int rows, n, k;
  // gather_qmm: w is (E * N, K / 8), a block has one pair of a row of x and an expert, M is 1.
  const int* expert = nullptr;  // (rows,)
  const int* source = nullptr;  // (rows,), the row of x; null: the pair's own number

  // Factors as they lie in memory; several are one wide load.
  static constexpr int FACTOR_BYTES = FACTORS * static_cast<int>(sizeof(S));
  struct alignas(FACTOR_BYTES < 4 ? 4 : FACTOR_BYTES < 16 ? FACTOR_BYTES : 16) Factors {
    unsigned at[(FACTOR_BYTES + 3) / 4];
  };
  struct Scales {
    Factors scale[2], bias[2];  // of rows g and g + 8
  };

  // One lane's share of a take: 32 codes a step of two rows, and those rows' scales and biases.
  struct Held {
    unsigned w[TAKE][2][WORDS];
    Scales of;
  };

  // Where that lies. Always inside the arrays: what is behind their end is replaced by what lies before it, for
  // x is zero there, and rows behind the last are not written.
  struct From {
    unsigned word[2], group[2];
  };

  // Shared memory: x as operand b, [take][step][j][m][t] of 8 elements; as many zeros as a take has, if there
  // are bands; the group sums of x, [take][step][part][m], unless DEQUANTIZED; the sums of each warp, two times
  // [warp][m][OUT]; the squares of x, [m][warp]; the sums of each tile, [tile][m][ROWS], if there are SPLITS.
  uint4 *shared_x, *zeros;
  float *shared_sums, *shared_out, *shared_squares, *shared_tiles;

  // Known while compiling where there is one team, for what depends on it then is, too.
  __device__ __forceinline__ static int team() { return TEAMS == 1 ? 0 : threadIdx.x / (32 * WARPS); }
  __device__ __forceinline__ static int warp() { return TEAMS == 1 ? threadIdx.x / 32 : threadIdx.x / 32 % WARPS; }

  // Tiles are counted by clusters. A block's part of K begins with this take.
  __device__ __forceinline__ static int cluster() { return blockIdx.x / SPLITS; }
  __device__ __forceinline__ static int clusters() { return gridDim.x / SPLITS; }
  __device__ __forceinline__ static int first_take() { return blockIdx.x % SPLITS * TAKES; }

  __device__ __forceinline__ float* group_sum(int take, int step, int part, int m) const {
    return shared_sums + ((take * TAKE + step) * PARTS + part) * M + m;
  }

  __device__ __forceinline__ void place() {
    shared_x = reinterpret_cast<uint4*>(shared_memory());
    zeros = shared_x + TAKES * SLICE;
    shared_sums = reinterpret_cast<float*>(zeros + (BANDS > 1 ? SLICE : 0));
    shared_out = shared_sums + (DEQUANTIZED ? 0 : TAKES * TAKE * PARTS * M);
    shared_squares = shared_out + 2 * TEAMS * WARPS * M * OUT;
    shared_tiles = shared_squares + TEAMS * WARPS * M;
    if (BANDS == 1) return;
    for (int i = threadIdx.x; i < SLICE; i += THREADS) zeros[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }

  __device__ __forceinline__ static Factors load_factors(const S* p) {
    if constexpr (FACTOR_BYTES == 2) return {*reinterpret_cast<const unsigned short*>(p)};
    else return *reinterpret_cast<const Factors*>(p);
  }

  // The factor of step s and that part of it.
  __device__ __forceinline__ static float factor(const Factors& f, int s, int part) {
    constexpr int EACH = FACTORS / TAKE;
    if constexpr (sizeof(S) == 4) {
      unsigned v = f.at[s * EACH];
#pragma unroll
      for (int q = 1; q < EACH; q++)
        if (part == q) v = f.at[s * EACH + q];
      return __uint_as_float(v);
    } else if constexpr (EACH == 1) {
      return half_of<S>(f.at[s / 2], s % 2);
    } else {
      const unsigned pair = EACH == 4 && part >= 2 ? f.at[s * 2 + 1] : f.at[s * EACH / 2];
      return half_of<S>(pair, part % 2);
    }
  }

  // The same as it lies there, of this lane's group.
  __device__ __forceinline__ static T element(const Factors& f, int s) {
    return from_float<T>(factor(f, s, threadIdx.x % 4 * PARTS / 4));
  }

  // The row of x behind row m of this block.
  __device__ __forceinline__ long long x_row(int m) const {
    if (expert) return source ? source[blockIdx.y] : blockIdx.y;
    return min(int(blockIdx.y) * M + m, rows - 1);
  }

  // Offsets are 32 bits wide, for w counts words and N * K / 8 < 2^32: registers are short.
  __device__ __forceinline__ From from(int tile, int take) const {
    const int lane = threadIdx.x % 32;
    const unsigned first = (first_take() + take) * SPAN, mine = first + lane % 4 * 32;
    const unsigned at = TAKE == 1 ? min(mine, unsigned(k) - 32) : mine;
    From from;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned row = min(tile * ROWS + lane / 4 + 8 * i, n - 1);
      from.word[i] = row * (unsigned(k) / 8) + at / 8;
      from.group[i] = row * (unsigned(k) / GROUP) + (FACTORS == 1 ? at : first) / GROUP;
    }
    return from;
  }

  __device__ __forceinline__ void load_step(Held& held, int s, const From& from) const {
#pragma unroll
    for (int i = 0; i < 2; i++) load_stream(held.w[s][i], w + from.word[i] + s * (STEP / 8));
  }

  __device__ __forceinline__ void load_scales(Scales& of, const From& from) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      of.scale[i] = load_factors(scales + from.group[i]);
      of.bias[i] = load_factors(biases + from.group[i]);
    }
  }

  __device__ __forceinline__ void load_held(Held& held, const From& from) const {
#pragma unroll
    for (int s = 0; s < TAKE; s++) load_step(held, s, from);
    load_scales(held.of, from);
  }

  // The norm's r of row m, once every warp has left its squares.
  __device__ __forceinline__ float norm_factor(int m, float eps) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < TEAMS * WARPS; i++) sum += shared_squares[m * (TEAMS * WARPS) + i];
    return rsqrtf(sum / k + eps);
  }

  // sums[pass] += tile @ x of that take, for this lane's rows g, g+8 and two rows of x. next: what held takes
  // in its place, if AHEAD.
  __device__ __forceinline__ void multiply(float (&sums)[PASSES][4], Held& held, int take,
                                           const From& next) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, band = t * BANDS / 4;
    // Column g of b carries the group of this lane's k, or nothing.
    const uint4* b_of = (g / COLS == band ? shared_x + take * SLICE : zeros) + t;
    Scales later;
    if (AHEAD) load_scales(later, next);
#pragma unroll
    for (int s = 0; s < TAKE; s++) {
      if constexpr (DEQUANTIZED)
        multiply_weights(sums, held, b_of, s);
      else
        multiply_codes(sums, held, b_of, take, s, band);
      if (AHEAD) load_step(held, s, next);
    }
    if (AHEAD) held.of = later;
  }

  // Operand b for word j of step s.
  __device__ __forceinline__ static uint4 columns(const uint4* b_of, int s, int j, int pass) {
    const int m = min(pass * COLS + threadIdx.x % 32 / 4 % COLS, M - 1);  // columns beyond M repeat: nobody looks
    return b_of[((s * WORDS + j) * M + m) * 4];
  }

  __device__ __forceinline__ void multiply_codes(float (&sums)[PASSES][4], const Held& held, const uint4* b_of,
                                                 int take, int s, int band) const {
    float even[PASSES][4] = {}, odd[PASSES][4] = {};
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      const unsigned lo = held.w[s][0][j], hi = held.w[s][1][j];  // of rows g and g + 8
      const unsigned a[4] = {lo & 0x000f000fu, hi & 0x000f000fu, lo >> 8 & 0x000f000fu, hi >> 8 & 0x000f000fu};
      const unsigned b[4] = {lo & 0x00f000f0u, hi & 0x00f000f0u, lo >> 8 & 0x00f000f0u, hi >> 8 & 0x00f000f0u};
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const uint4 v = columns(b_of, s, j, p);
        mma(even[p], a, v.x, v.y, T());
        mma(odd[p], b, v.z, v.w, T());
      }
    }
    add(sums, even, odd, held.of, take, s, band);
  }

  __device__ __forceinline__ void multiply_weights(float (&sums)[PASSES][4], const Held& held, const uint4* b_of,
                                                   int s) const {
    Decode<T> row[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      row[i].set(element(held.of.scale[i], s), element(held.of.bias[i], s));
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      const unsigned lo = held.w[s][0][j], hi = held.w[s][1][j];
      const unsigned even[4] = {row[0].low(lo), row[1].low(hi), row[0].low(lo >> 8), row[1].low(hi >> 8)};
      const unsigned odd[4] = {row[0].high(lo), row[1].high(hi), row[0].high(lo >> 8), row[1].high(hi >> 8)};
#pragma unroll
      for (int p = 0; p < PASSES; p++) {
        const uint4 v = columns(b_of, s, j, p);
        mma(sums[p], even, v.x, v.y, T());
        mma(sums[p], odd, v.z, v.w, T());
      }
    }
  }

  // sums += scale * product + bias * (sum of x), of that part of step s.
  __device__ __forceinline__ void add(float (&sums)[PASSES][4], const float (&even)[PASSES][4],
                                      const float (&odd)[PASSES][4], const Scales& of, int take, int s,
                                      int part) const {
    const float scale[2] = {factor(of.scale[0], s, part), factor(of.scale[1], s, part)};
    const float bias[2] = {factor(of.bias[0], s, part), factor(of.bias[1], s, part)};
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int i = 0; i < (M == 1 ? 1 : 2); i++) {
        const float total = *group_sum(take, s, part, min(p * COLS + 2 * t % COLS + i, M - 1));
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float product = fmaf(odd[p][2 * r + i], 1.0f / 16, even[p][2 * r + i]);
          sums[p][2 * r + i] = fmaf(scale[r], product, sums[p][2 * r + i]);
          sums[p][2 * r + i] = fmaf(bias[r], total, sums[p][2 * r + i]);
        }
      }
  }

  // G: type of the norm's weight (K,), null without a norm.
  template <typename G, typename E>
  __device__ __forceinline__ void run(const G* weight, float eps, const E& epilogue) {
    start_next_kernel();
    const int tiles = (n + ROWS - 1) / ROWS, takes = (k + SPAN - 1) / SPAN - first_take();
    int tile = team() * clusters() + cluster(), take = warp(), count = 0;
    if (expert) {
      wait_for_previous_kernel();
      const long long first = static_cast<long long>(expert[blockIdx.y]) * n;
      w += first * (k / 8), scales += first * (k / GROUP), biases += first * (k / GROUP);
    }
    Held held;  // the first loads are under way while x is prepared
    if (AHEAD || take < takes) load_held(held, from(tile, take));
    place();
    QmvX<Qmv, T, M, TAKE, WARPS, ROUNDS, TEAMS>{*this}.prepare(weight, eps);
    const QmvY<Qmv, T, M, WARPS, TEAMS, SPLITS> y{*this};
    float sums[PASSES][4] = {};
#pragma unroll 1
    while (tile < tiles) {
      const int of_tile = tile, of_take = take;
      take += WARPS;
      const bool last = take >= TAKES;
      if (last) take = warp(), tile += TEAMS * clusters();
      if (AHEAD || of_take < takes) multiply(sums, held, of_take, from(tile, take));
      if (!AHEAD && tile < tiles && take < takes) load_held(held, from(tile, take));
      if (!last) continue;
      if constexpr (SPLITS > 1)
        y.keep(sums, of_tile, count);
      else
        y.finish(sums, of_tile, count, BEHIND && weight, eps, epilogue);
      if (++count == 2 * WARPS) count = 0;
    }
    if constexpr (SPLITS > 1) y.add_up(tiles, epilogue);
  }
};

}  // namespace qrun
