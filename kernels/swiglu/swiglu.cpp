// out[i] = silu(gate_up[2i]) * gate_up[2i+1]: the activation alone, where no product precedes it.
#include "../common/epilogue.h"
#include "../common/kernels.h"

namespace qrun::QRUN_NS {

void swiglu(const void* gate_up, void* y, Type type, size_t i0, size_t i1) {
  for (size_t i = i0; i < i1; i += 16) {
    const int n = i1 - i < 16 ? (int)(i1 - i) : 16;
    alignas(64) float pairs[32], gate[16], up[16];
    store(pairs, load_first(at(gate_up, type, 2 * i), type, 2 * n < 16 ? 2 * n : 16));
    if (n > 8)
      store(pairs + 16, load_first(at(gate_up, type, 2 * i + 16), type, 2 * n - 16));
    else
      store(pairs + 16, splat(0));
    for (int j = 0; j < 16; j++) {
      gate[j] = pairs[2 * j];
      up[j] = pairs[2 * j + 1];
    }
    store_first(at(y, type, i), type, silu(load(gate)) * load(up), n);
  }
}

}  // namespace qrun::QRUN_NS
