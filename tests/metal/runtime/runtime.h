// The emulator's runtime: what the parts share.
//
// One Metal thread is one fiber. One threadgroup runs at a time. A fiber runs until it waits (a
// barrier, an exchange in its simdgroup) or ends; then the scheduler picks the next one that can
// run. Nothing here assumes that the lanes of a simdgroup go in step.
//
// The runtime is linked into the shared object of every compiled kernel, so its state belongs to
// that kernel alone. Plain C++ without its library.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef uintptr_t uptr;

constexpr u32 kSimdWidth = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxSimdgroups = kMaxThreads / kSimdWidth;
constexpr u32 kStackBytes = 128 << 10;
constexpr u32 kMaxBuffers = 96;
constexpr u32 kMaxFindings = 64;
constexpr u32 kMaxThreadgroupBytes = 32 << 10;

enum Space : u32 { kDevice = 0, kThreadgroup = 1 };  // the two memories that have races

enum Kind : u32 {  // what is wrong; the order is mirrored by report.py
  kRace,
  kUninitialised,
  kOutOfBounds,
  kMisaligned,
  kReadOnly,
  kDivergent,
  kThreadgroupSize,
  kWild,
  kDivideByZero,
  kInactiveLane,
  kArrayIndex,
  kEndless,
};

struct Finding {
  u32 kind;
  u32 count;      // how often this finding came up again
  u64 pc, pc2;    // offsets in the image; pc2 is the other side, 0 when unknown
  u64 site, site2;      // of collectives, see Place
  int64_t offset; // bytes from the start of the buffer
  u32 buffer;     // index, or ~0
  u32 size;       // bytes of the access
  u32 thread, thread2;  // in the threadgroup; ~0 when unknown
  u32 group;      // threadgroup, linear
  u32 detail;     // kind-dependent
};

// One byte's history. A stamp is: clock (32 bits), simdgroup clock (21), atomic (1), thread (10).
// Stamp 0 means never; clock 1 means set by the host before the launch.
struct Shadow {
  u64 writer;
  u64 reader[2];
  u32 writer_pc, reader_pc;
};

enum Divergence : u32 { kOtherPlace, kLeft, kOtherTrail, kStuck, kPartial };

enum : u32 { kWritable = 1, kInitialised = 2, kShared = 4 /* threadgroup memory */ };

struct Counts {  // by log2 of the access width: 1, 2, 4, 8, 16 bytes
  u64 reads[5], writes[5], atomics;
};

struct Buffer {
  u8* start;
  u64 size;
  u32 flags;
  Shadow* shadow;   // one a byte, for writable buffers
  u16* reads;       // how often each byte was read, for read-only buffers
  Counts counts;
};

// Where a collective stands in the source. A helper called from two branches is two places: the
// chain of inlined calls around `pc` tells them apart (see em_chains), for pcs that differ. At -O0
// nothing is inlined and nothing copied: there pc is a hash of the return addresses on the stack.
struct Place {
  u64 site;  // (offset of the file's name in the image) << 32 | line << 10 | column
  u32 pc;
};
constexpr u32 kTrail = 24;

enum Wait : u8 { kReady, kSimd, kQuad, kBarrier, kSimdBarrier, kDone };

struct Fiber {
  void* sp;
  u8* stack;
  u32 thread, lane, simdgroup;
  u32 position[3];  // in the threadgroup
  Wait wait;
  Place place;      // where it waits
  u32 passed;       // collectives passed without waiting (fragment loads, stores) since the last meeting
  Place trail[kTrail];  // the first of them
  u32 arrivals[2];  // how many simd and quad exchanges it took part in: picks the slot set
};

struct Stats {
  u64 barriers, simd_barriers, exchanges, multiplies, fragment_loads, fragment_stores;
  u64 threadgroups, threads, switches;
};

struct Machine {
  u32 grid[3], group_size[3], groups[3];
  u32 group[3], group_linear;     // the running threadgroup
  u32 size[3], threads;           // its extent: edges of the grid may be smaller
  u32 simdgroups;
  u32 live;
  u32 order;                      // 0 forward, 1 backward, 2 random
  u64 random;
  bool stopped, literal;
  u32 clock[2], clock_start[2];   // per Space
  u32 simd_clock[2][kMaxSimdgroups];
  void (*entry)();
  const u64* args;  // addresses of the buffers, in the order of the signature
  Fiber* current;
  void* scheduler_sp;
  u64 ready[kMaxThreads / 64];
  Fiber fibers[kMaxThreads];
  Stats stats;
};

extern Machine m;
extern Buffer buffers[kMaxBuffers];
extern u32 buffer_count;

// watchdog.cpp
void watch(u32 seconds);
void unwatch();

// scheduler.cpp
bool same_place(const Place& a, const Place& b);
void wait_here(Wait why, const Place& place);
void run_again();  // after wake() of oneself: let the scheduler choose again
void wake(Fiber& f);
[[noreturn]] void stop_run();
u64 next_random();

// memory.cpp
void memory_new_threadgroup();
Finding& find(Kind kind, const void* pc, u32 detail = 0);
[[noreturn]] void divergent(const Place& here, const Fiber* other, const Place& there, u32 detail);
void check_trails(u32 begin, u32 end);  // at a meeting of lanes: did all pass the same collectives?
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
inline u32 image_offset(const void* pc) { return (u32)((const char*)pc - __ehdr_start); }

Place make_place(const char* file, u32 line_column, const void* pc, const void* frame);

#define CALLER __builtin_return_address(0)
#define HERE make_place(file, line_column, CALLER, __builtin_frame_address(0))
#define API extern "C" __attribute__((visibility("default")))
#define HOOK extern "C" __attribute__((visibility("hidden")))
