// Fibers, the order in which they run, and barriers.
//
// The switch saves the callee-saved registers of the System V x86-64 ABI on the old stack and takes
// them from the new one. Forward order always resumes the lowest thread that can run, backward the
// highest, random any: a missing barrier that one order hides, another shows.
#include <stdlib.h>
#include <sys/mman.h>

#include "runtime.h"

#if !defined(__x86_64__)
#error "the emulator's fiber switch is written for x86-64"
#endif

Machine m;

extern "C" void em_switch(void** save, void* load);
asm(R"(
.text
.globl em_switch
.hidden em_switch
.type em_switch,@function
em_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size em_switch,.-em_switch
)");

u64 next_random() {  // xorshift64*
  m.random ^= m.random >> 12;
  m.random ^= m.random << 25;
  m.random ^= m.random >> 27;
  return m.random * 0x2545F4914F6CDD1Dull;
}

static void set_ready(u32 thread) { m.ready[thread / 64] |= 1ull << (thread % 64); }
static void clear_ready(u32 thread) { m.ready[thread / 64] &= ~(1ull << (thread % 64)); }

static int first_from(u32 start, u32 end) {  // lowest ready thread in [start, end)
  for (u32 t = start; t < end;) {
    u64 word = m.ready[t / 64] >> (t % 64);
    if (word) {
      u32 found = t + __builtin_ctzll(word);
      return found < end ? (int)found : -1;
    }
    t = (t / 64 + 1) * 64;
  }
  return -1;
}

static Fiber* pick() {
  int t = -1;
  if (m.order == 0) {
    t = first_from(0, m.threads);
  } else if (m.order == 1) {
    for (int w = (int)(m.threads - 1) / 64; w >= 0 && t < 0; --w)
      if (m.ready[w]) t = w * 64 + 63 - __builtin_clzll(m.ready[w]);
  } else {
    u32 start = (u32)(next_random() % m.threads);
    t = first_from(start, m.threads);
    if (t < 0) t = first_from(0, start);
  }
  return t < 0 ? nullptr : &m.fibers[t];
}

static void run_next(void** save) {  // leaves the current stack for the next fiber, or the scheduler
  Fiber* next = pick();
  ++m.stats.switches;
  if (!next) {
    em_switch(save, m.scheduler_sp);
    return;
  }
  clear_ready(next->thread);
  if (save == &next->sp) return;
  m.current = next;
  em_switch(save, next->sp);
}

void run_again() { run_next(&m.current->sp); }

void wait_here(Wait why, const Place& place) {
  Fiber* self = m.current;
  self->wait = why;
  self->place = place;
  run_next(&self->sp);
}

void wake(Fiber& f) {
  f.wait = kReady;
  set_ready(f.thread);
}

void stop_run() {
  m.stopped = true;
  void* dropped;
  em_switch(&dropped, m.scheduler_sp);
  __builtin_unreachable();
}

static void fiber_main() {
  m.entry();
  Fiber* self = m.current;
  self->wait = kDone;
  --m.live;
  run_next(&self->sp);
  __builtin_unreachable();
}

