// softcap: limit * tanh(x / limit).
#pragma once

#include "../common/ptx.cuh"

namespace qrun {

// x and y (count,). Grid: count / threads.
template <typename T>
__device__ __forceinline__ void softcap(const T* x, T* y, float limit, long long count) {
  start_next_kernel();
  wait_for_previous_kernel();
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i < count) y[i] = from_float<T>(limit * tanhf(to_float(x[i]) / limit));
}

}  // namespace qrun
