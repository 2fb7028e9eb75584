// Where the lanes of a simdgroup (or of a quad) exchange values.
//
// Every lane puts up to three words into its slot and waits; the last to arrive computes the result
// of each lane and wakes the others. Two sets of slots take turns: a lane that is quick enough to
// enter the next exchange cannot overwrite what a slow one has still to read.
#include "runtime.h"

struct Meeting {
  u32 arrived, first, what;
  Place place;
  u64 in[2][kSimdWidth][3];
  u64 out[2][kSimdWidth][2];
};

static Meeting simds[kMaxSimdgroups], quads[kMaxThreads / 4];

void simd_new_threadgroup() {
  for (Meeting& x : simds) x.arrived = 0;
  for (Meeting& x : quads) x.arrived = 0;
}

template <typename F>
static u64* meet(Wait why, u32 what, const Place& here, u64 a, u64 b, u64 c, F compute) {
  Fiber* self = m.current;
  const bool quad = why == kQuad;
  const u32 width = quad ? 4 : kSimdWidth;
  const u32 begin = self->thread / width * width;
  const u32 lanes = begin + width < m.threads ? width : m.threads - begin;
  Meeting& x = quad ? quads[self->thread / 4] : simds[self->simdgroup];
  if (x.arrived == 0) {
    x.first = self->thread;
    x.what = what;
    x.place = here;
  } else if (x.what != what || !same_place(x.place, here)) {
    divergent(here, &m.fibers[x.first], x.place, kOtherPlace);
  }
  const u32 lane = self->thread - begin;
  const u32 set = self->arrivals[quad]++ & 1;
  x.in[set][lane][0] = a;
  x.in[set][lane][1] = b;
  x.in[set][lane][2] = c;
  if (++x.arrived < lanes) {
    wait_here(why, here);
  } else {
    x.arrived = 0;
    if (!quad) check_trails(begin, begin + lanes);
    ++m.stats.exchanges;
    compute(x.in[set], x.out[set], lanes);
    for (u32 t = begin; t < begin + lanes; ++t) wake(m.fibers[t]);
    run_again();
  }
  return x.out[set][lane];
}

// Shuffles: b is the lane to read from.
HOOK u64 em_shuffle(u32 quad, u64 value, u32 from, const char* file, u32 line_column) {
  const void* pc = CALLER;
  return *meet(quad ? kQuad : kSimd, 1, HERE, value, from, 0,
               [=](u64(*in)[3], u64(*out)[2], u32 lanes) {
                 for (u32 i = 0; i < lanes; ++i) {
                   u64 source = in[i][1];
                   if (source < lanes) {
                     out[i][0] = in[source][0];
                   } else {
                     out[i][0] = ~0ull;
                     find(kInactiveLane, pc, (u32)source);
                   }
                 }
               });
}

HOOK u64 em_ballot(u32 quad, u32 yes, const char* file, u32 line_column) {
  return *meet(quad ? kQuad : kSimd, 2, HERE, yes, 0, 0,
               [](u64(*in)[3], u64(*out)[2], u32 lanes) {
                 u64 mask = 0;
                 for (u32 i = 0; i < lanes; ++i) mask |= (u64)(in[i][0] & 1) << i;
                 for (u32 i = 0; i < lanes; ++i) out[i][0] = mask;
               });
}

enum Op : u32 { kSum, kProduct, kMin, kMax, kAnd, kOr, kXor };  // mirrored by metal_simdgroup

template <typename T>
static T apply(u32 op, T a, T b) {
  switch (op) {
    case kSum: return a + b;
    case kProduct: return a * b;
    case kMin: return b < a ? b : a;
    case kMax: return a < b ? b : a;
    default: break;
  }
  if constexpr (T(0.5) == T(0)) {
    switch (op) {
      case kAnd: return a & b;
      case kOr: return a | b;
      default: return a ^ b;
    }
  }
  return a;
}

