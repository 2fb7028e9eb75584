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

  __device__ __forceinline__ float linear(float sum, int row) const {
    return sum * scale + (bias ? to_float(bias[row]) : 0.0f);
  }

  // sums of rows column*ROWS .. of w with row m of x -> y[m, column]
  __device__ __forceinline__ void write(int m, int column, float a, float b = 0) const {
    float v = linear(a, column * ROWS);
    if constexpr (ACTIVATION != NONE) {
      const float up = linear(b, column * ROWS + 1);
      if constexpr (ACTIVATION == SWIGLU)
        v = v / (1 + expf(-v)) * up;
      else  // the tanh form of GELU
        v = 0.5f * v * (1 + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v))) * up;
    }
    const long long at = static_cast<long long>(m) * columns() + column;
    if (residual) v += to_float(residual[at]);
    y[at] = from_float<T>(v);
  }
};

}  // namespace qrun
