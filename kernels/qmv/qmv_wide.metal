// qmv for M = 3 .. 16: y (M, N) = x (M, K) @ w.T by 8x8 fragments, w dequantized straight into
// them.
//
// With more than a few rows of x the sums of qmv.metal outgrow the registers. Here a simdgroup
// multiplies fragments of x (8 rows) by fragments of w.T, and no threadgroup memory is needed,
// because the order of k in a sum is free: each lane reads whole runs of RUN consecutive weights,
// and step i multiplies weight i of eight different runs:
//
//          lane's pair in a fragment of x           lane's pair in a fragment of w.T
//                run 0  run 1   ...  run 7                  n   n + 1
//      row m   [ i      i       ...  i     ]        run r [ i   i     ]       k = r * RUN + i
//
//   left:  x[m][run c][i], x[m][run c + 1][i]       c = fragment_col, m = fragment_row
//   right: w[n][run r][i], w[n + 1][run r][i]       n = fragment_col, r = fragment_row
//
// So both sides come in long accesses, every packed weight is read once, and a lane ends with
// results of one row of x at two neighbouring columns: a pair, as the epilogue wants it. SPLIT
// and NORM are as in qmv.metal.

#include "../common/dequantize.metal"
#include "../common/epilogue.metal"
#include "../common/fragment.metal"

// TM: fragments of 8 rows of x. TN: fragments of 8 rows of w that a simdgroup serves together.
template <typename T, typename Scheme, int TM, int TN, int RUN, int SIMDGROUPS, int SPLIT,
          bool NORM>
struct QmvWide {
  CONST WORDS = RUN * Scheme::BITS / 32;
  CONST PIECE = 8;  // elements of x held at a time
  CONST SUMS = TM * TN * 2 + TM;
  CONST SHARED = SPLIT == 1 ? 1 : SIMDGROUPS * SUMS * 32;  // floats of threadgroup memory
  static_assert(RUN % Scheme::PACK == 0 && Scheme::GROUP % RUN == 0, "whole words of one group");
  static_assert(RUN % PIECE == 0, "whole pieces");

  float2 sum[TM][TN];
  float squares[TM];  // x . x of this lane's runs
  int row;            // of this lane's pair in a fragment
  int col;

  // Adds blocks part, part + SPLIT, ... of eight runs. The loop is the same for all lanes, as the
  // multiplies want it; a run past K or a row past N counts as zeros.
  template <typename G>
  METAL_FUNC void march(const device T* x, const device G* norm, Scheme w, int n0, int part, int M,
                        int N, int K) thread {
    for (int k0 = part * 8 * RUN; k0 < K; k0 += SPLIT * 8 * RUN) {
      uint run[TN][2][WORDS];
      Group group[TN][2];
      if (n0 + TN * 8 <= N && k0 + 8 * RUN <= K) {
        load_w<true>(w, n0, k0 + row * RUN, N, K, run, group);
      } else {
        load_w<false>(w, n0, k0 + row * RUN, N, K, run, group);
      }

      UNROLL
      for (int p = 0; p < RUN; p += PIECE) {
        float xs[TM][2][PIECE];
        UNROLL
        for (int e = 0; e < 2; e++) {
          const int k_left = k0 + (col + e) * RUN + p;
          UNROLL
          for (int t = 0; t < TM; t++) {
            load_x(x, norm, t, row + t * 8, k_left, M, K, xs[t][e]);
          }
        }
        UNROLL
        for (int i = 0; i < PIECE; i++) {
          UNROLL
          for (int j = 0; j < TN; j++) {
            const float2 right = float2(weight<Scheme>(run[j][0], p + i, group[j][0]),
                                        weight<Scheme>(run[j][1], p + i, group[j][1]));
            UNROLL
            for (int t = 0; t < TM; t++) {
              const float2 left = float2(xs[t][0][i], xs[t][1][i]);
              sum[t][j] = fragment_multiply(left, right, sum[t][j]);
            }
          }
        }
      }
    }
  }

