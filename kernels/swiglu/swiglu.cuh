// swiglu: silu(gate) * up on interleaved columns, where no product has done it.
#pragma once

#include "../common/ptx.cuh"

namespace qrun {

// gate_up (count, 2), y (count,): one thread an output.
template <typename T>
__device__ __forceinline__ void swiglu(const T* gate_up, T* y, long long count) {
  start_next_kernel();
  wait_for_previous_kernel();
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float gate = to_float(gate_up[2 * i]), up = to_float(gate_up[2 * i + 1]);
  y[i] = from_float<T>(gate / (1 + expf(-gate)) * up);
}

}  // namespace qrun
