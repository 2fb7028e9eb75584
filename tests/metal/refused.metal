// Each part is a header, or the body of a kernel with inputs x, s and output out, that Metal
// refuses, or this project's rules do: clang or the lint must refuse it. See test_refused.py.

// ======== address spaces ========

//// pointer parameter without address space
float f(const float* x) { return x[0]; }

//// reference parameter without address space
void f(float& x) { x = 1; }

//// rvalue reference parameter
template <typename T> float f(T&& x) { return x; }

//// second parameter without address space
float f(device float* x, const float* y) { return y[0]; }

//// returned pointer without address space
const float* f(const thread float* x) { return x; }

//// local pointer without address space
float f(float a) { float* p = &a; return *p; }

//// local reference without address space
float f(float a) { float& p = a; return p; }

//// auto reference without address space
float f(float a) { auto& p = a; return p; }

//// auto pointer without address space
float f(device float* x) { auto* p = x; return *p; }

//// member pointer without address space
struct S { const float* p; };

//// alias of a pointer without address space
using P = const float*;

//// typedef of a pointer without address space
typedef float* P;

//// C cast without address space
float f(uint a) { return *(float*)&a; }

//// reinterpret_cast without address space
float f(uint a) { return *reinterpret_cast<float*>(&a); }

//// member function without address space
struct S { float x; float get() const { return x; } };

//// operator without address space
struct S { float x; float operator()(float a) { return x + a; } };

//// device pointer to thread pointer
float f(thread float* x) { return x[0]; }
float g(device float* x) { return f(x); }

//// threadgroup pointer to device pointer
float f(threadgroup float* x) {
  device float* p = x;
  return *p; }

//// cast between address spaces
float f(device float* x) { return *(threadgroup float*)x; }

//// thread member function on a device object
struct S { float x; float get() thread { return x; } };
float f(device S* s) { return s->get(); }

//// write through constant
void f(constant float* x) { x[0] = 1; }

//// write through const device
void f(const device float* x) { x[0] = 1; }

//// program-scope variable outside constant
int counter = 3;

//// program-scope constexpr outside constant
constexpr int N = 3;

//// program-scope device variable
device int counter;

//// program-scope threadgroup variable
threadgroup float tile[32];

//// uninitialised constant
constant float table[4];

//// threadgroup variable in a function
float f(float x) {
  threadgroup float t[32];
  t[0] = x;
  return t[0];
}

//// body: threadgroup variable with a value
threadgroup float t = 0; out[0] = t;

// ======== language ========

//// double
float f(float x) { double y = x; return y; }

//// long double
float f(float x) { long double y = 1; return x; }

//// goto
float f(float x) { if (x > 0) goto end; x = 1; end: return x; }

//// recursion
int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }

//// mutual recursion
int g(int n);
int f(int n) { return n ? g(n - 1) : 0; }
int g(int n) { return n ? f(n - 1) : 1; }

//// function pointer
float g(float x) { return x; }
float f(float x) { float (*p)(float) = g; return p(x); }

//// virtual function
struct S { virtual float f() thread { return 0; } };

//// exceptions
float f(float x) { try { return x; } catch (...) { return 0; } }

//// new
float f(float x) { thread float* p = new float; return x; }

//// dynamic_cast
struct A {}; struct B : A {};
void f(thread A* a) { thread B* b = dynamic_cast<thread B*>(a); }

//// typeid
bool f(float x) { return typeid(x) == typeid(float); }

//// static variable in a function
int f(int x) { static int n = 0; n += x; return n; }

//// lambda
float f(float x) { auto g = [=](float y) { return x + y; }; return g(1); }

//// variadic function
int f(int n, ...) { return n; }

//// variable length array
float f(int n) { float a[n]; a[0] = 1; return a[0]; }

//// inline assembly
void f() { asm("nop"); }

//// std::
float f(float x) { return std::max(x, 0.0f); }

//// a C++ header
#include <cmath>

//// a quoted include
#include "common/reduce.metal"

//// printf
void f() { printf("hello"); }

//// uninitialised variable
float f(float x) { float s; for (int i = 0; i < 4; ++i) s += x; return s; }

//// missing return
float f(float x) { if (x > 0) return x; }

// ======== types ========

//// vector of eight
float f() { vec<float, 8> v = 1; return v[0]; }

//// float8
float f(float8 x) { return x[0]; }

//// OpenCL vector literal
float4 f(float a) { return (float4)(a, a, a, 1.0f); }

//// OpenCL components
float f(float4 a) { return a.s0; }

//// halves of different length
float4 f(half4 a) { return a; }

//// body: float4 from five values
float4 v = float4(1, 2, 3, 4, 5); out[0] = v.x;

//// as_type of another size
float f(ushort x) { return as_type<float>(x); }

//// max of float and int
float f(float x) { return max(x, 0); }

//// exp of an int
float f(int x) { return exp(x); }

//// OpenCL's address space words
float f(__global float* x) { return x[0]; }

//// OpenCL's builtins
uint f() { return get_global_id(0); }

//// atomic<short>
void f(device atomic<short>* x) { atomic_store_explicit(x, short(1), memory_order_relaxed); }

//// atomic maximum of floats
void f(device atomic<float>* x) { atomic_fetch_max_explicit(x, 1.0f, memory_order_relaxed); }

//// plain arithmetic on an atomic
void f(device atomic_int* x) { *x += 1; }

//// stronger memory order
void f(device atomic_int* x) { atomic_store_explicit(x, 1, memory_order_seq_cst); }

// ======== primitives ========

//// simd_sum without its header
float f(float x) { return simd_sum(x); }

//// quad_sum without its header
#include <metal_simdgroup>
float f(float x) { return quad_sum(x); }

//// simdgroup_matrix without its header
#include <metal_simdgroup>
simdgroup_matrix<float, 8, 8> f();

//// simdgroup_matrix of int
#include <metal_simdgroup_matrix>
void f() { simdgroup_matrix<int, 8, 8> a; }

//// simdgroup_matrix 16x16
#include <metal_simdgroup_matrix>
void f() { simdgroup_matrix<float, 16, 16> a; }

//// fragment load of another type
#include <metal_simdgroup_matrix>
void f(const device half* p) { simdgroup_matrix<float, 8, 8> a; simdgroup_load(a, p, 8); }

//// fragment load from constant
#include <metal_simdgroup_matrix>
void f(constant float* p) { simdgroup_matrix<float, 8, 8> a; simdgroup_load(a, p, 8); }

//// fragments multiplied with *
#include <metal_simdgroup_matrix>
void f(thread simdgroup_matrix<float, 8, 8>& a) { auto b = a * a; }

//// shuffle of 64 bits
#include <metal_simdgroup>
ulong f(ulong x) { return simd_shuffle(x, 1); }

//// shuffle of a bool
#include <metal_simdgroup>
bool f(bool x) { return simd_shuffle(x, 1); }

//// simd_and of floats
#include <metal_simdgroup>
float f(float x) { return simd_and(x); }

//// body: barrier without flags
threadgroup_barrier(); out[0] = x[0];

//// body: barrier with a number
threadgroup_barrier(2); out[0] = x[0];

//// a kernel that returns a value
[[kernel]] int f(device float* x) { return 1; }

//// body: an unknown attribute's name in the body
out[0] = thread_position_in_the_grid.x;

//// body: x_shape of a scalar
out[s_shape[0]] = x[0];

//// body: a variable named as a shader's kind
float fragment = x[0];
out[0] = fragment;

//// a parameter named as a shader's kind
float f(float vertex) { return vertex; }
