// What follows a product before its one rounding and one write:
//   y = sum * scale + bias;  y = act(y[2i]) * y[2i+1], if there is an activation;  y = y + residual
#pragma once

#include "types.cuh"

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

  // sums of rows column*ROWS .. of w with row m of x -> y[m, column]
  __device__ __forceinline__ void write(int m, int column, float a, float b, const Behind& behind) const {
    float v = a * scale + (bias ? to_float(behind.bias[0]) : 0.0f);
    if constexpr (ACTIVATION != NONE) {
      const float up = b * scale + (bias ? to_float(behind.bias[1]) : 0.0f);
      if constexpr (ACTIVATION == SWIGLU)
        v = v / (1 + expf(-v)) * up;
      else  // the tanh form of GELU
        v = 0.5f * v * (1 + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v))) * up;
    }
    if (residual) v += to_float(behind.residual);
    y[static_cast<long long>(m) * columns() + column] = from_float<T>(v);
  }

  __device__ __forceinline__ void write(int m, int column, float a, float b = 0) const {
    write(m, column, a, b, ahead(m, column));
  }
};

}  // namespace qrun
