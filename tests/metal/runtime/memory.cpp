// Every load and store of the kernel, seen.
//
// The kernel is compiled with -fsanitize=thread, but the hooks that this inserts are the ones below,
// not those of a sanitizer's library. Each buffer and each threadgroup array lies alone in the arena,
// a megabyte from its neighbours; an access that is not wholly inside one is out of bounds.
//
// Races. Two accesses to a byte by different threads, one of them a write, are ordered only by
//  * a threadgroup_barrier between them whose flags name that memory, in one threadgroup, or
//  * a simdgroup_barrier between them whose flags name it, in one simdgroup.
// Barriers tick clocks; each byte keeps stamps of its last writer and of two readers (of different
// simdgroups if there were such), which is enough to know whether any reader since the last write
// conflicts with the next. Nothing depends on the order in which fibers happened to run.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

constexpr u64 kGrain = 64 << 10;       // buffers start at multiples of this
constexpr u64 kRedZone = 1 << 20;
constexpr u64 kArenaBytes = 6ull << 30;  // virtual; only what is touched takes memory
constexpr u8 kPoison = 0xff;           // NaN in every float format, -1 in every integer

Buffer buffers[kMaxBuffers];
u32 buffer_count;
static u8* arena;
static u64 arena_used;
static u8 owner[kArenaBytes / kGrain];  // grain -> buffer + 1; red zones go to the nearer buffer
static Finding findings[kMaxFindings];
static u32 finding_count;
static u32 group_arrays[64];  // threadgroup array id -> buffer + 1, 0 when not yet declared
static u64 group_bytes;       // of all threadgroup arrays that the launch came by
extern "C" char _end[] __attribute__((visibility("hidden")));

static void* map(u64 bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}

Finding& find(Kind kind, const void* pc, u32 detail) {
  static Finding overflow;
  u64 offset = pc ? image_offset(pc) : 0;
  for (u32 i = 0; i < finding_count; ++i)
    if (pc && findings[i].kind == kind && findings[i].pc == offset) {
      ++findings[i].count;
      return overflow;
    }
  if (finding_count == kMaxFindings) return overflow;
  Finding& f = findings[finding_count++];
  f = {};
  f.kind = kind;
  f.count = 1;
  f.pc = offset;
  f.buffer = ~0u;
  f.thread = m.current ? m.current->thread : ~0u;
  f.thread2 = ~0u;
  f.group = m.group_linear;
  f.detail = detail;
  return f;
}

static void find_access(Kind kind, const void* pc, u32 buffer, uptr address, u32 size, u32 detail) {
  Finding& f = find(kind, pc, detail);
  f.buffer = buffer;
  f.size = size;
  f.offset = (int64_t)(address - (uptr)buffers[buffer].start);
}

// ---- stamps ----

static u64 stamp(Space space, bool atomic) {
  const Fiber& f = *m.current;
  return (u64)m.clock[space] << 32 | (u64)(m.simd_clock[space][f.simdgroup] & 0x1fffff) << 11 |
         (u64)atomic << 10 | f.thread;
}
static u32 clock_of(u64 s) { return (u32)(s >> 32); }
static u32 simd_clock_of(u64 s) { return (u32)s >> 11; }
static u32 thread_of(u64 s) { return s & 1023; }
static bool atomic_of(u64 s) { return s >> 10 & 1; }

static bool conflict(u64 before, u64 now, Space space) {  // before: not 0
  const u32 clock = clock_of(before);
  if (clock <= 1) return false;
  if (atomic_of(before) && atomic_of(now)) return false;
  if (clock < m.clock_start[space]) return space == kDevice;  // another threadgroup
  if (thread_of(before) == thread_of(now)) return false;
  if (clock < m.clock[space]) return false;
  if (thread_of(before) / kSimdWidth == thread_of(now) / kSimdWidth &&
      simd_clock_of(before) < simd_clock_of(now))
    return false;
  return true;
}

enum RaceKind : u32 { kWriteWrite, kWriteRead, kReadWrite, kOtherGroup = 4 };

