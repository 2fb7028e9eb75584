// An 8x8 fragment of a matrix, spread over a simdgroup: every lane holds two neighbours of a row.
//
//   lane   0  1 | 8  9        column  0 1 | 2 3 | 4 5 | 6 7
//          2  3 |10 11        row 0   lane 0  1    8    9
//          4  5 |12 13            1        2  3   10   11
//          6  7 |14 15            2        4  5   12   13
//         16 17 |24 25            3        6  7   14   15
//          ...                    4       16 17   24   25  ...
//
// Left factors, right factors and sums share this layout, so a sum can become a factor in place.

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>

#include "memory.metal"

// Row of this lane's pair.
METAL_FUNC int fragment_row(uint lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }

// First column of this lane's pair.
METAL_FUNC int fragment_col(uint lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }

// This lane's pair of the fragment at p, element (row, col) at p[row * ROW + col * COL]: a
// transposed matrix is only a swap of the two strides. Neighbours in memory come in one access.
template <int ROW, int COL, typename T>
METAL_FUNC float2 fragment_load(const threadgroup T* p, int row, int col) {
  const threadgroup T* at = p + row * ROW + col * COL;
  if (COL == 1) {
    const vec<T, 2> pair = *(const threadgroup vec<T, 2>*)at;
    return float2(float(pair.x), float(pair.y));
  }
  return float2(float(at[0]), float(at[COL]));
}

// a @ b + c, each 8x8.
METAL_FUNC float2 fragment_multiply(float2 a, float2 b, float2 c) {
  simdgroup_matrix<float, 8, 8> A, B, C;
  reinterpret_cast<thread float2&>(A.thread_elements()) = a;
  reinterpret_cast<thread float2&>(B.thread_elements()) = b;
  reinterpret_cast<thread float2&>(C.thread_elements()) = c;
  simdgroup_multiply_accumulate(C, A, B, C);
  return reinterpret_cast<thread float2&>(C.thread_elements());
}

// The four lanes of a row differ in lane bits 0 and 3, so two exchanges reduce a row.
METAL_FUNC float fragment_row_max(float2 pair) {
  float most = max(pair.x, pair.y);
  most = max(most, simd_shuffle_xor(most, 1));
  return max(most, simd_shuffle_xor(most, 8));
}

METAL_FUNC float fragment_row_sum(float2 pair) {
  float sum = pair.x + pair.y;
  sum += simd_shuffle_xor(sum, 1);
  return sum + simd_shuffle_xor(sum, 8);
}
