// qmv: y (M, N) = x (M, K) @ w.T for few rows of x (decode), w packed (N, K).
//
// Bound by memory: every packed weight is read once, in accesses of 4 to 16 bytes that follow each
// other across the lanes, and is decoded in registers. A simdgroup owns ROWS rows of w; a lane
// takes RUN consecutive weights of each, then the next RUN, 32 * SPLIT runs further along K:
//
//               lane 0     lane 1     lane 2          lane 31
//            +----------+----------+----------+ .... +----------+
//   row n    |  RUN w   |  RUN w   |  RUN w   |      |  RUN w   |   next step ->
//   row n+1  |          |          |          |      |          |
//    ...     +----------+----------+----------+ .... +----------+
//   x        |  RUN x, loaded once for the ROWS rows            |
//
// * Weights are masked, not shifted down; x is divided by those powers of two instead, once for
//   all rows. With q the sum over a group is  scale * (x . q) + bias * sum(x):  a run lies inside
//   one group, so its share of sum(x) serves all rows.
// * RUN divides the group size and that divides K, so a lane's run is inside or outside as a whole:
//   the march needs no checks but its own end. Rows past N take a second copy of the march.
// * SPLIT simdgroups share the ROWS rows, each with its part of K, where N is too short to fill
//   the machine. Their sums meet in threadgroup memory.
// * With NORM, x stands for rms_norm(x) * norm_weight. The root mean square is one factor of a
//   whole row of x, so it leaves the sum, and sum(x^2) is gathered in the same march.

#include <metal_simdgroup>

#include "../common/dequantize.metal"
#include "../common/epilogue.metal"

template <typename T, typename Scheme, int M, int ROWS, int RUN, int SIMDGROUPS, int SPLIT,
          bool NORM>
struct Qmv {
  CONST WORDS = RUN * Scheme::BITS / 32;
  CONST PIECE = 8;  // elements of x held at a time: M * PIECE registers
  CONST SUMS = ROWS * M;
  CONST SHARED = SPLIT == 1 ? 1 : SIMDGROUPS * (SUMS + M);  // floats of threadgroup memory
  static_assert(RUN % Scheme::PACK == 0 && Scheme::GROUP % RUN == 0, "whole words of one group");
  static_assert(RUN % PIECE == 0, "whole pieces");
  static_assert(ROWS % 2 == 0 && SIMDGROUPS % SPLIT == 0, "pairs of rows, whole splits");

  float sum[ROWS][M];  // x . w
  float squares[M];    // x . x

  // Adds what this lane's runs contribute. FULL: all ROWS rows lie inside; else the first `rows`.
  template <bool FULL, typename G>
  METAL_FUNC void march(const device T* x, const device G* norm, Scheme w, int row, int rows,
                        int first, int K) thread {
    for (int k = first * RUN; k < K; k += 32 * SPLIT * RUN) {
      uint run[ROWS][WORDS];
      Group group[ROWS];
      float dot[ROWS][M];  // x . q over the run
      float x_sum[M];
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        if (FULL || r < rows) {
          load_words(w.words(row + r, k), run[r]);
          group[r] = w.group(row + r, k);
        }
        UNROLL
        for (int m = 0; m < M; m++) {
          dot[r][m] = 0;
        }
      }
      UNROLL
      for (int m = 0; m < M; m++) {
        x_sum[m] = 0;
      }

      UNROLL
      for (int p = 0; p < RUN; p += PIECE) {
        float xs[M][PIECE];
        load_x(x + k + p, norm + k + p, K, p, xs, x_sum);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          if (FULL || r < rows) {
            UNROLL
            for (int i = 0; i < PIECE; i++) {
              const float code = Scheme::code(run[r], p + i);
              UNROLL
              for (int m = 0; m < M; m++) {
                dot[r][m] += code * xs[m][i];
              }
            }
          }
        }
      }

