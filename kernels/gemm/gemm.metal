// gemm: y (M, N) = x (M, K) @ w.T for layers that are not quantized, w (N, K) of any float type V.
//
// The same tiles, grid and epilogues as qmm (its picture holds here), with a plain loader on both
// sides. K may be anything: both loaders fill with zeros past it. VEC elements of x and VEC_W of w
// move at a time; both divide K, but for BY_ROWS = false (w stored (K, N): the product with w
// itself) VEC_W divides N.

#include "../common/product.metal"

template <typename T, typename V, int BM, int BN, int BK, int WM, int WN, int STAGES, int VEC,
          int VEC_W, bool BY_ROWS>
struct Gemm {
  CONST THREADS = WM * WN * 32;
  using X = DenseLoader<T, BM, BK, THREADS, VEC, false>;
  using W = DenseLoader<V, BY_ROWS ? BN : BK, BY_ROWS ? BK : BN, THREADS, VEC_W, !BY_ROWS>;
  using Grid = BlockMMA<T, V, BM, BN, BK, WM, WN, X::LD, W::LD, BY_ROWS>;
  CONST TILES = STAGES * (X::BYTES + W::BYTES) / 16;  // threadgroup memory, in uint4

  template <typename E>
  METAL_FUNC static void run(const device T* x, const device V* w, E epilogue, int M, int N, int K,
                             threadgroup uint4* tiles, uint3 tile, uint simdgroup, uint lane) {
    const int row = tile.x * BM;
    const int col = tile.y * BN;
    const int id = simdgroup * 32 + lane;
    X left;
    W right;
    Grid grid;
    left.begin(x, M, K, row, 0, id);
    right.begin(w, BY_ROWS ? N : K, BY_ROWS ? K : N, BY_ROWS ? col : 0, BY_ROWS ? 0 : col, id);
    grid.begin(simdgroup, lane);
    multiply_tiles<STAGES>(left, right, grid, (K + BK - 1) / BK, tiles);
    grid.store(epilogue, row, col, M, N);
  }
};
