// What happens to a sum between the accumulators and its one write:
//
//   y = activation(sum * scale + bias) + residual, rounded once to T
//
// An epilogue sees pairs: the results of one row at columns col and col + 1, col even, which is
// what a lane of a fragment holds and what two neighbouring rows of w give a matrix-vector
// product. Gate and up are interleaved in w, so a pair is a gate with its up.
//
// To add an activation: see kernels/README.md.

#include "memory.metal"

enum { NONE = 0, SWIGLU = 1, GEGLU = 2 };

// Does it make one value of two?
constexpr bool pairs(int activation) { return activation == SWIGLU || activation == GEGLU; }

// The bound keeps exp finite, which fast math counts on; past it the result is 0 anyway.
METAL_FUNC float silu(float x) { return x / (1 + exp(min(-x, 80.0f))); }

// GELU in its tanh form. tanh saturates long before exp(2z) overflows; the bound keeps it finite.
METAL_FUNC float gelu(float x) {
  const float z = clamp(0.7978845608f * (x + 0.044715f * x * x * x), -20.0f, 20.0f);
  const float e = exp(2 * z);
  return 0.5f * x * (1 + (e - 1) / (e + 1));
}

template <int ACTIVATION>
METAL_FUNC float2 activate(float2 y) {
  if (ACTIVATION == SWIGLU) {
    return float2(silu(y.x) * y.y, 0);
  }
  if (ACTIVATION == GEGLU) {
    return float2(gelu(y.x) * y.y, 0);
  }
  return y;
}

// B: element type of the bias. Pointers that a flag rules out are never read.
template <typename T, typename B, int ACTIVATION, bool BIAS, bool RESIDUAL>
struct Epilogue {
  static constant constexpr const bool PAIRED = pairs(ACTIVATION);

  device T* out;             // (M, N), or (M, N / 2) when paired
  const device B* bias;      // (N)
  const device T* residual;  // as out
  float scale;
  int N;  // columns of the sum

  // Both results lie inside.
  METAL_FUNC void store(float2 y, int row, int col) const thread {
    y = finish(y, col, true);
    write(y.x, row, col, 0);
    if (!PAIRED) {
      write(y.y, row, col, 1);
    }
  }
  // Writes what lies inside: row < M, column < N.
  METAL_FUNC void store_inside(float2 y, int row, int col, int M) const thread {
    if (row < M && col < N) {
      const bool both = col + 1 < N;
      y = finish(y, col, both);
      write(y.x, row, col, 0);
      if (!PAIRED && both) {
        write(y.y, row, col, 1);
      }
    }
  }

  METAL_FUNC float2 finish(float2 y, int col, bool both) const thread {
    y *= scale;
    if (BIAS) {
      y.x += float(bias[col]);
      if (both) {
        y.y += float(bias[col + 1]);
      }
    }
    return activate<ACTIVATION>(y);
  }
  METAL_FUNC void write(float y, int row, int col, int second) const thread {
    const size_t at = PAIRED ? size_t(row) * (N / 2) + col / 2 : size_t(row) * N + col + second;
    out[at] = T(RESIDUAL ? y + float(residual[at]) : y);
  }
};