static void start_fiber(Fiber& f) {
  if (!f.stack) {
    void* p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    f.stack = (u8*)p;
  }
  // At entry of a function the stack pointer is 8 below a multiple of 16.
  void** top = (void**)(f.stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = (void*)fiber_main;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.sp = top;
}

// Call chains: the kernel's debug information, as a sorted table that the driver sets.
struct Chain {
  u32 begin, end, chain;
};
static const Chain* chains;
static u32 chain_count;

API void em_chains(const Chain* table, u32 count) {
  chains = table;
  chain_count = count;
}

static u32 chain_of(u32 pc) {  // the innermost range that holds the call: the last one that fits
  u32 found = 0;
  for (u32 i = 0; i < chain_count && chains[i].begin < pc; ++i)
    if (pc <= chains[i].end) found = chains[i].chain;
  return found;
}

bool same_place(const Place& a, const Place& b) {
  if (a.site != b.site) return false;
  return a.pc == b.pc || (!m.literal && chain_of(a.pc) == chain_of(b.pc));
}

Place make_place(const char* file, u32 line_column, const void* pc, const void* frame) {
  u32 where = image_offset(pc);
  if (m.literal) {
    const u8* stack = m.current->stack;
    for (void* const* f = (void* const*)frame;
         (u8*)f > stack && (u8*)f < stack + kStackBytes - 64; f = (void* const*)f[0])
      where = where * 0x9E3779B1u ^ image_offset(f[1]);
  }
  return {(u64)image_offset(file) << 32 | line_column, where};
}

static Finding& find_divergent(const Place& here, const Fiber* other, const Place& there, u32 detail) {
  Finding& f = find(kDivergent, nullptr, detail);
  f.site = here.site;
  f.site2 = there.site;
  f.thread2 = other ? other->thread : ~0u;
  return f;
}

void divergent(const Place& here, const Fiber* other, const Place& there, u32 detail) {
  find_divergent(here, other, there, detail);
  stop_run();
}

static bool trails_differ(u32 begin, u32 end) {  // if so, says where first
  Fiber& a = m.fibers[begin];
  for (u32 t = begin + 1; t < end; ++t) {
    Fiber& b = m.fibers[t];
    u32 most = a.passed > b.passed ? a.passed : b.passed;
    for (u32 i = 0; i < most && i < kTrail; ++i) {
      const bool has_a = i < a.passed, has_b = i < b.passed;
      if (has_a && has_b && same_place(a.trail[i], b.trail[i])) continue;
      m.current = has_a ? &a : &b;
      find_divergent(m.current->trail[i], has_a ? &b : &a,
                     has_a && has_b ? b.trail[i] : Place{}, kOtherTrail);
      return true;
    }
    if (a.passed != b.passed) {
      m.current = &b;
      find_divergent(Place{}, &a, Place{}, kOtherTrail);
      return true;
    }
  }
  return false;
}

void check_trails(u32 begin, u32 end) {
  if (trails_differ(begin, end)) stop_run();
  for (u32 t = begin; t < end; ++t) m.fibers[t].passed = 0;
}

// A barrier waits for every thread of its group; all must come to the same place.
struct Gathering {
  u32 arrived, first;
  Place place;
};
static Gathering group_barrier, simd_barriers[kMaxSimdgroups];

static bool gather(Gathering& g, u32 begin, u32 end, const Place& here, Wait why) {
  Fiber* self = m.current;  // returns true for the last one
  if (g.arrived == 0) {
    g.place = here;
    g.first = self->thread;
  } else if (!same_place(g.place, here)) {
    divergent(here, &m.fibers[g.first], g.place, kOtherPlace);
  }
  if (++g.arrived < end - begin) {
    wait_here(why, here);
    return false;
  }
  g.arrived = 0;
  for (u32 t = begin; t < end; t += kSimdWidth)
    check_trails(t, t + kSimdWidth < end ? t + kSimdWidth : end);
  for (u32 t = begin; t < end; ++t) wake(m.fibers[t]);
  return true;
}

HOOK void em_threadgroup_barrier(u32 flags, const char* file, u32 line_column) {
  const Place here = HERE;
  if (!gather(group_barrier, 0, m.threads, here, kBarrier)) return;
  ++m.stats.barriers;
  if (flags & 1) ++m.clock[kDevice];
  if (flags & 2) ++m.clock[kThreadgroup];
  run_again();
}

HOOK void em_simdgroup_barrier(u32 flags, const char* file, u32 line_column) {
  const Place here = HERE;
  u32 s = m.current->simdgroup, begin = s * kSimdWidth;
  u32 end = begin + kSimdWidth < m.threads ? begin + kSimdWidth : m.threads;
  if (!gather(simd_barriers[s], begin, end, here, kSimdBarrier)) return;
  ++m.stats.simd_barriers;
  if (flags & 1) ++m.simd_clock[kDevice][s];
  if (flags & 2) ++m.simd_clock[kThreadgroup][s];
  run_again();
}

void simd_new_threadgroup();

static void new_threadgroup(u32 linear) {
  m.group_linear = linear;
  m.group[0] = linear % m.groups[0];
  m.group[1] = linear / m.groups[0] % m.groups[1];
  m.group[2] = linear / m.groups[0] / m.groups[1];
  for (int d = 0; d < 3; ++d) {
    u32 left = m.grid[d] - m.group[d] * m.group_size[d];
    m.size[d] = left < m.group_size[d] ? left : m.group_size[d];
  }
  m.threads = m.live = m.size[0] * m.size[1] * m.size[2];
  m.simdgroups = (m.threads + kSimdWidth - 1) / kSimdWidth;
  group_barrier = {};
  for (u32 s = 0; s < kMaxSimdgroups; ++s) {
    simd_barriers[s] = {};
    m.simd_clock[0][s] = m.simd_clock[1][s] = 0;
  }
  for (u32 space = 0; space < 2; ++space) m.clock_start[space] = ++m.clock[space];
  for (u64& word : m.ready) word = 0;
  simd_new_threadgroup();
  memory_new_threadgroup();
  for (u32 t = 0; t < m.threads; ++t) {
    Fiber& f = m.fibers[t];
    f.thread = t;
    f.lane = t % kSimdWidth;
    f.simdgroup = t / kSimdWidth;
    f.position[0] = t % m.size[0];
    f.position[1] = t / m.size[0] % m.size[1];
    f.position[2] = t / m.size[0] / m.size[1];
    f.passed = 0;
    f.arrivals[0] = f.arrivals[1] = 0;
    start_fiber(f);
    wake(f);
  }
  ++m.stats.threadgroups;
  m.stats.threads += m.threads;
}

static void report_stuck() {  // nobody can run, not everybody is done: who waits, and for whom?
  Fiber *waiting = nullptr, *other = nullptr;
  for (u32 t = 0; t < m.threads && !waiting; ++t)
    if (m.fibers[t].wait != kDone) waiting = &m.fibers[t];
  for (u32 t = 0; t < m.threads && !other; ++t) {
    Fiber& f = m.fibers[t];
    if (waiting->wait != kBarrier && f.simdgroup != waiting->simdgroup) continue;
    if (f.wait != waiting->wait || !same_place(f.place, waiting->place)) other = &f;
  }
  m.current = waiting;
  const bool left = other && other->wait == kDone;
  find_divergent(waiting->place, other, other && !left ? other->place : Place{},
                 left ? kLeft : kStuck);
  m.stopped = true;
}

API int em_launch(void (*entry)(), const u64* args, const u32* grid,
                  const u32* group_size, u32 order, u64 seed, u32 seconds, u32 literal) {
  m.entry = entry;
  m.args = args;
  m.order = order;
  m.random = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
  m.stopped = false;
  m.literal = literal;
  m.stats = {};
  m.clock[0] = m.clock[1] = 1;
  u32 count = 1;
  for (int d = 0; d < 3; ++d) {
    m.grid[d] = grid[d];
    m.group_size[d] = group_size[d] < grid[d] ? group_size[d] : grid[d];
    m.groups[d] = (grid[d] + m.group_size[d] - 1) / m.group_size[d];
    count *= m.groups[d];
  }
  u32* sequence = (u32*)malloc(count * sizeof(u32));
  for (u32 i = 0; i < count; ++i) sequence[i] = order == 1 ? count - 1 - i : i;
  if (order == 2)
    for (u32 i = count - 1; i > 0; --i) {
      u32 j = (u32)(next_random() % (i + 1));
      u32 t = sequence[i];
      sequence[i] = sequence[j];
      sequence[j] = t;
    }
  watch(seconds);
  for (u32 i = 0; i < count && !m.stopped; ++i) {
    new_threadgroup(sequence[i]);
    run_next(&m.scheduler_sp);
    if (!m.stopped && m.live) report_stuck();
    for (u32 t = 0; t < m.threads && !m.stopped; t += kSimdWidth)
      m.stopped = trails_differ(t, t + kSimdWidth < m.threads ? t + kSimdWidth : m.threads);
  }
  unwatch();
  free(sequence);
  return m.stopped;
}

API const Stats* em_stats() { return &m.stats; }

HOOK u64 em_argument(u32 index) { return m.args[index]; }

HOOK u32 em_attribute(u32 what, u32 d) {  // the order is mirrored by signature.py
  const Fiber& f = *m.current;
  const u32 whole = m.group_size[0] * m.group_size[1] * m.group_size[2];
  switch (what) {
    case 0: return m.group[d] * m.group_size[d] + f.position[d];  // thread_position_in_grid
    case 1: return f.position[d];                                 // thread_position_in_threadgroup
    case 2: return m.group[d];                                    // threadgroup_position_in_grid
    case 3: return m.groups[d];                                   // threadgroups_per_grid
    case 4: return m.grid[d];                                     // threads_per_grid, grid_size
    case 5: return m.size[d];                                     // threads_per_threadgroup
    case 6: return m.group_size[d];                               // dispatch_threads_per_...
    case 7: return f.thread;                                      // thread_index_in_threadgroup
    case 8: return f.simdgroup;                                   // simdgroup_index_in_threadgroup
    case 9: return f.lane;                                        // thread_index_in_simdgroup
    case 10: return m.simdgroups;                                 // simdgroups_per_threadgroup
    case 11: return (whole + kSimdWidth - 1) / kSimdWidth;        // dispatch_simdgroups_per_...
    case 12: return kSimdWidth;                                   // threads_per_simdgroup
    case 13: return f.thread / 4;                                 // quadgroup_index_in_threadgroup
    case 14: return f.thread % 4;                                 // thread_index_in_quadgroup
    case 15: return (m.threads + 3) / 4;                          // quadgroups_per_threadgroup
    case 16: return (whole + 3) / 4;                              // dispatch_quadgroups_per_...
    default: return 0;                                            // grid_origin
  }
}
