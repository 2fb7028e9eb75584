// qmm: y (M, N) = x (M, K) @ w.T for many rows of x, w packed (N, K).
//
// Bound by arithmetic. A threadgroup owns a BM x BN tile of y; it marches tiles of x (BM, BK) and
// of dequantized w (BN, BK) along K, through a grid of accumulators that stays in registers:
//
//                  w  N              A column of tiles reads the same tile of w, and columns of
//             +---+---+---+          tiles start one after the other (M is the fast axis of the
//          K  |   | # |   |          launch): w comes from device memory about once and from
//             +---+---+---+          cache for the others. In all it is read ceil(M / BM) times,
//     +----+  +---+---+---+          x ceil(N / BN) times.
//   x |####|  |   | y |   |  BM
//   M +----+  +---+---+---+
//       K           BN
//
// BY_ROWS = false takes w packed along N instead, (K, N): the product with w itself. VEC elements
// of x move at a time; VEC divides K.

#include "../common/product.metal"

template <typename T, typename Scheme, int BM, int BN, int BK, int WM, int WN, int STAGES, int VEC,
          bool BY_ROWS>
struct Qmm {
  CONST THREADS = WM * WN * 32;
  using X = DenseLoader<T, BM, BK, THREADS, VEC, false>;
  using W = QuantizedLoader<Scheme, BY_ROWS ? BN : BK, BY_ROWS ? BK : BN, THREADS, !BY_ROWS>;
  using Grid = BlockMMA<T, float, BM, BN, BK, WM, WN, X::LD, W::LD, BY_ROWS>;
  CONST TILES = STAGES * (X::BYTES + W::BYTES) / 16;  // threadgroup memory, in uint4

  // tile: this threadgroup's place in y, counted in tiles: x down its rows, y along its columns.
  template <typename E>
  METAL_FUNC static void run(const device T* x, Scheme w, E epilogue, int M, int N, int K,
                             threadgroup uint4* tiles, uint3 tile, uint simdgroup, uint lane) {
    const int row = tile.x * BM;
    const int col = tile.y * BN;
    const int id = simdgroup * 32 + lane;
    X left;
    W right;
    Grid grid;
    left.begin(x, M, K, row, 0, id);
    right.begin(w, BY_ROWS ? N : K, BY_ROWS ? col : 0, BY_ROWS ? 0 : col, id);
    grid.begin(simdgroup, lane);
    multiply_tiles<STAGES>(left, right, grid, (K + BK - 1) / BK, tiles);
    grid.store(epilogue, row, col, M, N);
  }
};
