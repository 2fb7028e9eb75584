// Metal's language on top of clang's C++ for OpenCL: keywords, types, and the calls into the runtime.
// Included in front of everything. What Metal gives only after an #include is in the file of that
// name, so a missing header is a compile error here too.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define thread __private
// `constant`, `kernel` and `half` are keywords here already; [[attributes]] are ignored.
#undef kernel
#define kernel
#define bfloat __bf16
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST constant
#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __HAVE_BFLOAT__ 1
// OpenCL reserves these words, Metal does not.
#define global em_word_global
#define local em_word_local
#define generic em_word_generic
#define pipe em_word_pipe
#define atomic_int em_atomic_int
#define atomic_uint em_atomic_uint
#define atomic_long em_atomic_long
#define atomic_ulong em_atomic_ulong
#define atomic_float em_atomic_float
#define atomic_bool em_atomic_bool
#define memory_order em_memory_order
#define memory_scope em_memory_scope

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;

// The shim is inlined without debug information of its own: an access inside it carries the line of
// the kernel that asked for it.
#define EM_FN __attribute__((always_inline, nodebug)) inline
#define EM_WHERE const constant char *em_file = __builtin_FILE(), \
    uint em_line = __builtin_LINE(), uint em_column = __builtin_COLUMN()
#define EM_HERE em_file, em_line << 10 | (em_column & 1023)
typedef const constant char* em_file_t;

#ifdef EM_REGISTERS
#include "emulator_registers.h"
#else
// Never merged: two calls in two branches must stay two calls.
#define EM_MEET __attribute__((nomerge))

extern "C" {
ulong em_argument(uint index);
uint em_attribute(uint what, uint dimension);
threadgroup void* em_threadgroup_array(uint id, ulong bytes);
EM_MEET void em_threadgroup_barrier(uint flags, em_file_t file, uint line_column);
EM_MEET void em_simdgroup_barrier(uint flags, em_file_t file, uint line_column);
EM_MEET ulong em_shuffle(uint quad, ulong value, uint from, em_file_t file, uint line_column);
EM_MEET ulong em_ballot(uint quad, uint yes, em_file_t file, uint line_column);
EM_MEET float em_reduce_float(uint quad, float x, uint op, uint prefix, em_file_t file, uint line_column);
EM_MEET long em_reduce_long(uint quad, long x, uint op, uint prefix, em_file_t file, uint line_column);
EM_MEET ulong em_reduce_ulong(uint quad, ulong x, uint op, uint prefix, em_file_t file, uint line_column);
EM_MEET ulong em_multiply(ulong a, ulong b, ulong c, em_file_t file, uint line_column);
EM_MEET void em_pass(uint what, em_file_t file, uint line_column);
void em_atomic(volatile device void* p, uint size, uint reads);
}
#endif

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename V>
struct em_vec {  // what a type is made of: scalars have one component
  using scalar = V;
  static constexpr constant int size = 1;
};
template <typename T, int N>
struct em_vec<vec<T, N>> {
  using scalar = T;
  static constexpr constant int size = N;
};

// packed_float3 and kin: the alignment of a component, no padding.
template <typename T, int N>
struct packed_vec {
  T em_v[N];
  packed_vec() = default;
  packed_vec(vec<T, N> a) { for (int i = 0; i < N; ++i) em_v[i] = a[i]; }
#define EM_PACKED(space)                                                  \
  operator vec<T, N>() const space {                                      \
    vec<T, N> r;                                                          \
    for (int i = 0; i < N; ++i) r[i] = em_v[i];                           \
    return r;                                                             \
  }                                                                       \
  T operator[](int i) const space { return em_v[i]; }
  EM_PACKED(thread)
  EM_PACKED(device)
  EM_PACKED(threadgroup)
  EM_PACKED(constant)
#undef EM_PACKED
};
template <typename T, int N>
struct em_vec<packed_vec<T, N>> {
  using scalar = T;
  static constexpr constant int size = N;
};
template <typename A>
EM_FN A em_plain(A a) { return a; }
template <typename T, int N>
EM_FN vec<T, N> em_plain(packed_vec<T, N> a) { return a; }

template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <typename V, typename A>
EM_FN void em_put(thread V& v, thread int& at, A a) {
  using T = typename em_vec<V>::scalar;
  if constexpr (em_vec<A>::size == 1) {
    v[at++] = (T)a;
  } else {
    auto p = em_plain(a);
    for (int i = 0; i < em_vec<A>::size; ++i) v[at++] = (T)p[i];
  }
}

