// What the MLX side of the extension and the instruction-set side say to each other.
//
// Kernels are compiled once per instruction set (see CMakeLists.txt), each time in a namespace of
// its own (QRUN_NS). They see plain pointers and the structs below, no MLX and no std: an inline
// function of a std header, compiled with AVX-512 flags, could be the copy that the linker keeps.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace qrun {

enum class Type : int { f32, f16, bf16 };

static inline size_t size_of(Type t) { return t == Type::f32 ? 4 : 2; }

enum class Activation : int { none, swiglu, geglu };

constexpr int kLanes = 16;     // rows of w in a block: one dword lane each
constexpr int kChunk = 32;     // successive k of a step of the vector kernels
constexpr int kSegment = 512;  // k whose groups share one float32 sum before it joins the row's
constexpr int kMaxDigits = 3;
constexpr int kFloats = 4;  // in place of a count of digits: x itself, a float32 of four bytes

// w in stream order; the drawing is in kernels/qmv/README.md.
struct Matrix {
  const uint8_t* data;  // (ceil(n/16), k/group) groups of 16 rows, each codes, scales, biases
  int n, k;
  int bits;  // stored width, 4 or 8
  int group;
  Type scales;
  bool fp4;          // codes are e2m1 numbers: looked up as 12 + 2*value, an integer in 0..24
  bool fp8 = false;  // codes are e4m3 numbers: multiplied as floats (qmv/fp8.cpp)

  size_t codes_bytes() const { return (size_t)kLanes * group * bits / 8; }
  size_t group_bytes() const { return codes_bytes() + 2 * kLanes * size_of(scales); }
  size_t block_bytes() const { return group_bytes() * (k / group); }
  int blocks() const { return (n + kLanes - 1) / kLanes; }
};

// x as fixed point numbers, each written with `count` signed base-256 digits:
//   x[m, k] = scale[m, g] * (digit0 * 256^(count-1) + ... + digit_last)
// Rows come in tiles; the last one may be smaller. digits: (tiles, k/chunk, rows, count, chunk).
// meta: (tiles, k/group, 2, rows): the scale, then the sum of the group's x. Both are exactly what
// the product needs, in the order in which it needs them.
struct Digits {
  int8_t* digits;
  float* meta;
  int m, k, group;
  int count;      // 1, 2 or 3, or kFloats
  int tile;       // rows of a full tile
  int chunk;      // successive k whose digits lie together
  bool exact;     // a single term holds all of x (bfloat16): w must not be rounded for it
  bool few;       // digits for product_few: twice as many k together
  bool even_odd;  // 4-bit codes: eight k lie in the order 0 2 4 6 1 3 5 7 (unit: 0 4 1 5 2 6 3 7)

  int tiles() const { return (m + tile - 1) / tile; }
  int bytes() const;  // of one digit
  size_t rows() const { return (size_t)tiles() * tile; }
  size_t digits_bytes() const { return rows() * count * k * bytes(); }
  size_t meta_floats() const { return rows() * 2 * (k / group); }
};

// Heights for which kernels exist, 16 on a matrix unit and for panels; spare rows are zero.
constexpr int kUnitRows = 16;
// On the unit the digits are bfloat16 terms of x (qmm/terms.cpp): (tiles, k/32, count, 16, 32), and
// of meta's pairs the first number is the row's own scale, the same in every group. For panels they
// are x itself, (tiles, k, 16) float32, and there is no meta.
inline int Digits::bytes() const { return tile == kUnitRows && count != kFloats ? 2 : 1; }
static inline int tile_height(int r) {
  return r <= 2 ? r : r <= 4 ? 4 : r <= 6 ? 6 : r <= 8 ? 8 : kUnitRows;
}

static inline int rows_in_tile(const Digits& d, int t) {
  const int left = d.m - t * d.tile;
  return d.tile == kUnitRows ? kUnitRows : tile_height(left < d.tile ? left : d.tile);
}
static inline int8_t* tile_digits(const Digits& d, int t) {
  return d.digits + (size_t)t * d.tile * d.count * d.k * d.bytes();
}
static inline float* tile_meta(const Digits& d, int t) {
  return d.meta + (size_t)t * d.tile * 2 * (d.k / d.group);
}

struct Prologue {
  const void* x;  // (m, k); with `from`, row r of m is x's row from[r]
  Type type;
  const void* norm;  // (k,), or null
  Type norm_type;
  float eps;
  const int* from;  // (m,), or null
};

struct Epilogue {
  void* y;  // (m, n), or (m, n/2) after a gated activation
  Type type;
  float scale;
  const void* bias;  // (n,), or null
  Type bias_type;
  const void* residual;  // like y, or null
  Type residual_type;
  Activation activation;
};