static void race(const void* pc, u32 buffer, uptr address, u32 size, u32 what, u64 before, u32 pc2) {
  Space space = buffers[buffer].flags & kShared ? kThreadgroup : kDevice;
  Finding& f = find(kRace, pc, what);
  f.buffer = buffer;
  f.size = size;
  f.offset = (int64_t)(address - (uptr)buffers[buffer].start);
  f.thread2 = thread_of(before);
  f.pc2 = pc2;
  if (clock_of(before) < m.clock_start[space]) f.detail |= kOtherGroup;
}

static void note_reader(Shadow& s, u64 now, u32 pc, Space space) {
  const u64 a = s.reader[0], b = s.reader[1];
  s.reader_pc = pc;
  s.reader[0] = now;
  if (thread_of(a) == thread_of(now)) return;
  if (thread_of(b) == thread_of(now)) {
    s.reader[1] = a;
    return;
  }
  // A reader of another threadgroup conflicts with every write of this one: never forget it.
  if (space == kDevice && b && clock_of(b) < m.clock_start[space]) return;
  const bool fresh = clock_of(b) == clock_of(now);
  const bool b_elsewhere = fresh && thread_of(b) / kSimdWidth != thread_of(now) / kSimdWidth;
  const bool a_elsewhere = thread_of(a) / kSimdWidth != thread_of(now) / kSimdWidth;
  if (a_elsewhere || !b_elsewhere) s.reader[1] = a;
}

enum Act { kRead, kWrite, kAtomic, kAtomicStore };
static constexpr u32 told(Act act) { return act == kAtomicStore ? kAtomic : act; }
static constexpr bool is_atomic(Act act) { return told(act) == kAtomic; }

template <Act act>
static void check_shadow(Buffer& b, u32 index, uptr address, u32 size, const void* pc) {
  const Space space = b.flags & kShared ? kThreadgroup : kDevice;
  const u64 now = stamp(space, is_atomic(act));
  const u32 here = image_offset(pc);
  Shadow* s = b.shadow + (address - (uptr)b.start);
  for (u32 i = 0; i < size; ++i, ++s) {
    if ((act == kRead || act == kAtomic) && s->writer == 0) {
      find_access(kUninitialised, pc, index, address + i, size, 0);
      s->writer = 1ull << 32;
    }
    if (s->writer && conflict(s->writer, now, space))
      race(pc, index, address + i, size, act == kRead ? kWriteRead : kWriteWrite, s->writer,
           s->writer_pc);
    if (act == kRead) {
      if (s->reader[0] != now) note_reader(*s, now, here, space);
      continue;
    }
    for (u32 r = 0; r < 2; ++r)
      if (s->reader[r] && conflict(s->reader[r], now, space))
        race(pc, index, address + i, size, kReadWrite, s->reader[r], r ? 0 : s->reader_pc);
    s->writer = now;
    s->writer_pc = here;
    s->reader[0] = s->reader[1] = 0;
  }
}

static bool private_or_constant(uptr address, u32 size) {
  uptr stack = (uptr)m.current->stack;
  if (address >= stack && address + size <= stack + kStackBytes) return true;
  return address >= (uptr)__ehdr_start && address + size <= (uptr)_end;
}

template <Act act>
static inline void access(uptr address, u32 size, const void* pc) {
  const u64 offset = address - (uptr)arena;
  if (__builtin_expect(offset >= kArenaBytes, 0)) {
    if (private_or_constant(address, size)) return;
    Finding& f = find(kWild, pc, told(act));
    f.size = size;
    f.offset = (int64_t)address;
    stop_run();
  }
  const u32 index = owner[offset / kGrain] - 1u;
  if (index == ~0u) {
    Finding& f = find(kWild, pc, told(act));
    f.size = size;
    f.offset = (int64_t)address;
    stop_run();
  }
  Buffer& b = buffers[index];
  const u64 inside = address - (uptr)b.start;
  if (__builtin_expect(inside >= b.size || size > b.size - inside, 0)) {
    find_access(kOutOfBounds, pc, index, address, size, told(act));
    stop_run();
  }
  u32 width = size >= 16 ? 4 : (u32)__builtin_ctz(size);
  if (act == kRead) b.counts.reads[width] += size > 16 ? size / 16 : 1;
  if (act == kWrite) b.counts.writes[width] += size > 16 ? size / 16 : 1;
  if (is_atomic(act)) ++b.counts.atomics;
  if (b.flags & kWritable) {
    check_shadow<act>(b, index, address, size, pc);
    return;
  }
  if (act != kRead) {
    find_access(kReadOnly, pc, index, address, size, told(act));
    stop_run();
  }
  u16* r = b.reads + inside;
  for (u32 i = 0; i < size; ++i) r[i] += r[i] != 0xffff;
}