      UNROLL
      for (int r = 0; r < ROWS; r++) {
        if (FULL || r < rows) {
          UNROLL
          for (int m = 0; m < M; m++) {
            sum[r][m] += group[r].scale * dot[r][m] + group[r].bias * x_sum[m];
          }
        }
      }
    }
  }

  // PIECE elements of each row of x, times the norm's weight, summed, then divided by the powers
  // of two which the masked weights p, p + 1, ... of a run carry.
  template <typename G>
  METAL_FUNC void load_x(const device T* x, const device G* norm, int K, int p,
                         thread float (&xs)[M][PIECE], thread float (&x_sum)[M]) thread {
    float gain[PIECE];
    if (NORM) {
      load_run(norm, gain);
    }
    UNROLL
    for (int m = 0; m < M; m++) {
      load_run(x + size_t(m) * K, xs[m]);
      UNROLL
      for (int i = 0; i < PIECE; i++) {
        if (NORM) {
          squares[m] += xs[m][i] * xs[m][i];
          xs[m][i] *= gain[i];
        }
        x_sum[m] += xs[m][i];
        xs[m][i] *= undo(Scheme::shift(p + i));
      }
    }
  }

  // All lanes, then all SPLIT simdgroups of these rows, get the whole sums.
  METAL_FUNC void reduce(threadgroup float* shared, uint simdgroup, uint lane) thread {
    UNROLL
    for (int m = 0; m < M; m++) {
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        sum[r][m] = simd_sum(sum[r][m]);
      }
      squares[m] = NORM ? simd_sum(squares[m]) : 0;
    }
    if (SPLIT > 1) {
      threadgroup float* mine = shared + simdgroup * (SUMS + M);
      if (lane == 0) {
        UNROLL
        for (int m = 0; m < M; m++) {
          UNROLL
          for (int r = 0; r < ROWS; r++) {
            mine[r * M + m] = sum[r][m];
          }
          mine[SUMS + m] = squares[m];
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all partial sums are there
      const threadgroup float* all = shared + simdgroup / SPLIT * SPLIT * (SUMS + M);
      UNROLL
      for (int m = 0; m < M; m++) {
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          sum[r][m] = 0;
          for (int s = 0; s < SPLIT; s++) {
            sum[r][m] += all[s * (SUMS + M) + r * M + m];
          }
        }
        squares[m] = 0;
        for (int s = 0; s < SPLIT; s++) {
          squares[m] += all[s * (SUMS + M) + SUMS + m];
        }
      }
    }
  }

  template <typename G, typename E>
  METAL_FUNC static void run(const device T* x, const device G* norm, float eps, Scheme w,
                             E epilogue, int N, int K, threadgroup float* shared, uint block,
                             uint simdgroup, uint lane) {
    const int part = simdgroup % SPLIT;
    const int row = (block * (SIMDGROUPS / SPLIT) + simdgroup / SPLIT) * ROWS;
    const int rows = min(ROWS + 0, N - row);  // not positive past the end: such a one only waits

    Qmv self;
    UNROLL
    for (int m = 0; m < M; m++) {
      self.squares[m] = 0;
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        self.sum[r][m] = 0;
      }
    }
    if (rows == ROWS) {
      self.template march<true>(x, norm, w, row, rows, part * 32 + lane, K);
    } else {
      self.template march<false>(x, norm, w, row, rows, part * 32 + lane, K);
    }
    self.reduce(shared, simdgroup, lane);

    // Lane i writes pair i: rows row + 2p and row + 2p + 1 of w, row m of x.
    UNROLL
    for (int m = 0; m < M; m++) {
      const float factor = NORM ? rsqrt(self.squares[m] / K + eps) : 1.0f;
      UNROLL
      for (int p = 0; p < ROWS / 2; p++) {
        if (part == 0 && lane == uint(m * (ROWS / 2) + p)) {
          const float2 y = float2(self.sum[2 * p][m], self.sum[2 * p + 1][m]) * factor;
          epilogue.store_inside(y, m, row + 2 * p, M);
        }
      }
    }
  }
};
