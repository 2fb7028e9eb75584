// The matrix unit of x86: eight tiles of 16 rows of 64 bytes. A dot instruction multiplies
// (16, 64) bytes by (64/4, 16 lanes, 4) bytes and adds to (16, 16) 32-bit numbers in 16 cycles.
// Tile numbers are part of the instruction, hence macros.
#pragma once

#ifdef __AMX_INT8__

#include "types.h"

// The "memory" clobbers keep ordinary loads and stores on their side of the tile instructions.
#define QRUN_TILE_LOAD(t, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((size_t)(stride)) : "memory")
#define QRUN_TILE_STORE(t, p, stride) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((size_t)(stride)) : "memory")
#define QRUN_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
// kind: bsud, signed x times unsigned w; bssd, both signed
#define QRUN_TILE_DOT(kind, c, x, w) \
  __asm__ volatile("tdp" #kind " %%tmm" #w ", %%tmm" #x ", %%tmm" #c ::)
#define QRUN_TILES_DONE() __asm__ volatile("tilerelease" ::)

namespace qrun::QRUN_NS {

// The first `sums` tiles hold 32-bit sums, the others operands: x up to tile 6, and w (tile 7).
static inline void configure_tiles(int sums, int chunk) {
  alignas(64) struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } c = {};
  c.palette = 1;
  for (int t = 0; t < 8; t++) {
    c.rows[t] = t == 7 ? chunk / 4 : 16;
    c.bytes[t] = t < sums || t == 7 ? 64 : chunk;
  }
  __asm__ volatile("ldtilecfg %0" ::"m"(c) : "memory");
}

}  // namespace qrun::QRUN_NS

#endif