// ---- the hooks ----

HOOK void __tsan_init() {}
#define HOOKS(n)                                                                          \
  HOOK void __tsan_read##n(void* p) { access<kRead>((uptr)p, n, CALLER); }               \
  HOOK void __tsan_write##n(void* p) { access<kWrite>((uptr)p, n, CALLER); }             \
  HOOK void __tsan_unaligned_read##n(void* p) { access<kRead>((uptr)p, n, CALLER); }     \
  HOOK void __tsan_unaligned_write##n(void* p) { access<kWrite>((uptr)p, n, CALLER); }   \
  HOOK void __tsan_read_write##n(void* p) {                                               \
    access<kRead>((uptr)p, n, CALLER);                                                    \
    access<kWrite>((uptr)p, n, CALLER);                                                   \
  }                                                                                       \
  HOOK void __tsan_unaligned_read_write##n(void* p) {                                     \
    access<kRead>((uptr)p, n, CALLER);                                                    \
    access<kWrite>((uptr)p, n, CALLER);                                                   \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

template <Act act>
static void access_range(uptr p, u64 n, const void* pc) {  // a struct: as the widest words that fit
  while (n) {
    u32 step = n >= 16 ? 16 : n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
    access<act>(p, step, pc);
    p += step;
    n -= step;
  }
}
HOOK void* __tsan_memcpy(void* d, const void* s, size_t n) {
  access_range<kRead>((uptr)s, n, CALLER);
  access_range<kWrite>((uptr)d, n, CALLER);
  return memcpy(d, s, n);
}
HOOK void* __tsan_memmove(void* d, const void* s, size_t n) {
  access_range<kRead>((uptr)s, n, CALLER);
  access_range<kWrite>((uptr)d, n, CALLER);
  return memmove(d, s, n);
}
HOOK void* __tsan_memset(void* d, int v, size_t n) {
  access_range<kWrite>((uptr)d, n, CALLER);
  return memset(d, v, n);
}

HOOK void em_atomic(void* p, u32 size, u32 reads) {
  if (reads)
    access<kAtomic>((uptr)p, size, CALLER);
  else
    access<kAtomicStore>((uptr)p, size, CALLER);
}

// Undefined behaviour that clang can see at the place of use (-fsanitize=alignment, ...).
struct TypeMismatch {
  const char* file;
  u32 line, column;
  void* type;
  u8 log_alignment, check_kind;
};
static void misaligned(const TypeMismatch* d, uptr p, const void* pc) {
  const u64 offset = p - (uptr)arena;
  const u32 index = offset < kArenaBytes ? owner[offset / kGrain] - 1u : ~0u;
  Finding& f = find(kMisaligned, pc, 1u << d->log_alignment);
  f.buffer = index;
  f.offset = index == ~0u ? (int64_t)p : (int64_t)(p - (uptr)buffers[index].start);
  stop_run();
}
HOOK void __ubsan_handle_type_mismatch_v1(TypeMismatch* d, uptr p) { misaligned(d, p, CALLER); }
HOOK void __ubsan_handle_out_of_bounds(void*, uptr i) {
  find(kArrayIndex, CALLER, (u32)i);
  stop_run();
}
HOOK void __ubsan_handle_divrem_overflow(void*, uptr, uptr) {
  find(kDivideByZero, CALLER);
  stop_run();
}
HOOK __bf16 __truncsfbf2(float x) {  // libgcc has it only from version 13
  u32 u = __builtin_bit_cast(u32, x);
  u = x != x ? u >> 16 | 64 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, (u16)u);
}

