// qmv: y (M, N) = norm(x) (M, K) @ w (N, K)^T for few rows, 4-bit affine w, 16-bit x. Bound by memory:
// each packed word of w is read once, 16 bytes a lane, and goes to the tensor cores nearly as it is.
//
// A block goes through tiles of 16 rows of w: tile blockIdx.x, then every gridDim.x-th. A step is
// STEP = 32 * WORDS successive k, a take is TAKE successive steps, and a warp has the same takes in every
// tile (warp, warp + WARPS, ... ROUNDS of them). So x comes into shared memory once, each warp's part
// by itself. All loads of a take are under way at once, those of the next take while the sums of a tile
// are added up. In one step a warp holds 16 x STEP codes:
//
//   lane 4g+t:   row g    k 8*WORDS*t ..    one load of WORDS words j, 8 codes each
//                row g+8  the same k        one more
//
// The tile is operand a of mma.m16n8k16, x is operand b: k may come in any order as long as both agree.
// A word holds codes n0 .. n7, and its nibbles are operands nearly where they lie (subnormal.cuh):
//
//   w      & 000f000f   (n0, n4)               even: a[0], a[1]
//   w >> 8 & 000f000f   (n2, n6)               even: a[2], a[3]
//   w      & 00f000f0   (n1, n5) times 16      odd:  a[0], a[1]
//   w >> 8 & 00f000f0   (n3, n7) times 16      odd:  a[2], a[3]
//
// Even and odd nibbles are two chains of sums; odd / 16 is added in float32.
//
// The four lanes of a quad (t) hold PARTS = STEP / GROUP groups. Their sums stay apart because the 8
// columns of b are PARTS bands of COLS rows of x each, and a band is zero where t belongs to another
// group. What a lane gets in d is then of its own group, whose scale it has in a register.
//
//   band of column c: c / COLS      row of x: pass * COLS + c % COLS      group of lane t: t*PARTS/4
//
// The biases multiply the group sums of x, in float32.
//
// A norm in front is x * weight * r, r one number a row. In bf16, which has float32's range, r comes behind
// the product: no warp has to wait for the squares of the others. fp16 could overflow: there r comes first.
//
// At the end of a tile the warps' sums meet in shared memory, and one warp, each tile another, adds them up
// and writes, while the others go on.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

// M: rows of x of a block, blockIdx.y * M .. TAKE > 1 wants K to be a multiple of STEP * TAKE.
template <typename T, typename S, int GROUP, int M, int WORDS, int TAKE, int WARPS, int ROUNDS>
struct Qmv {
  static constexpr int THREADS = 32 * WARPS, ROWS = 16, STEP = 32 * WORDS, SPAN = TAKE * STEP;
  static constexpr int PARTS = STEP / GROUP;               // groups in a step
  static constexpr int COLS = 8 / PARTS;                   // rows of x in one mma
  static constexpr int PASSES = (M + COLS - 1) / COLS;     // mma on one tile of w
  static constexpr int FACTORS = TAKE == 1 ? 1 : TAKE * PARTS;  // of a row that a lane loads
  static constexpr int SLICE = TAKE * WORDS * M * 4;       // 16 bytes each: x of a take
  static constexpr int TAKES = WARPS * ROUNDS;             // at least as many as K has
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

  // One lane's share of a take: 8 * WORDS codes a step of two rows, and those rows' scales and biases.
  struct Held {
    unsigned w[TAKE][2][WORDS];
    Factors scale[2], bias[2];
  };

  // Shared memory: x as operand b, [take][step][j][m][t] of 8 elements; as many zeros as a take has;
  // the group sums of x, [take][step][part][m]; the warps' sums, two times [warp][m][row]; the squares of
  // x, [m][warp].
  uint4 *shared_x, *zeros;
  float *shared_sums, *shared_out, *shared_squares;

  static constexpr int SHARED =
      (TAKES + 1) * SLICE * 16 + (TAKES * TAKE * PARTS + 2 * WARPS * ROWS + WARPS) * M * 4;

