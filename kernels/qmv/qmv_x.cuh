// The first thing that a block of qmv.cuh does: x comes into shared memory, normed, rounded to T, as operand b,
// and the sums of its groups beside it. The k of one word of w, 8 elements of a row of x, are a unit: one load
// of 16 bytes by one lane, up to eight of which are under way at once. Teams share the units of a warp's takes.
#pragma once

#include "../common/ptx.cuh"
#include "../common/reduce.cuh"
#include "../common/subnormal.cuh"

namespace qrun {

// Q: Qmv of one tile. A warp waits for no other, but with several teams at the end, and in fp16 for the squares.
template <typename Q, typename T, int M, int TAKE, int WARPS, int ROUNDS, int TEAMS>
struct QmvX {
  static constexpr int EACH = 4 * Q::WORDS * TAKE;                        // units of a take and row
  static constexpr int UNITS = (EACH * M + 31) / 32;                      // of a take, a lane's
  static constexpr int ALL = ROUNDS * UNITS, SHARE = (ALL + TEAMS - 1) / TEAMS;
  static constexpr int MOST = TAKE < 4 ? 8 : 4;                           // four steps of w leave few registers
  static constexpr int BATCH = SHARE < MOST ? SHARE : MOST;               // loads under way

  struct Unit {
    int take, step, j, t, m;  // its place: word j of lane t
    int at;                   // its first k
    bool valid;
  };

  const Q& q;
  const int lane = threadIdx.x % 32;
  float square = 0;  // a lane's, of one row
  uint4 raw[BATCH];

  // The f-th of this team. Written so that the take is known while compiling where teams split each of them.
  __device__ __forceinline__ Unit unit(int f) const {
    constexpr int PART = UNITS % TEAMS == 0 ? UNITS / TEAMS : 1;
    const int u = f * TEAMS + Q::team(), round = UNITS % TEAMS == 0 ? f / PART : u / UNITS;
    const int i = (u - round * UNITS) * 32 + lane;
    Unit v = {round * WARPS + Q::warp(), i / (4 * Q::WORDS) % TAKE, i / 4 % Q::WORDS, i % 4, i / EACH,
              0, i < EACH * M && u < ALL};
    v.at = (Q::first_take() + v.take) * Q::SPAN + v.step * Q::STEP + v.t * 32 + v.j * 8;
    return v;
  }

  __device__ __forceinline__ uint4* place(const Unit& v) const {
    return q.shared_x + v.take * Q::SLICE + ((v.step * Q::WORDS + v.j) * M + v.m) * 4 + v.t;
  }

  __device__ __forceinline__ float* squares(int m) const {
    return q.shared_squares + m * (WARPS * TEAMS) + threadIdx.x / 32;
  }

  __device__ __forceinline__ void fetch(int first) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const Unit v = unit(first + b);
      const T* from = q.x + q.x_row(v.m) * q.k + v.at;
      raw[b] = v.valid && v.at < q.k ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void add_squares(const Unit& v, const float (&e)[8]) {
    constexpr int LANES = EACH < 32 ? EACH : 32;  // neighbours with units of one row
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += e[i] * e[i];
    if (M == 1) {
      square += sum;
      return;
    }
    sum = warp_sum<LANES>(sum);
    if (v.valid && lane % LANES == 0) *squares(v.m) += sum;
  }

  __device__ __forceinline__ void leave_square() {
    if (M > 1) return;
    square = warp_sum(square);
    if (lane == 0) *squares(0) = square;
  }

  // Over the lanes whose units are of one group.
  __device__ __forceinline__ static float group_sum(float sum) {
#pragma unroll
    for (int bit = 4; bit < 4 * Q::WORDS; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
#pragma unroll
    for (int bit = 1; bit < 4 / Q::PARTS; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    return sum;
  }

  // weight: of the norm, (K,), or null.
  template <typename G>
  __device__ __forceinline__ void prepare(const G* weight, float eps) {
    // The norm's weights come first, each to where its x goes.
    constexpr bool EARLY = sizeof(G) == 2;
    if (weight && EARLY) {
#pragma unroll 1
      for (int first = 0; first < SHARE; first += BATCH)
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const Unit v = unit(first + b);
          if (v.valid) copy_async(place(v), weight + min(v.at, q.k - 8), true);
        }
      copy_async_commit();
    }
    if (!q.expert) wait_for_previous_kernel();
    if (weight && M > 1) {
      for (int m = lane; m < M; m += 32) *squares(m) = 0;
      __syncwarp();
    }
    if (weight && !Q::BEHIND) {
#pragma unroll 1
      for (int first = 0; first < SHARE; first += BATCH) {
        fetch(first);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          float e[8];
          load(e, reinterpret_cast<const T*>(&raw[b]));
          add_squares(unit(first + b), e);
        }
      }
      leave_square();
      __syncthreads();
    }
    if (weight && EARLY) copy_async_wait<0>();
#pragma unroll 1
    for (int first = 0; first < SHARE; first += BATCH) {
      if (SHARE > BATCH || !weight || Q::BEHIND) fetch(first);
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const Unit v = unit(first + b);
        float e[8];
        load(e, reinterpret_cast<const T*>(&raw[b]));
        if (weight && Q::BEHIND) add_squares(v, e);
        if (weight && v.valid) {
          const float r = Q::BEHIND ? 1.0f : q.norm_factor(v.m, eps);
          float g[8];
          load(g, EARLY ? reinterpret_cast<const G*>(place(v)) : weight + min(v.at, q.k - 8));
#pragma unroll
          for (int i = 0; i < 8; i++) e[i] = v.at < q.k ? to_float(from_float<T>(e[i] * r * g[i])) : 0.0f;
        }
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += e[i], e[i] *= Subnormal<T>::X;
        if (!Q::DEQUANTIZED) sum = group_sum(sum);
        if (!v.valid) continue;
        *place(v) =
            make_uint4(pack<T>(e[0], e[4]), pack<T>(e[2], e[6]), pack<T>(e[1], e[5]), pack<T>(e[3], e[7]));
        if (!Q::DEQUANTIZED && v.j == 0 && v.t % (4 / Q::PARTS) == 0)
          *q.group_sum(v.take, v.step, v.t * Q::PARTS / 4, v.m) = sum * (1 / Subnormal<T>::UNDO);
      }
    }
    if (weight && Q::BEHIND) leave_square();
    if (TEAMS > 1) __syncthreads();
    else __syncwarp();  // a warp multiplies by nothing but its own x, and by zeros
  }
};

}  // namespace qrun