// y[r] = residual[r] + sum over j of share[r, j] * x[place[r, j]]
struct Combine {
  const void* x;     // (any, n)
  const int* place;  // (rows, top)
  const float* share;
  const void* residual;  // (rows, n)
  void* y;
  int n, top;
  Type type;
};

// y = x @ w.T * scale + bias + residual, w not quantized
struct Gemm {
  const void* x;         // (m, k)
  const void* w;         // (n, k)
  const void* bias;      // (n,), or null
  const void* residual;  // (m, n), or null
  void* y;               // (m, n)
  int m, n, k;
  float scale;
  Type type, w_type, bias_type;
};

struct RmsNorm {
  const void* x;         // (rows, d)
  const void* weight;    // (d,)
  const void* residual;  // (rows, d) to be added, or null
  void* y;
  int d;
  float eps;
  bool centered;  // the norm of x - mean(x): a layer norm
  Type type, weight_type;
};

struct Rope {
  const void* qkv;     // (B, L, (H + 2*Hkv) * D)
  void* q;             // (B, H, L, D)
  void* k_cache;       // (B, Hkv, C, D)
  void* v_cache;       // (B, Hkv, C, D)
  const float* table;  // (C, R/2, 2): cos, sin
  const void* q_norm;  // (D,), or null
  const void* k_norm;
  int batch, length, heads, kv_heads, head_dim, rotated, capacity, offset;
  float eps;
  Type type, cache_type, norm_type;
};

struct Sdpa {
  const void* q;        // (B, H, L, D)
  const void* k_cache;  // (B, Hkv, C, D)
  const void* v_cache;  // (B, Hkv, C, D)
  void* y;              // (B, L, H*D)
  int batch, length, heads, kv_heads, head_dim, capacity, offset, window;
  float scale, softcap;
  Type type, cache_type;
  // Decode splits the keys: chunk c of `chunk` keys leaves its running maximum, sum and weighted
  // values here, (B*Hkv, row tiles, chunks, tile, 16 + D padded to 16), and sdpa_merge puts them
  // together.
  float* partial;
  int tile, chunk, chunks;
  // A prompt has many tiles: the keys as sdpa.cpp wants them, (B*Hkv, turned_keys/16, D, 16).
  float* turned;
  int turned_keys;
};

struct Kernels {
  const char* name;
  int max_tile[kMaxDigits + 1];  // rows of x a register grid holds, by digits

  void (*prepare)(const Prologue&, const Digits&, int tile0, int tile1);
  void (*product)(const Matrix&, const Digits&, const Epilogue&, int block0, int block1, int tile0,
                  int tile1);
  // The same by float multiply-adds: tiles of 16 rows of x, which are floats.
  void (*product_panels)(const Matrix&, const Digits&, const Epilogue&, int block0, int block1,
                         int tile0, int tile1);
  int panels_from;  // rows of x that they pay for
  bool fast_dots;   // bytes have a dot product of their own
  // The same on a matrix unit (AMX), or null: tiles of 16 rows of x.
  void (*product_tiled)(const Matrix&, const Digits&, const Epilogue&, int block0, int block1,
                        int tile0, int tile1);
  // `product` for three to eight rows on a matrix unit, or null: the same bits.
  void (*product_few)(const Matrix&, const Digits&, const Epilogue&, int block0, int block1,
                      int tile0, int tile1);
  void (*combine)(const Combine&, int row0, int row1);
  void (*gemm)(const Gemm&, int n0, int n1);
  void (*rms_norm)(const RmsNorm&, int row0, int row1);
  void (*rope)(const Rope&, int item0, int item1);  // items: (B, L)
  void (*sdpa_turn)(const Sdpa&, int item0, int item1);
  void (*sdpa)(const Sdpa&, int item0, int item1);
  void (*sdpa_merge)(const Sdpa&, int item0, int item1);
  void (*embedding)(const Matrix&, const void* ids, bool wide_ids, void* y, Type type, float scale,
                    int row0, int row1);
  void (*swiglu)(const void* gate_up, void* y, Type type, size_t i0, size_t i1);
  void (*softcap)(const void* x, void* y, Type type, float limit, size_t i0, size_t i1);
  uint32_t (*argmax)(const void* x, Type type, int n);
  void (*read)(const void* p, size_t bytes);
  double (*peak)(int kind, long rounds);  // operations done in `rounds` rounds
};

const Kernels& kernels();          // the best set of this machine, or QRUN_ISA's
void force_isa(const char* name);  // for tests; throws when unknown or unsupported

}  // namespace qrun
