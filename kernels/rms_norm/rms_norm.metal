// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, one threadgroup a row.
//
// Bound by memory. A row is read twice, the second time from cache; WIDE elements an access, WIDE
// divides the row length K. Sums are float32, over lanes by shuffles, over simdgroups through
// threadgroup memory.

#include "../common/memory.metal"
#include "../common/reduce.metal"

template <int THREADS, int WIDE, typename T, typename W>
METAL_FUNC void rms_norm(const device T* x, const device W* weight, float eps, device T* y, int K,
                         threadgroup float* shared, uint row, uint simdgroup, uint lane) {
  const int first = (simdgroup * 32 + lane) * WIDE;
  x += size_t(row) * K;
  y += size_t(row) * K;
  float run[WIDE];
  float squares = 0;
  for (int k = first; k < K; k += THREADS * WIDE) {
    Wide<WIDE>::load(x + k, run);
    UNROLL
    for (int i = 0; i < WIDE; i++) {
      squares += run[i] * run[i];
    }
  }
  squares = threadgroup_sum<THREADS / 32>(squares, shared, simdgroup, lane);

  const float factor = rsqrt(squares / K + eps);
  float gain[WIDE];
  for (int k = first; k < K; k += THREADS * WIDE) {
    Wide<WIDE>::load(x + k, run);
    Wide<WIDE>::load(weight + k, gain);
    UNROLL
    for (int i = 0; i < WIDE; i++) {
      run[i] *= factor * gain[i];
    }
    Wide<WIDE>::store(y + k, run);
  }
}
