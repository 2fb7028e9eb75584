// What is known of softmax(scores) @ v, while keys come by and when parts of it meet.
#pragma once

namespace qrun {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -3e38f;  // the score of a key that is not seen; below any other

// Scores are in units of log 2. COUNT: of v's elements, those that this lane sums up.
template <int COUNT>
struct Softmax {
  float max, sum, values[COUNT];

  __device__ __forceinline__ Softmax() {
    max = NOTHING, sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] = 0;
  }

  // The factor that brings sums taken against `max` to `next`; 0 where nothing was seen yet.
  static __device__ __forceinline__ float factor(float max, float next) {
    return max == NOTHING ? 0.0f : exp2f(max - next);
  }

  __device__ __forceinline__ void raise(float next) {
    next = fmaxf(max, next);
    const float f = factor(max, next);
    max = next, sum *= f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] *= f;
  }

  // One more key.
  __device__ __forceinline__ void add(float score, const float (&value)[COUNT]) {
    raise(score);
    const float p = factor(score, max);
    sum += p;
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] = fmaf(p, value[i], values[i]);
  }

  // Adds what the lane `mask` away has seen.
  __device__ __forceinline__ void merge(int mask) {
    raise(__shfl_xor_sync(0xffffffffu, max, mask));
    sum += __shfl_xor_sync(0xffffffffu, sum, mask);
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] += __shfl_xor_sync(0xffffffffu, values[i], mask);
  }
};

}  // namespace qrun
