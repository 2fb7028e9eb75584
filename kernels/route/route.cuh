// route: a warp finds the experts of one token; then all pairs of a token and an expert are put in the order
// of experts. One block, for the few tokens of a decode step.
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"

namespace qrun {

// logits (M, E); expert, row (R = M * TOP,); place, share (M, TOP). M warps; R int of shared memory.
// EACH: experts a lane looks at. renormalize: shares of the chosen, not of all.
template <int TOP, int EACH, typename T>
__device__ __forceinline__ void route(const T* logits, int* expert, int* row, int* place, float* share,
                                      int tokens, int experts, bool renormalize) {
  start_next_kernel();
  wait_for_previous_kernel();
  int* chosen = reinterpret_cast<int*>(shared_memory());  // (M, TOP)
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32;
  const float lowest = __int_as_float(0xff800000), highest = __int_as_float(0x7f800000);
  float value[EACH], rank[EACH];  // a NaN ranks as the largest; what has been chosen, as nothing
  bool open[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int e = i * 32 + lane;
    open[i] = e < experts;
    value[i] = open[i] ? to_float(logits[static_cast<long long>(token) * experts + e]) : lowest;
    rank[i] = isnan(value[i]) ? highest : value[i];
  }
  float top = 0, total = 0, found[TOP];  // the largest value; the sum of exp(value - top) over all
#pragma unroll
  for (int j = 0; j < TOP; j++) {
    float best = lowest, mine = lowest;
    int at = 1 << 30;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (open[i] && (at == 1 << 30 || rank[i] > best)) best = rank[i], mine = value[i], at = i * 32 + lane;
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, bit);
      const float its = __shfl_xor_sync(0xffffffffu, mine, bit);
      const int where = __shfl_xor_sync(0xffffffffu, at, bit);
      const bool better = at == 1 << 30 || (where != 1 << 30 && (other > best || (other == best && where < at)));
      if (better) best = other, mine = its, at = where;
    }
    found[j] = mine;
    if (lane == 0) chosen[token * TOP + j] = at;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == at) open[i] = false;
    if (j == 0) top = mine;
  }
  if (!renormalize) {
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane < experts) total += expf(value[i] - top);
    total = warp_sum(total);
  } else {
#pragma unroll
    for (int j = 0; j < TOP; j++) total += expf(found[j] - top);
  }
#pragma unroll
  for (int j = 0; j < TOP; j++)
    if (lane == j) share[token * TOP + j] = expf(found[j] - top) / total;
  __syncthreads();
  for (int r = threadIdx.x; r < tokens * TOP; r += blockDim.x) {
    const int e = chosen[r];
    int before = 0;
    for (int i = 0; i < tokens * TOP; i++) before += chosen[i] < e || (chosen[i] == e && i < r);
    expert[before] = e, row[before] = r / TOP, place[r] = before;
  }
}

}  // namespace qrun
