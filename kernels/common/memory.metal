// Moving runs of elements: how many bytes one access takes, and what it becomes in registers.

#include <metal_stdlib>
using namespace metal;

#define UNROLL _Pragma("clang loop unroll(full)")
// A constant member of a template: Metal keeps it in constant space.
#define CONST static constant constexpr const int

// The unsigned type that moves BYTES in one access.
template <int BYTES>
struct Raw;
template <>
struct Raw<2> {
  using type = ushort;
};
template <>
struct Raw<4> {
  using type = uint;
};
template <>
struct Raw<8> {
  using type = uint2;
};
template <>
struct Raw<16> {
  using type = uint4;
};

// WIDE consecutive elements in one access, as float. Vectors are aligned to WIDE elements.
template <int WIDE>
struct Wide {
  template <typename T>
  METAL_FUNC static void load(const device T* p, thread float* to) {
    const vec<T, WIDE> held = *(const device vec<T, WIDE>*)p;
    UNROLL
    for (int i = 0; i < WIDE; i++) {
      to[i] = float(held[i]);
    }
  }
  template <typename T>
  METAL_FUNC static void store(device T* p, const thread float* from) {
    vec<T, WIDE> held;
    UNROLL
    for (int i = 0; i < WIDE; i++) {
      held[i] = T(from[i]);
    }
    *(device vec<T, WIDE>*)p = held;
  }
};
template <>
struct Wide<1> {
  template <typename T>
  METAL_FUNC static void load(const device T* p, thread float* to) {
    to[0] = float(p[0]);
  }
  template <typename T>
  METAL_FUNC static void store(device T* p, const thread float* from) {
    p[0] = T(from[0]);
  }
};

// COUNT consecutive elements as float, in the widest access that divides the run.
template <int COUNT, typename T>
METAL_FUNC void load_run(const device T* p, thread float (&to)[COUNT]) {
  constexpr int wide = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
  UNROLL
  for (int i = 0; i < COUNT; i += wide) {
    Wide<wide>::load(p + i, to + i);
  }
}

METAL_FUNC void spread(uint v, thread uint* to) { to[0] = v; }
METAL_FUNC void spread(uint2 v, thread uint* to) {
  to[0] = v.x;
  to[1] = v.y;
}
METAL_FUNC void spread(uint4 v, thread uint* to) {
  to[0] = v.x;
  to[1] = v.y;
  to[2] = v.z;
  to[3] = v.w;
}

// COUNT consecutive words, in the widest access that divides a run and its alignment.
template <int COUNT>
METAL_FUNC void load_words(const device uint* p, thread uint (&to)[COUNT]) {
  constexpr int wide = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
  using Access = typename Raw<4 * wide>::type;
  UNROLL
  for (int i = 0; i < COUNT; i += wide) {
    spread(*(const device Access*)(p + i), to + i);
  }
}