template <typename T, typename Bits>
static T reduce(u32 quad, T value, u32 op, u32 prefix, const Place& here) {
  u64 word = __builtin_bit_cast(Bits, value);
  u64* result = meet(
      quad ? kQuad : kSimd, 16 + op * 4 + prefix, here, word, 0, 0,
      [=](u64(*in)[3], u64(*out)[2], u32 lanes) {
        T v[kSimdWidth];
        for (u32 i = 0; i < lanes; ++i) v[i] = __builtin_bit_cast(T, (Bits)in[i][0]);
        if (prefix) {  // 1 inclusive, 2 exclusive
          T running = op == kProduct ? T(1) : T(0);
          for (u32 i = 0; i < lanes; ++i) {
            T next = apply(op, running, v[i]);
            out[i][0] = __builtin_bit_cast(Bits, prefix == 1 ? next : running);
            running = next;
          }
          return;
        }
        for (u32 n = lanes; n > 1;) {  // halves onto each other, as a butterfly would add
          u32 half = (n + 1) / 2;
          for (u32 i = 0; i + half < n; ++i) v[i] = apply(op, v[i], v[i + half]);
          n = half;
        }
        for (u32 i = 0; i < lanes; ++i) out[i][0] = __builtin_bit_cast(Bits, v[0]);
      });
  return __builtin_bit_cast(T, (Bits)*result);
}

HOOK float em_reduce_float(u32 quad, float x, u32 op, u32 prefix, const char* file, u32 line_column) {
  return reduce<float, u32>(quad, x, op, prefix, HERE);
}
HOOK int64_t em_reduce_long(u32 quad, int64_t x, u32 op, u32 prefix, const char* file, u32 line_column) {
  return reduce<int64_t, u64>(quad, x, op, prefix, HERE);
}
HOOK u64 em_reduce_ulong(u32 quad, u64 x, u32 op, u32 prefix, const char* file, u32 line_column) {
  return reduce<u64, u64>(quad, x, op, prefix, HERE);
}

// D = A B + C for 8x8 fragments. Lane l holds two neighbours of a row:
//   q = l / 4;  row = (q & 4) + (l / 2) % 4;  column = (q & 2) * 2 + (l % 2) * 2
static void place(u32 lane, u32& row, u32& column) {
  u32 q = lane / 4;
  row = (q & 4) + (lane / 2) % 4;
  column = (q & 2) * 2 + (lane % 2) * 2;
}

struct Pair {
  float x, y;
};

HOOK u64 em_multiply(u64 a, u64 b, u64 c, const char* file, u32 line_column) {
  const Place here = HERE;
  return *meet(kSimd, 3, here, a, b, c, [=](u64(*in)[3], u64(*out)[2], u32 lanes) {
    if (lanes < kSimdWidth) divergent(here, nullptr, Place{}, kPartial);
    float A[8][8], B[8][8], C[8][8];
    for (u32 l = 0; l < kSimdWidth; ++l) {
      u32 r, k;
      place(l, r, k);
      Pair pa = __builtin_bit_cast(Pair, in[l][0]), pb = __builtin_bit_cast(Pair, in[l][1]);
      Pair pc = __builtin_bit_cast(Pair, in[l][2]);
      A[r][k] = pa.x, A[r][k + 1] = pa.y;
      B[r][k] = pb.x, B[r][k + 1] = pb.y;
      C[r][k] = pc.x, C[r][k + 1] = pc.y;
    }
    for (u32 i = 0; i < 8; ++i)
      for (u32 k = 0; k < 8; ++k)
        for (u32 j = 0; j < 8; ++j) C[i][j] += A[i][k] * B[k][j];
    for (u32 l = 0; l < kSimdWidth; ++l) {
      u32 r, k;
      place(l, r, k);
      out[l][0] = __builtin_bit_cast(u64, (Pair{C[r][k], C[r][k + 1]}));
    }
    ++m.stats.multiplies;
  });
}

// Loads and stores of fragments need no exchange: each lane moves its own two elements. They are
// collectives all the same, so each lane keeps a trail of them, compared at the next meeting.
HOOK void em_pass(u32 what, const char* file, u32 line_column) {
  Fiber* self = m.current;
  if (self->passed < kTrail) self->trail[self->passed] = HERE;
  ++self->passed;
  if (self->lane == 0) ++(what == 0 ? m.stats.fragment_loads : m.stats.fragment_stores);
}
