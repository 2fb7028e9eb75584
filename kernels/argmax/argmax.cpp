// Greedy choice over a row of logits.
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

// The first index of the largest; all ones (-1 as int32) if any element is not finite.
uint32_t argmax(const void* x, Type type, int n) {
  const f32x16 low = splat(-__builtin_inff());
  f32x16 most = low, poison = splat(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    f32x16 v = load(at(x, type, i), type);
    most = max(most, v);
    poison = poison + v * splat(0);
  }
  float best = greatest(most);
  float tail[16];
  store(tail, load_first(at(x, type, i), type, n - i));
  for (int j = 0; j < n - i; j++) {
    best = best > tail[j] ? best : tail[j];
    poison = poison + splat(tail[j] * 0);
  }
  if (!(sum(poison) == 0)) return 0xffffffffu;  // NaN and infinity times zero are NaN
  for (i = 0; i < n; i += 16) {
    store(tail, load_first(at(x, type, i), type, n - i));
    for (int j = 0; j < 16 && i + j < n; j++)
      if (tail[j] == best) return i + j;
  }
  return 0xffffffffu;
}

}  // namespace qrun::QRUN_NS
