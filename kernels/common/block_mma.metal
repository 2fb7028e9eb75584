// BlockMMA: the arithmetic of one threadgroup on one pair of tiles.
//
// The threadgroup's BM x BN tile of the result is split over WM x WN simdgroups. Each simdgroup
// owns a grid of TM x TN fragments that never leaves its registers: it is zeroed once, the K axis
// is marched through it, and the epilogue reads it from there. One step of 8 along K loads
// TM + TN fragments for TM * TN multiplies, which is why a larger grid pays, until it spills:
//
//          b0 b1 b2 b3        grid    floats a lane   loads per multiply
//      a0 [ .  .  .  . ]      1x1            2             2
//      a1 [ .  .  .  . ]      2x2            8             1
//      a2 [ .  .  .  . ]      4x2           16             0.75
//      a3 [ .  .  .  . ]      4x4           32             0.5

#include "fragment.metal"

// A: left tile, BM x BK, row stride LDA. B: right tile, stored BN x BK (B_BY_ROWS, as weights
// are) or BK x BN, row stride LDB.
template <typename A, typename B, int BM, int BN, int BK, int WM, int WN, int LDA, int LDB,
          bool B_BY_ROWS>
struct BlockMMA {
  CONST TM = BM / (8 * WM);
  CONST TN = BN / (8 * WN);
  CONST B_ROW = B_BY_ROWS ? 1 : LDB;  // stride of one step along K in the right tile
  CONST B_COL = B_BY_ROWS ? LDB : 1;  // stride of one step along N
  static_assert(TM * 8 * WM == BM && TN * 8 * WN == BN && BK % 8 == 0, "tiles are whole fragments");

  float2 grid[TM][TN];
  int row;  // of this lane in every fragment
  int col;
  int row0;  // of this simdgroup's grid in the tile
  int col0;

  METAL_FUNC void begin(uint simdgroup, uint lane) thread {
    row = fragment_row(lane);
    col = fragment_col(lane);
    row0 = int(simdgroup) / WN * (TM * 8);
    col0 = int(simdgroup) % WN * (TN * 8);
    UNROLL
    for (int i = 0; i < TM; i++) {
      UNROLL
      for (int j = 0; j < TN; j++) {
        grid[i][j] = float2(0);
      }
    }
  }

  // grid += left (BM, BK) @ right (BK, BN)
  METAL_FUNC void march(const threadgroup A* left, const threadgroup B* right) thread {
    left += row0 * LDA;
    right += col0 * B_COL;
    UNROLL
    for (int k = 0; k < BK; k += 8) {
      // Waits for nobody: it keeps the compiler from loading the next fragments into registers
      // before these are used up.
      simdgroup_barrier(mem_flags::mem_none);
      float2 a[TM];
      float2 b[TN];
      UNROLL
      for (int i = 0; i < TM; i++) {
        a[i] = fragment_load<LDA, 1>(left + i * 8 * LDA + k, row, col);
      }
      UNROLL
      for (int j = 0; j < TN; j++) {
        b[j] = fragment_load<B_ROW, B_COL>(right + k * B_ROW + j * 8 * B_COL, row, col);
      }
      UNROLL
      for (int i = 0; i < TM; i++) {
        UNROLL
        for (int j = 0; j < TN; j++) {
          grid[i][j] = fragment_multiply(a[i], b[j], grid[i][j]);
        }
      }
    }
  }

  // Hands every pair to the epilogue, which writes it. A tile that lies inside the result is
  // written without a check; the choice is one branch for the whole tile.
  template <typename E>
  METAL_FUNC void store(E epilogue, int tile_row, int tile_col, int M, int N) const thread {
    const int top = tile_row + row0 + row;
    const int left = tile_col + col0 + col;
    if (tile_row + BM <= M && tile_col + BN <= N) {
      UNROLL
      for (int i = 0; i < TM; i++) {
        UNROLL
        for (int j = 0; j < TN; j++) {
          epilogue.store(grid[i][j], top + i * 8, left + j * 8);
        }
      }
    } else {
      UNROLL
      for (int i = 0; i < TM; i++) {
        UNROLL
        for (int j = 0; j < TN; j++) {
          epilogue.store_inside(grid[i][j], top + i * 8, left + j * 8, M);
        }
      }
    }
  }
};
