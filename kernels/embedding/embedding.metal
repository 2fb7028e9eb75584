// embedding: rows of a packed matrix w (N, K), dequantized: y (L, K), y[l] = row ids[l].
//
// Bound by memory and short: a thread takes one run of RUN weights of one row. An id outside
// 0 .. N - 1 gives a row of zeros rather than a read outside the matrix.

#include "../common/dequantize.metal"

// Ids: const device int* or, for fewer than 8 of them, const constant int*.
template <typename T, int RUN, typename Scheme, typename Ids>
METAL_FUNC void embedding(Ids ids, Scheme w, device T* y, int N, uint run, uint l) {
  constexpr int words = RUN * Scheme::BITS / 32;
  const int id = ids[l];
  const int k = run * RUN;
  uint held[words] = {0};
  Group group = {0, 0};
  if (id >= 0 && id < N) {
    load_words(w.words(id, k), held);
    group = w.group(id, k);
  }
  y += size_t(l) * w.K + k;
  UNROLL
  for (int i = 0; i < RUN; i++) {
    y[i] = T(weight<Scheme>(held, i, group));
  }
}
