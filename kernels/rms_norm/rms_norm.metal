// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, one threadgroup a row.
// Centered: of x - mean(x).
//
// Bound by memory. A row is read twice, the second time from cache; WIDE elements an access, WIDE
// divides the row length K. Sums are float32, over lanes by shuffles, over simdgroups through
// threadgroup memory: 2 * THREADS / 32 floats, so that no sum waits for another's readers.

#include "../common/memory.metal"
#include "../common/reduce.metal"

template <int THREADS, int WIDE, bool CENTERED, typename T, typename W>
METAL_FUNC void rms_norm(const device T* x, const device W* weight, float eps, device T* y, int K,
                         threadgroup float* shared, uint row, uint simdgroup, uint lane) {
  const int first = (simdgroup * 32 + lane) * WIDE;
  x += size_t(row) * K;
  y += size_t(row) * K;
  float run[WIDE];
  float mean = 0;
  if (CENTERED) {
    for (int k = first; k < K; k += THREADS * WIDE) {
      Wide<WIDE>::load(x + k, run);
      UNROLL
      for (int i = 0; i < WIDE; i++) {
        mean += run[i];
      }
    }
    mean = threadgroup_sum<THREADS / 32>(mean, shared + THREADS / 32, simdgroup, lane) / K;
  }
  float squares = 0;
  for (int k = first; k < K; k += THREADS * WIDE) {
    Wide<WIDE>::load(x + k, run);
    UNROLL
    for (int i = 0; i < WIDE; i++) {
      squares += (run[i] - mean) * (run[i] - mean);
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
      run[i] = (run[i] - mean) * (factor * gain[i]);
    }
    Wide<WIDE>::store(y + k, run);
  }
}
