// Sums over a whole threadgroup.

#include <metal_simdgroup>
#include <metal_stdlib>
using namespace metal;

// The sum of value over all threads, in every thread. shared: SIMDGROUPS floats.
template <int SIMDGROUPS>
METAL_FUNC float threadgroup_sum(float value, threadgroup float* shared, uint simdgroup,
                                 uint lane) {
  value = simd_sum(value);
  if (SIMDGROUPS == 1) {
    return value;
  }
  if (lane == 0) {
    shared[simdgroup] = value;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // all partial sums are there
  return simd_sum(lane < SIMDGROUPS ? shared[lane] : 0.0f);
}