  // This lane's runs of w. FULL: no run of the block is outside.
  template <bool FULL>
  METAL_FUNC void load_w(Scheme w, int n0, int k, int N, int K, thread uint (&run)[TN][2][WORDS],
                         thread Group (&group)[TN][2]) const thread {
    UNROLL
    for (int j = 0; j < TN; j++) {
      UNROLL
      for (int e = 0; e < 2; e++) {
        const int n = n0 + j * 8 + col + e;
        if (FULL || (n < N && k < K)) {
          load_words(w.words(n, k), run[j][e]);
          group[j][e] = w.group(n, k);
        } else {
          UNROLL
          for (int i = 0; i < WORDS; i++) {
            run[j][e][i] = 0;
          }
          group[j][e] = {0, 0};
        }
      }
    }
  }

  // PIECE elements of row m of x from k on, times the norm's weight.
  template <typename G>
  METAL_FUNC void load_x(const device T* x, const device G* norm, int t, int m, int k, int M, int K,
                         thread float (&xs)[PIECE]) thread {
    UNROLL
    for (int i = 0; i < PIECE; i++) {
      xs[i] = 0;
    }
    if (m < M && k < K) {
      load_run(x + size_t(m) * K + k, xs);
      if (NORM) {
        float gain[PIECE];
        load_run(norm + k, gain);
        UNROLL
        for (int i = 0; i < PIECE; i++) {
          squares[t] += xs[i] * xs[i];
          xs[i] *= gain[i];
        }
      }
    }
  }

  // Adds the sums of the SPLIT simdgroups that share these rows of w.
  METAL_FUNC void join(threadgroup float* shared, uint simdgroup, uint lane) thread {
    threadgroup float* mine = shared + simdgroup * SUMS * 32 + lane;
    UNROLL
    for (int t = 0; t < TM; t++) {
      UNROLL
      for (int j = 0; j < TN; j++) {
        mine[(t * TN + j) * 64] = sum[t][j].x;
        mine[(t * TN + j) * 64 + 32] = sum[t][j].y;
      }
      mine[(TM * TN * 2 + t) * 32] = squares[t];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all partial sums are there
    const threadgroup float* all = shared + simdgroup / SPLIT * SPLIT * SUMS * 32 + lane;
    begin(row, col);
    for (int s = 0; s < SPLIT; s++) {
      UNROLL
      for (int t = 0; t < TM; t++) {
        UNROLL
        for (int j = 0; j < TN; j++) {
          sum[t][j].x += all[(t * TN + j) * 64];
          sum[t][j].y += all[(t * TN + j) * 64 + 32];
        }
        squares[t] += all[(TM * TN * 2 + t) * 32];
      }
      all += SUMS * 32;
    }
  }

  METAL_FUNC void begin(int lane_row, int lane_col) thread {
    row = lane_row;
    col = lane_col;
    UNROLL
    for (int t = 0; t < TM; t++) {
      squares[t] = 0;
      UNROLL
      for (int j = 0; j < TN; j++) {
        sum[t][j] = float2(0);
      }
    }
  }

  template <typename G, typename E>
  METAL_FUNC static void run(const device T* x, const device G* norm, float eps, Scheme w,
                             E epilogue, int M, int N, int K, threadgroup float* shared, uint block,
                             uint simdgroup, uint lane) {
    const int part = simdgroup % SPLIT;
    const int n0 = (block * (SIMDGROUPS / SPLIT) + simdgroup / SPLIT) * (TN * 8);
    QmvWide self;
    self.begin(fragment_row(lane), fragment_col(lane));
    self.march(x, norm, w, n0, part, M, N, K);
    if (SPLIT > 1) {
      self.join(shared, simdgroup, lane);
    }
    UNROLL
    for (int t = 0; t < TM; t++) {
      // A lane's results belong to the row of x that it has loaded runs of.
      const float all = NORM ? fragment_row_sum(float2(self.squares[t], 0)) : 0.0f;
      const float factor = NORM ? rsqrt(all / K + eps) : 1.0f;
      UNROLL
      for (int j = 0; j < TN; j++) {
        if (part == 0) {
          epilogue.store_inside(self.sum[t][j] * factor, self.row + t * 8, n0 + j * 8 + self.col,
                                M);
        }
      }
    }
  }
};
