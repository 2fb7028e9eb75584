// swiglu: (M, 2N) of interleaved gate and up -> (M, N), out[i] = silu(y[2i]) * y[2i + 1].
//
// For products that do not carry the activation in their epilogue; one thread a result.

#include "../common/epilogue.metal"

template <int ACTIVATION, typename T>
METAL_FUNC void gated(const device T* gate_up, device T* out, uint i) {
  const vec<T, 2> pair = *(const device vec<T, 2>*)(gate_up + 2 * size_t(i));
  out[i] = T(activate<ACTIVATION>(float2(float(pair.x), float(pair.y))).x);
}
