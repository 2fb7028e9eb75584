// Few rows of x against a dense matrix: each row of w is read once, for all rows of x.
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

// Rows x0 .. x0+M-1 of x against row n of w.
template <int M>
static inline void row(const Gemm& a, int x0, int n) {
  f32x16 sums[M];
  for (int m = 0; m < M; m++) sums[m] = splat(0);
  for (int i = 0; i < a.k; i += 16) {
    f32x16 w = load_first(at(a.w, a.w_type, (size_t)n * a.k + i), a.w_type, a.k - i);
    for (int m = 0; m < M; m++) {
      const void* x = at(a.x, a.type, (size_t)(x0 + m) * a.k + i);
      sums[m] = fma(load_first(x, a.type, a.k - i), w, sums[m]);
    }
  }
  for (int m = 0; m < M; m++) {
    const size_t out = (size_t)(x0 + m) * a.n + n;
    f32x16 y = splat(sum(sums[m]) * a.scale);
    if (a.bias) y = y + load_first(at(a.bias, a.bias_type, n), a.bias_type, 1);
    if (a.residual) y = y + load_first(at(a.residual, a.type, out), a.type, 1);
    store_first(at(a.y, a.type, out), a.type, y, 1);
  }
}

void gemm(const Gemm& a, int n0, int n1) {
  for (int n = n0; n < n1; n++) {
    int m = 0;
    for (; m + 4 <= a.m; m += 4) row<4>(a, m, n);
    for (; m < a.m; m++) row<1>(a, m, n);
  }
}

}  // namespace qrun::QRUN_NS