  __device__ __forceinline__ void place() {
    shared_x = reinterpret_cast<uint4*>(shared_memory());
    zeros = shared_x + TAKES * SLICE;
    shared_sums = reinterpret_cast<float*>(zeros + SLICE);
    shared_out = shared_sums + TAKES * TAKE * PARTS * M;
    shared_squares = shared_out + 2 * WARPS * M * ROWS;
    for (int i = threadIdx.x; i < SLICE; i += THREADS) zeros[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }

  __device__ __forceinline__ static Factors load_factors(const S* p) {
    if constexpr (FACTOR_BYTES == 2) return {*reinterpret_cast<const unsigned short*>(p)};
    else return *reinterpret_cast<const Factors*>(p);
  }

  // The factor of step s for a lane of that part.
  __device__ __forceinline__ static float factor(const Factors& f, int s, int part) {
    constexpr int EACH = TAKE == 1 ? 1 : PARTS;
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

  // The row of x behind row m of this block.
  __device__ __forceinline__ long long x_row(int m) const {
    if (expert) return source ? source[blockIdx.y] : blockIdx.y;
    return min(int(blockIdx.y) * M + m, rows - 1);
  }

  // Nothing outside the arrays is read: what lies behind their end is replaced by what lies before it,
  // for x is zero there, and rows behind the last are not written.
  // Offsets are 32 bits wide, for w counts words and N * K / 8 < 2^32: registers are short.
  __device__ __forceinline__ void load_held(Held& held, int tile, int take) const {
    const int lane = threadIdx.x % 32;
    const unsigned first = take * SPAN, mine = first + lane % 4 * (8 * WORDS);
    const unsigned at = TAKE == 1 ? min(mine, unsigned(k) - 8 * WORDS) : mine;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned row = min(tile * ROWS + lane / 4 + 8 * i, n - 1);
      const unsigned* from = w + (row * (unsigned(k) / 8) + at / 8);
#pragma unroll
      for (int s = 0; s < TAKE; s++) load_stream(held.w[s][i], from + s * (STEP / 8));
      const unsigned group = row * (unsigned(k) / GROUP) + (TAKE == 1 ? at : first) / GROUP;
      held.scale[i] = load_factors(scales + group);
      held.bias[i] = load_factors(biases + group);
    }
  }

  // The norm's r of row m, once every warp has left its squares.
  __device__ __forceinline__ float norm_factor(int m, float eps) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += shared_squares[m * WARPS + i];
    return rsqrtf(sum / k + eps);
  }

  // The warp's part of x, once it is there, into shared memory: normed, rounded to T, permuted; and the sums
  // of its groups. A unit is 8 elements: the k of one word of w. weight: of the norm, (K,), or null.
  template <typename G>
  __device__ __forceinline__ void prepare_x(const G* weight, float eps) const {
    constexpr int EACH = 4 * WORDS * TAKE, UNITS = (EACH * M + 31) / 32;  // of a take and row; a lane's
    constexpr int ALL = ROUNDS * UNITS, BATCH = ALL < 4 ? ALL : 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    struct Unit {
      int take, step, j, t, m, at;
      bool valid;
    };
    const auto unit = [&](int u) {
      const int i = u % UNITS * 32 + lane, take = u / UNITS * WARPS + warp;
      Unit v = {take, i / (4 * WORDS) % TAKE, i / 4 % WORDS, i % 4, i / EACH, 0, i < EACH * M && u < ALL};
      v.at = take * SPAN + v.step * STEP + v.t * (8 * WORDS) + v.j * 8;
      return v;
    };
    const auto place_of = [&](const Unit& v) {
      return shared_x + v.take * SLICE + ((v.step * WORDS + v.j) * M + v.m) * 4 + v.t;
    };
    // The norm's weights come first, each to where its x goes.
    constexpr bool AHEAD = sizeof(G) == 2;
    if (weight && AHEAD) {
#pragma unroll 1
      for (int u = 0; u < ALL; u++) {
        const Unit v = unit(u);
        if (v.valid) copy_async(place_of(v), weight + min(v.at, k - 8), true);
      }
      copy_async_commit();
    }
    if (!expert) wait_for_previous_kernel();
    uint4 raw[BATCH];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const Unit v = unit(first + b);
        const bool inside = v.valid && v.at < k;
        raw[b] = inside ? *reinterpret_cast<const uint4*>(x + x_row(v.m) * k + v.at) : make_uint4(0, 0, 0, 0);
      }
    };
    float* squares = shared_squares + warp;
    float square = 0;  // a lane's, of one row
    const auto add_squares = [&](const Unit& v, const float (&e)[8]) {
      constexpr int LANES = EACH < 32 ? EACH : 32;  // neighbours with units of one row
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) sum += e[i] * e[i];
      if (M == 1) {
        square += sum;
        return;
      }
      sum = warp_sum<LANES>(sum);
      if (v.valid && lane % LANES == 0) squares[v.m * WARPS] += sum;
    };
    const auto leave_square = [&] {
      if (M > 1) return;
      square = warp_sum(square);
      if (lane == 0) *squares = square;
    };
    if (weight && M > 1) {
      for (int m = lane; m < M; m += 32) squares[m * WARPS] = 0;
      __syncwarp();
    }
    if (weight && !BEHIND) {
#pragma unroll 1
      for (int first = 0; first < ALL; first += BATCH) {
        fetch(first);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          float e[8];
          load(e, reinterpret_cast<const T*>(&raw[b]));
          add_squares(unit(first + b), e);
        }
      }
      leave_square();
      __syncthreads();
    }
    if (weight && AHEAD) copy_async_wait<0>();
