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

// Launches name these, the fields of `Behind` and the keys of `ACTIVATIONS` in capitals.
enum { NONE, SWIGLU, GEGLU };                // activations
enum { SCALE = 1, BIAS = 2, RESIDUAL = 4 };  // terms: bits of HAS

// Does it make one value of two?
constexpr bool pairs(int activation) { return activation == SWIGLU || activation == GEGLU; }

// x * sigmoid(z). The bound keeps exp finite, which fast math counts on; past it all is 0 anyway.
METAL_FUNC float times_sigmoid(float x, float z) { return x / (1 + exp(min(-z, 80.0f))); }

METAL_FUNC float silu(float x) { return times_sigmoid(x, x); }

// GELU in its tanh form: (1 + tanh(z)) / 2 is sigmoid(2z), which keeps its digits where tanh is -1.
METAL_FUNC float gelu(float x) {
  return times_sigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x));
}

// y: the sums of columns col and col + 1, scale and bias applied. One that pairs returns its one
// value as .x; another one is applied to both, each by itself.
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

// B: element type of the bias. HAS: the terms there are; the members of others are never read.
template <typename T, typename B, int ACTIVATION, int HAS>
struct Epilogue {
  static constant constexpr const bool PAIRED = pairs(ACTIVATION);

  device T* out;  // (M, N), or (M, N / 2) when paired
  int N;          // columns of the sum
  // Terms, set by name.
  float scale;
  const device B* bias;      // (N)
  const device T* residual;  // as out

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

  // What comes before the activation, and the activation. both: column col + 1 exists.
  METAL_FUNC float2 finish(float2 y, int col, bool both) const thread {
    if (HAS & SCALE) {
      y *= scale;
    }
    if (HAS & BIAS) {
      y.x += float(bias[col]);
      if (both) {
        y.y += float(bias[col + 1]);
      }
    }
    return activate<ACTIVATION>(y);
  }
  // What comes behind the activation, and the one rounding. second: of the pair, if not paired.
  METAL_FUNC void write(float y, int row, int col, int second) const thread {
    const size_t at = PAIRED ? size_t(row) * (N / 2) + col / 2 : size_t(row) * N + col + second;
    if (HAS & RESIDUAL) {
      y += float(residual[at]);
    }
    out[at] = T(y);
  }
};
