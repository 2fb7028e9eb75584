// out[i] = silu(gate_up[2i]) * gate_up[2i+1]: the activation alone, where no product precedes it.
#include "../common/epilogue.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

void swiglu(const void* gate_up, void* y, Type type, size_t i0, size_t i1) {
  for (size_t i = i0; i < i1; i += 16) {
    const int n = i1 - i < 16 ? (int)(i1 - i) : 16;
    f32x16 gate, up;
    unzip(load_first(at(gate_up, type, 2 * i), type, 2 * n < 16 ? 2 * n : 16),
          n > 8 ? load_first(at(gate_up, type, 2 * i + 16), type, 2 * n - 16) : splat(0), gate, up);
    store_first(at(y, type, i), type, silu(gate) * up, n);
  }
}

}  // namespace qrun::QRUN_NS
