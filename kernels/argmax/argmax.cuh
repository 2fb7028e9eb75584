// argmax: the first index of the largest logit of a row, -1 if one of them is NaN or infinite.
#pragma once

#include "../common/ptx.cuh"

namespace qrun {

// The larger of two candidates, the earlier one if they are equal. Index -1: something was not finite.
__device__ __forceinline__ void better(float& value, int& index, float other, int at) {
  if (index < 0 || at < 0)
    index = -1;
  else if (other > value || (other == value && at < index))
    value = other, index = at;
}

// logits (M, V), out (M,). A block of whole warps, at most 1024 threads, takes a row. Grid: M blocks.
template <typename T>
__device__ __forceinline__ void argmax(const T* logits, int* out, int v) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ float values[32];
  __shared__ int indices[32];
  logits += static_cast<long long>(blockIdx.x) * v;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float value = -3.4028235e38f;  // the smallest finite number; a thread without elements holds index v
  int index = v;
  for (int i = threadIdx.x; i < v; i += blockDim.x) {
    const float x = to_float(logits[i]);
    better(value, index, x, x - x == 0 ? i : -1);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    better(value, index, __shfl_xor_sync(0xffffffffu, value, step),
           __shfl_xor_sync(0xffffffffu, index, step));
  if (lane == 0) values[warp] = value, indices[warp] = index;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < blockDim.x / 32; i++) better(value, index, values[i], indices[i]);
  out[blockIdx.x] = index;
}

}  // namespace qrun
