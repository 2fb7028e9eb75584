// y = limit * tanh(x / limit)
#include "../common/kernels.h"
#include "../common/vec.h"

namespace qrun::QRUN_NS {

void softcap(const void* x, void* y, Type type, float limit, size_t i0, size_t i1) {
  for (size_t i = i0; i < i1; i += 16) {
    const int n = i1 - i < 16 ? (int)(i1 - i) : 16;
    f32x16 v = load_first(at(x, type, i), type, n);
    store_first(at(y, type, i), type, tanh(v * splat(1 / limit)) * splat(limit), n);
  }
}

}  // namespace qrun::QRUN_NS