// ---- the arena ----

static u32 add_buffer(u64 bytes, u32 flags) {
  if (!arena) arena = (u8*)(((uptr)map(kArenaBytes + kGrain) + kGrain - 1) / kGrain * kGrain);
  const u64 room = (bytes + kGrain - 1) / kGrain * kGrain + kRedZone;  // half in front, half behind
  if (buffer_count == kMaxBuffers || arena_used + room > kArenaBytes) return ~0u;
  Buffer& b = buffers[buffer_count];
  b = {};
  b.start = arena + arena_used + kRedZone / 2;
  b.size = bytes;
  b.flags = flags;
  if (flags & kWritable)
    b.shadow = (Shadow*)map((bytes + 1) * sizeof(Shadow));
  else
    b.reads = (u16*)map((bytes + 1) * sizeof(u16));
  memset(owner + arena_used / kGrain, (int)buffer_count + 1, room / kGrain);
  arena_used += room;
  if (flags & kInitialised && flags & kWritable)
    for (u64 i = 0; i < bytes; ++i) b.shadow[i].writer = 1ull << 32;
  return buffer_count++;
}

API void em_reset() {
  for (u32 i = 0; i < buffer_count; ++i) {
    Buffer& b = buffers[i];
    if (b.shadow) munmap(b.shadow, (b.size + 1) * sizeof(Shadow));
    if (b.reads) munmap(b.reads, (b.size + 1) * sizeof(u16));
  }
  if (arena) madvise(arena, arena_used, MADV_DONTNEED);
  memset(owner, 0, arena_used / kGrain + 1);
  memset(group_arrays, 0, sizeof group_arrays);
  arena_used = buffer_count = finding_count = 0;
  group_bytes = 0;
}

API void* em_buffer(u64 bytes, u32 flags, const void* data) {
  u32 i = add_buffer(bytes, flags);
  if (i == ~0u) return nullptr;
  if (data)
    memcpy(buffers[i].start, data, bytes);
  else
    memset(buffers[i].start, kPoison, bytes);
  return buffers[i].start;
}

HOOK void* em_threadgroup_array(u32 id, u64 bytes) {
  u32 i = group_arrays[id];
  if (!i) {
    i = add_buffer(bytes, kWritable | kShared) + 1;
    if (!i) abort();
    group_arrays[id] = i;
    memset(buffers[i - 1].start, kPoison, bytes);
    group_bytes += (bytes + 15) / 16 * 16;
    if (group_bytes > kMaxThreadgroupBytes) {
      Finding& f = find(kThreadgroupSize, CALLER, (u32)group_bytes);
      f.buffer = i - 1;
    }
  }
  return buffers[i - 1].start;
}

void memory_new_threadgroup() {  // threadgroup memory starts undefined again
  for (u32 i = 0; i < buffer_count; ++i) {
    Buffer& b = buffers[i];
    if (!(b.flags & kShared)) continue;
    memset(b.start, kPoison, b.size);
    memset(b.shadow, 0, b.size * sizeof(Shadow));
  }
}

API const Finding* em_findings(u32* count) {
  *count = finding_count;
  return findings;
}
API const Buffer* em_buffers(u32* count) {
  *count = buffer_count;
  return buffers;
}
API u64 em_threadgroup_bytes() { return group_bytes; }
API u32 em_group_array_buffer(u32 id) { return group_arrays[id]; }

API u64 em_unwritten(u32 index, u64* first) {  // bytes of an output that nobody wrote
  const Buffer& b = buffers[index];
  u64 n = 0;
  for (u64 i = b.size; i-- > 0;)
    if (b.shadow[i].writer == 0) {
      ++n;
      *first = i;
    }
  return n;
}
API void em_read_range(u32 index, u32* least, u32* most) {  // reads of the least and most read byte
  const Buffer& b = buffers[index];
  *least = ~0u, *most = 0;
  for (u64 i = 0; i < b.size; ++i) {
    if (b.reads[i] < *least) *least = b.reads[i];
    if (b.reads[i] > *most) *most = b.reads[i];
  }
}
API u32 em_image_offset(const void* p) { return image_offset(p); }
