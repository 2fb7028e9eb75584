// argmax: the first index of the largest logit of a row, -1 if one of them is NaN or infinite.
//
// A row is longer than one SM reads in the time that all of them need for a product, so it is cut into
// parts: argmax_part leaves each one's best, argmax_merge takes the best of those.
#pragma once

#include "../common/ptx.cuh"
#include "../common/types.cuh"

namespace qrun {

// A candidate: its logit and its index; -1 says that something was not finite.
struct Best {
  float value;
  int index;

  // The larger of two candidates, the earlier one if they are equal.
  __device__ __forceinline__ void meet(float other, int at) {
    if (index < 0 || at < 0)
      index = -1;
    else if (other > value || (other == value && at < index))
      value = other, index = at;
  }
};

// The best of all threads of a block, which are whole warps; known to thread 0.
__device__ __forceinline__ Best best_of_block(Best mine) {
  __shared__ Best shared[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    mine.meet(__shfl_xor_sync(0xffffffffu, mine.value, step),
              __shfl_xor_sync(0xffffffffu, mine.index, step));
  if (lane == 0) shared[warp] = mine;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < blockDim.x / 32; i++) mine.meet(shared[i].value, shared[i].index);
  return mine;
}

constexpr float LOWEST = -3.4028235e38f;  // the smallest finite number: a thread that saw nothing

// logits (M, V), of which the first `limit` count; values and indices (M, parts).
// Grid: parts x M blocks of whole warps, at most 1024 threads.
template <typename T>
__device__ __forceinline__ void argmax_part(const T* logits, float* values, int* indices, int v, int limit) {
  start_next_kernel();
  wait_for_previous_kernel();
  logits += static_cast<long long>(blockIdx.y) * v;
  Best best{LOWEST, limit};
#pragma unroll 4
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < limit; i += gridDim.x * blockDim.x) {
    const float x = to_float(logits[i]);
    best.meet(x, x - x == 0 ? i : -1);
  }
  best = best_of_block(best);
  if (threadIdx.x > 0) return;
  values[blockIdx.y * gridDim.x + blockIdx.x] = best.value;
  indices[blockIdx.y * gridDim.x + blockIdx.x] = best.index;
}

// values and indices (M, parts), out (M,). Grid: M blocks of whole warps.
__device__ __forceinline__ void argmax_merge(const float* values, const int* indices, int* out, int parts,
                                             int limit) {
  start_next_kernel();
  wait_for_previous_kernel();
  Best best{LOWEST, limit};
  for (int i = threadIdx.x; i < parts; i += blockDim.x)
    best.meet(values[blockIdx.x * parts + i], indices[blockIdx.x * parts + i]);
  best = best_of_block(best);
  if (threadIdx.x == 0) out[blockIdx.x] = best.index;
}

}  // namespace qrun
