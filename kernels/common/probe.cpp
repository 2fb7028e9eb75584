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

// kind 0: float multiply-add; 1: byte dot product; 2: dot of the matrix unit. Twelve independent
// chains hide the latency, if all loops are unrolled: one that is not keeps them in memory.
double peak(int kind, long rounds) {
  if (kind == 2) return peak_of_unit(rounds / 16);
  constexpr int chains = 12;
  static volatile int zero = 0;
  if (kind == 0) {
    f32x16 acc[chains], a = splat(1.0f + zero), b = splat(0.0f + zero);
    QRUN_UNROLL
    for (int i = 0; i < chains; i++) acc[i] = splat((float)i);
    for (long r = 0; r < rounds; r++) QRUN_UNROLL
    for (int i = 0; i < chains; i++) acc[i] = fma(acc[i], a, b);
    f32x16 s = splat(0);
    QRUN_UNROLL
    for (int i = 0; i < chains; i++) s = s + acc[i];
    volatile float sink = sum(s);
    (void)sink;
    return 2.0 * 16 * chains * rounds;
  }
  i32x16 acc[chains], codes = splat_i(zero + 0x01020304);
  alignas(64) int8_t x[4 * chains] = {};
  x[zero] = 1;
  QRUN_UNROLL
  for (int i = 0; i < chains; i++) acc[i] = splat_i(i);
  for (long r = 0; r < rounds; r++) QRUN_UNROLL
  for (int i = 0; i < chains; i++) acc[i] = dot_small(acc[i], codes, x + 4 * i);
  i32x16 s = splat_i(0);
  QRUN_UNROLL
  for (int i = 0; i < chains; i++) s = s + acc[i];
  volatile int sink = sum(s);
  (void)sink;
  return 2.0 * 64 * chains * rounds;
}

}  // namespace qrun::QRUN_NS