#define EM_HALF(T)                                 \
  template <>                                      \
  struct em_half_like<T> {                         \
    static constexpr constant bool value = true;   \
  };
template <typename T>
struct em_half_like {
  static constexpr constant bool value = false;
};
EM_HALF(half)
EM_HALF(bfloat)

// V(a, b, ...) with Metal's meaning; the driver rewrites vector constructors to this.
template <typename V, typename A>
EM_FN V make(A a) {
  using T = typename em_vec<V>::scalar;
  if constexpr (em_half_like<V>::value && em_half_like<A>::value) {
    return (V)(float)a;
  } else if constexpr (em_vec<V>::size == 1) {
    return (V)a;
  } else if constexpr (em_vec<A>::size == 1) {
    return (V)(T)a;
  } else {
    static_assert(em_vec<A>::size == em_vec<V>::size, "vectors of different length");
    return __builtin_convertvector(em_plain(a), V);
  }
}
template <typename V>
EM_FN V make() {
  return V(0);
}
template <typename V, typename A, typename B, typename... Rest>
EM_FN V make(A a, B b, Rest... rest) {
  static_assert(em_vec<A>::size + em_vec<B>::size + (0 + ... + em_vec<Rest>::size) ==
                    em_vec<V>::size, "wrong number of components");
  V v;
  int at = 0;
  em_put(v, at, a);
  em_put(v, at, b);
  (em_put(v, at, rest), ...);
  return v;
}

template <typename To, typename From>
EM_FN constexpr To cast(From x) {  // static_cast: between vectors it converts, component by component
  if constexpr (em_vec<To>::size > 1 && em_vec<From>::size > 1) {
    return __builtin_convertvector(x, To);
  } else if constexpr (em_half_like<To>::value && em_half_like<From>::value) {
    return (To)(float)x;
  } else {
    return (To)x;
  }
}

template <typename To, typename From>
EM_FN To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return __builtin_bit_cast(To, x);
}

#define EM_VECTORS(T, name)      \
  typedef vec<T, 2> name##2;     \
  typedef vec<T, 3> name##3;     \
  typedef vec<T, 4> name##4;
EM_VECTORS(char, char)
EM_VECTORS(uchar, uchar)
EM_VECTORS(short, short)
EM_VECTORS(ushort, ushort)
EM_VECTORS(int, int)
EM_VECTORS(uint, uint)
EM_VECTORS(long, long)
EM_VECTORS(ulong, ulong)
EM_VECTORS(half, half)
EM_VECTORS(float, float)
EM_VECTORS(bfloat, bfloat)

#define EM_PACKED_TYPES(name)                 \
  typedef packed_vec<name, 2> packed_##name##2; \
  typedef packed_vec<name, 3> packed_##name##3; \
  typedef packed_vec<name, 4> packed_##name##4;
EM_PACKED_TYPES(char)
EM_PACKED_TYPES(uchar)
EM_PACKED_TYPES(short)
EM_PACKED_TYPES(ushort)
EM_PACKED_TYPES(int)
EM_PACKED_TYPES(uint)
EM_PACKED_TYPES(half)
EM_PACKED_TYPES(float)

}  // namespace metal

// Types are known without `using namespace metal`, as in Metal.
using metal::vec;
using metal::as_type;
#define EM_EXPORT(T) using metal::T##2; using metal::T##3; using metal::T##4;
EM_EXPORT(char) EM_EXPORT(uchar) EM_EXPORT(short) EM_EXPORT(ushort) EM_EXPORT(int) EM_EXPORT(uint)
EM_EXPORT(long) EM_EXPORT(ulong) EM_EXPORT(half) EM_EXPORT(float) EM_EXPORT(bfloat)
EM_EXPORT(packed_char) EM_EXPORT(packed_uchar) EM_EXPORT(packed_short) EM_EXPORT(packed_ushort)
EM_EXPORT(packed_int) EM_EXPORT(packed_uint) EM_EXPORT(packed_half) EM_EXPORT(packed_float)

EM_FN constexpr float em_nan() { return __builtin_nanf(""); }
#define INFINITY __builtin_inff()
#define NAN em_nan()
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX 65504.0h
#define HALF_MIN 6.103515625e-05h
#define HALF_EPSILON 9.765625e-04h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define CHAR_BIT 8
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
