// What the chosen experts made of a token, weighted and added to the residual.
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

void combine(const Combine& c, int row0, int row1) {
  for (int r = row0; r < row1; r++) {
    const int* place = c.place + (size_t)r * c.top;
    const float* share = c.share + (size_t)r * c.top;
    for (int i = 0; i < c.n; i += 16) {
      f32x16 sum = splat(0);
      for (int j = 0; j < c.top; j++) {
        const void* x = at(c.x, c.type, (size_t)place[j] * c.n + i);
        sum = fma(load_first(x, c.type, c.n - i), splat(share[j]), sum);
      }
      const size_t out = (size_t)r * c.n + i;
      sum = sum + load_first(at(c.residual, c.type, out), c.type, c.n - i);
      store_first(at(c.y, c.type, out), c.type, sum, c.n - i);
    }
  }
}

}  // namespace qrun::QRUN_NS
