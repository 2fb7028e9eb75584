// y = x * rsqrt(mean(x^2) + eps) * weight + residual, one row at a time; float32 inside, one
// rounding. Centered: of x - mean(x).
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

void rms_norm(const RmsNorm& a, int row0, int row1) {
  for (int row = row0; row < row1; row++) {
    const void* x = at(a.x, a.type, (size_t)row * a.d);
    void* y = at(a.y, a.type, (size_t)row * a.d);
    f32x16 mean = splat(0), squares = splat(0);
    if (a.centered) {
      f32x16 total = splat(0);
      for (int i = 0; i < a.d; i += 16)
        total = total + load_first(at(x, a.type, i), a.type, a.d - i);
      mean = splat(sum(total) / a.d);
    }
    for (int i = 0; i < a.d; i += 16) {
      f32x16 v = load_first(at(x, a.type, i), a.type, a.d - i) - mean;
      if (a.d - i < 16) {  // lanes behind the end count nothing
        float lanes[16];
        store(lanes, v);
        v = load_first(lanes, Type::f32, a.d - i);
      }
      squares = fma(v, v, squares);
    }
    const f32x16 r = splat(1.0f / __builtin_sqrtf(sum(squares) / a.d + a.eps));
    for (int i = 0; i < a.d; i += 16) {
      f32x16 v = load_first(at(x, a.type, i), a.type, a.d - i) - mean;
      f32x16 weight = load_first(at(a.weight, a.weight_type, i), a.weight_type, a.d - i);
      f32x16 normed = v * r * weight;
      if (a.residual) {
        const void* behind = at(a.residual, a.type, (size_t)row * a.d + i);
        normed = normed + load_first(behind, a.type, a.d - i);
      }
      store_first(at(y, a.type, i), a.type, normed, a.d - i);
    }
  }
}

}  // namespace qrun::QRUN_NS
