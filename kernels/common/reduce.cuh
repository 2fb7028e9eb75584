// Sums and maxima over the lanes of a warp and the warps of a block.
#pragma once

namespace qrun {

// Over runs of WIDTH neighbouring lanes; every lane gets the result.
template <int WIDTH = 32>
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int i = WIDTH / 2; i > 0; i /= 2) v += __shfl_xor_sync(0xffffffffu, v, i);
  return v;
}

// Over a block of at most 1024 threads, whole warps; every thread gets the result.
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float partial[32];
  const int warps = blockDim.x / 32;
  v = warp_sum(v);
  __syncthreads();  // an earlier call's readers are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < warps; i++) sum += partial[i];
  return sum;
}

}  // namespace qrun