#pragma unroll 1
    for (int first = 0; first < ALL; first += BATCH) {
      if (ALL > BATCH || !weight || BEHIND) fetch(first);
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const Unit v = unit(first + b);
        float e[8];
        load(e, reinterpret_cast<const T*>(&raw[b]));
        if (weight && BEHIND) add_squares(v, e);
        if (weight && v.valid) {
          const float r = BEHIND ? 1.0f : norm_factor(v.m, eps);
          float g[8];
          load(g, AHEAD ? reinterpret_cast<const G*>(place_of(v)) : weight + min(v.at, k - 8));
#pragma unroll
          for (int i = 0; i < 8; i++) e[i] = v.at < k ? to_float(from_float<T>(e[i] * r * g[i])) : 0.0f;
        }
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += e[i], e[i] *= Subnormal<T>::X;
#pragma unroll
        for (int bit = 4; bit < 4 * WORDS; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
#pragma unroll
        for (int bit = 1; bit < 4 / PARTS; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
        if (!v.valid) continue;
        *place_of(v) =
            make_uint4(pack<T>(e[0], e[4]), pack<T>(e[2], e[6]), pack<T>(e[1], e[5]), pack<T>(e[3], e[7]));
        if (v.j == 0 && v.t % (4 / PARTS) == 0)
          shared_sums[((v.take * TAKE + v.step) * PARTS + v.t * PARTS / 4) * M + v.m] =
              sum * (1 / Subnormal<T>::UNDO);
      }
    }
    if (weight && BEHIND) leave_square();
  }

  // sums[pass] += tile @ x of that take, for this lane's rows g, g+8 and two rows of x.
  __device__ __forceinline__ void multiply(float (&sums)[PASSES][4], const Held& held, int take) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, part = t * PARTS / 4;
    // Column g of b carries the group of this lane's k, or nothing.
    const uint4* b_of = (g / COLS == part ? shared_x + take * SLICE : zeros) + t;
#pragma unroll
    for (int s = 0; s < TAKE; s++) {
      float even[PASSES][4] = {}, odd[PASSES][4] = {};
#pragma unroll
      for (int j = 0; j < WORDS; j++) {
        const unsigned lo = held.w[s][0][j], hi = held.w[s][1][j];
        const unsigned a[4] = {lo & 0x000f000fu, hi & 0x000f000fu, lo >> 8 & 0x000f000fu,
                               hi >> 8 & 0x000f000fu};
        const unsigned b[4] = {lo & 0x00f000f0u, hi & 0x00f000f0u, lo >> 8 & 0x00f000f0u,
                               hi >> 8 & 0x00f000f0u};
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
          const int m = min(p * COLS + g % COLS, M - 1);  // columns beyond M repeat: nobody looks
          const uint4 v = b_of[((s * WORDS + j) * M + m) * 4];
          mma(even[p], a, v.x, v.y, T());
          mma(odd[p], b, v.z, v.w, T());
        }
      }
      const float scale[2] = {factor(held.scale[0], s, part), factor(held.scale[1], s, part)};
      const float bias[2] = {factor(held.bias[0], s, part), factor(held.bias[1], s, part)};
#pragma unroll
      for (int p = 0; p < PASSES; p++)
