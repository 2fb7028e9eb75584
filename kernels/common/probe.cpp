// The two walls, measured: a loop that only reads, and the arithmetic each kernel is made of.
#include "amx.h"
#include "kernels.h"
#include "vec.h"

namespace qrun::QRUN_NS {

// Reads every 64-byte line once, with the prefetch distance of the product.
void read(const void* p, size_t bytes) {
  const char* c = (const char*)p;
  i32x16 s[4] = {splat_i(0), splat_i(0), splat_i(0), splat_i(0)};
  for (size_t i = 0; i + 256 <= bytes; i += 256) QRUN_UNROLL
  for (int j = 0; j < 4; j++) {
    prefetch(c + i + j * 64 + 8192);
    s[j] = s[j] + load_i(c + i + j * 64);
  }
  volatile int sink = sum(s[0] + s[1] + s[2] + s[3]);
  (void)sink;
}

// Dots of the matrix unit, six independent ones in turn; 0 where there is no unit.
static double peak_of_unit(long rounds) {
#ifdef __AMX_BF16__
  configure_tiles();
  QRUN_TILE_ZERO(0);
  QRUN_TILE_ZERO(1);
  QRUN_TILE_ZERO(2);
  QRUN_TILE_ZERO(3);
  QRUN_TILE_ZERO(4);
  QRUN_TILE_ZERO(5);
  QRUN_TILE_ZERO(6);
  QRUN_TILE_ZERO(7);
  for (long r = 0; r < rounds; r++) {
    QRUN_TILE_DOT(0, 6, 7);
    QRUN_TILE_DOT(1, 6, 7);
    QRUN_TILE_DOT(2, 6, 7);
    QRUN_TILE_DOT(3, 6, 7);
    QRUN_TILE_DOT(4, 6, 7);
    QRUN_TILE_DOT(5, 6, 7);
  }
  QRUN_TILES_DONE();
  return 2.0 * kSums * kUnitDepth * 6 * rounds;
#else
  (void)rounds;
  return 0;
#endif
}

#ifdef QRUN_PAIR_SUMS
template <int DOTS, int PART = 0>
static inline void add_dots(i32x16& acc, i32x16 codes, const int8_t* x) {
  PairSums sum = pairs(part_of<PART>(codes), x);
  QRUN_UNROLL
  for (int i = 1; i < DOTS; i++) sum = sum + pairs(part_of<PART>(codes), x + 4 * i);
  add_pairs<PART>(acc, sum);
  if constexpr (PART + 1 < kPairParts) add_dots<DOTS, PART + 1>(acc, codes, x);
}
#endif

// kind 0: float multiply-add; 1: byte dot product; 2: dot of the matrix unit. Twelve independent
// registers hide the latency, if all loops are unrolled: one that is not keeps them in memory.
// What they begin with comes from memory: a lane vector of two or four registers alike would be
// computed once.
double peak(int kind, long rounds) {
  if (kind == 2) return peak_of_unit(rounds / 16);
#ifdef __AVX512F__
  constexpr int chains = 12;
#else
  constexpr int chains = 6;  // of two registers, or four
#endif
  static volatile int zero = 0;
  if (kind == 0) {
    f32x16 acc[chains], a = splat(1.0f + zero), b = splat(0.0f + zero);
    alignas(64) float from[16 * chains] = {};
    from[zero] = 1;
    QRUN_UNROLL
    for (int i = 0; i < chains; i++) acc[i] = load(from + 16 * i);
    for (long r = 0; r < rounds; r++) QRUN_UNROLL
    for (int i = 0; i < chains; i++) acc[i] = fma(acc[i], a, b);
    f32x16 s = splat(0);
    QRUN_UNROLL
    for (int i = 0; i < chains; i++) s = s + acc[i];
    volatile float sink = sum(s);
    (void)sink;
    return 2.0 * 16 * chains * rounds;
  }
  alignas(64) int8_t from[64] = {};
  from[zero] = 1;
  i32x16 acc[chains], codes = load_i(from);
  QRUN_UNROLL
  for (int i = 0; i < chains; i++) acc[i] = splat_i(i);
#ifdef QRUN_PAIR_SUMS
  constexpr int dots = 8;  // in 16 bits, for one step to 32, as in qmv.cpp
  rounds /= dots;
  alignas(64) int8_t x[4 * chains * dots] = {};
  x[zero] = 1;
  const i32x16 other = splat_i(zero);  // 0, but who knows: no product may leave the loop
  for (long r = 0; r < rounds; r++) {
    codes = codes + other;
    QRUN_UNROLL
    for (int i = 0; i < chains; i++) add_dots<dots>(acc[i], codes, x + 4 * dots * i);
  }
#else
  constexpr int dots = 1;
  alignas(64) int8_t x[4 * chains] = {};
  x[zero] = 1;
  for (long r = 0; r < rounds; r++) QRUN_UNROLL
  for (int i = 0; i < chains; i++) acc[i] = dot_small(acc[i], codes, x + 4 * i);
#endif
  i32x16 s = splat_i(0);
  QRUN_UNROLL
  for (int i = 0; i < chains; i++) s = s + acc[i];
  volatile int sink = sum(s);
  (void)sink;
  return 2.0 * 64 * dots * chains * rounds;
}

}  // namespace qrun::QRUN_NS
