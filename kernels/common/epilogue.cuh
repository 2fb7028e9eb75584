// What follows a product before its one rounding and one write:
//   y = sum * scale + bias;  y = act(y[2i]) * y[2i+1], if there is an activation;  y = y + residual
#pragma once

#include "ptx.cuh"

namespace qrun {

enum Activation { NONE, SWIGLU, GEGLU };

// B: type of the bias; pointers are null where there is none.
template <typename T, typename B, int ACTIVATION>
struct Epilogue {
  static constexpr int ROWS = ACTIVATION == NONE ? 1 : 2;  // rows of w behind one column of y

  T* y;               // (M, N / ROWS)
  const B* bias;      // (N,) or null
  const T* residual;  // (M, N / ROWS) or null
  float scale;
  int n;

  // Rows of w that count as outputs.
  __device__ __forceinline__ int columns() const { return n / ROWS; }

  // What y[m, column] needs besides the sums: to be asked for ahead of them, for it comes from memory.
  struct Behind {
    B bias[ROWS];
    T residual;
  };

  __device__ __forceinline__ Behind ahead(int m, int column) const {
    Behind v;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (bias) v.bias[i] = bias[column * ROWS + i];
    if (residual) v.residual = residual[static_cast<long long>(m) * columns() + column];
    return v;
  }

  // The activation, if there is one: of a gate, times its up.
  __device__ __forceinline__ float activated(float v, float up) const {
    if constexpr (ACTIVATION == SWIGLU)
      v = v / (1 + expf(-v)) * up;
    else if constexpr (ACTIVATION == GEGLU)  // the tanh form of GELU
      v = 0.5f * v * (1 + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v))) * up;
    return v;
  }

  // sums of rows column*ROWS .. of w with row m of x -> y[m, column]
  __device__ __forceinline__ void write(int m, int column, float a, float b, const Behind& behind) const {
    const float up = b * scale + (bias ? to_float(behind.bias[ROWS - 1]) : 0.0f);
    float v = activated(a * scale + (bias ? to_float(behind.bias[0]) : 0.0f), up);
    if (residual) v += to_float(behind.residual);
    y[static_cast<long long>(m) * columns() + column] = from_float<T>(v);
  }

  __device__ __forceinline__ void write(int m, int column, float a, float b = 0) const {
    write(m, column, a, b, ahead(m, column));
  }

  // The same for tensor cores, whose lanes have two rows of w next to each other, `at` (even, one of the N) and
  // at+1, with some rows of x, counted from `first` on: two columns of y, or a gate and its up. Elements of 16 bits.
  // EVEN: N is, so that the two are one word; y and residual begin at a multiple of 4 bytes.
  template <bool EVEN>
  struct Two {
    static constexpr bool WORD = EVEN && ROWS == 1;
    const Epilogue& epilogue;
    T* y;  // the first column in row `first`
    const T* residual;
    bool both;  // are columns of y
    float bias[2];

    // What y needs besides the sums, in one register: to be asked for ahead of them.
    __device__ __forceinline__ unsigned behind(unsigned row) const {
      const T* p = residual + row * epilogue.columns();
      if (WORD) return *reinterpret_cast<const unsigned*>(p);
      return pack<T>(to_float(p[0]), both ? to_float(p[1]) : 0.0f);
    }

    __device__ __forceinline__ void write(unsigned row, float a, float b, unsigned behind, bool wanted) const {
      float v = a * epilogue.scale + bias[0], next = b * epilogue.scale + bias[1];
      if (ROWS == 2) v = epilogue.activated(v, next);
      const float2 more = residual ? unpack<T>(behind) : make_float2(0, 0);
      const unsigned result = pack<T>(v + more.x, next + more.y);
      T* to = y + row * epilogue.columns();
      if (WORD) return store_if(wanted, to, result);
      store_if(wanted, to, static_cast<unsigned short>(result));
      if (ROWS == 1) store_if(wanted && both, to + 1, static_cast<unsigned short>(result >> 16));
    }
  };

  template <bool EVEN>
  __device__ __forceinline__ Two<EVEN> two(int first, int at) const {
    const long long place = static_cast<long long>(first) * columns() + at / ROWS;
    Two<EVEN> v = {*this, y + place, residual ? residual + place : nullptr, ROWS == 1 && at + 1 < n, {}};
    if (bias)
      for (int i = 0; i < 2; i++) v.bias[i] = to_float(bias[min(at + i, n - 1)]);
    return v;
  }
};

}  // namespace qrun