#pragma unroll
        for (int i = 0; i < (M == 1 ? 1 : 2); i++) {
          const int m = min(p * COLS + 2 * t % COLS + i, M - 1);
          const float total = shared_sums[((take * TAKE + s) * PARTS + part) * M + m];
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const float product = fmaf(odd[p][2 * r + i], 1.0f / 16, even[p][2 * r + i]);
            sums[p][2 * r + i] = fmaf(scale[r], product, sums[p][2 * r + i]);
            sums[p][2 * r + i] = fmaf(bias[r], total, sums[p][2 * r + i]);
          }
        }
    }
  }

  // Lanes' sums -> the warp's place in a buffer, the groups of a quad added.
  __device__ __forceinline__ void share(float (&sums)[PASSES][4], int buffer) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float* out = shared_out + (buffer * WARPS + warp) * (M * ROWS);
#pragma unroll
    for (int p = 0; p < PASSES; p++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float v = sums[p][i];
        sums[p][i] = 0;
        if (M == 1 && i % 2) continue;
#pragma unroll
        for (int bit = 4 / PARTS; bit < 4; bit *= 2) v += __shfl_xor_sync(0xffffffffu, v, bit);
        const int m = p * COLS + 2 * t % COLS + i % 2;
        if (t * PARTS / 4 == 0 && m < M) out[m * ROWS + g + i / 2 * 8] = v;
      }
  }

  __device__ __forceinline__ float total(int buffer, int m, int row) const {
    const float* in = shared_out + buffer * (WARPS * M * ROWS) + m * ROWS + row;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += in[i * M * ROWS];
    return sum * Subnormal<T>::UNDO;
  }

  // The count-th tile of this block is multiplied. normed: the norm's r is still to come.
  template <typename E>
  __device__ __forceinline__ void finish(float (&sums)[PASSES][4], int tile, int count, bool normed,
                                         float eps, const E& epilogue) const {
    constexpr int COLUMNS = ROWS / E::ROWS, ITEMS = (M * COLUMNS + 31) / 32;  // of y; a lane's
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int buffer = count % 2;
    const bool writes = warp == count % WARPS;
    share(sums, buffer);
    typename E::Behind behind[ITEMS];  // under way while the others finish
#pragma unroll
    for (int i = 0; writes && i < ITEMS; i++) {
      const int m = (i * 32 + lane) / COLUMNS, row = blockIdx.y * M + m;
      const int column = tile * COLUMNS + lane % COLUMNS;
      if (m < M && row < rows && column < epilogue.columns()) behind[i] = epilogue.ahead(row, column);
    }
    __syncthreads();  // whoever fills this buffer again has passed the next tile's
    if (!writes) return;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int m = (i * 32 + lane) / COLUMNS, row = blockIdx.y * M + m;
      const int column = tile * COLUMNS + lane % COLUMNS, first = lane % COLUMNS * E::ROWS;
      if (m >= M || row >= rows || column >= epilogue.columns()) continue;
      const float r = normed ? norm_factor(m, eps) : 1.0f;
      epilogue.write(row, column, total(buffer, m, first) * r,
                     E::ROWS == 2 ? total(buffer, m, first + 1) * r : 0.0f, behind[i]);
    }
  }

  // G: type of the norm's weight (K,), null without a norm.
  template <typename G, typename E>
  __device__ __forceinline__ void run(const G* weight, float eps, const E& epilogue) {
    start_next_kernel();
    const int warp = threadIdx.x / 32, tiles = (n + ROWS - 1) / ROWS, takes = (k + SPAN - 1) / SPAN;
    int tile = blockIdx.x, take = warp, count = 0;
    if (expert) {
      wait_for_previous_kernel();
      const long long first = static_cast<long long>(expert[blockIdx.y]) * n;
      w += first * (k / 8), scales += first * (k / GROUP), biases += first * (k / GROUP);
    }
    Held held;  // the first loads are under way while x is prepared
    if (take < takes) load_held(held, tile, take);
    place();
    prepare_x(weight, eps);
    __syncwarp();  // a warp multiplies by nothing but its own x, and by zeros
    float sums[PASSES][4] = {};
#pragma unroll 1
    while (tile < tiles) {
      if (take < takes) multiply(sums, held, take);
      take += WARPS;
      const int done = tile;
      const bool last = take >= TAKES;
      if (last) take = warp, tile += gridDim.x;
      if (tile < tiles && take < takes) load_held(held, tile, take);
      if (last) finish(sums, done, count++, BEHIND && weight, eps, epilogue);
    }
  }
};

}  // namespace qrun
