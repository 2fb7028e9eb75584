"""Text that Metal refuses, refused here too: by clang or by the lint. And text that must pass.

Each snippet is a header, or a body when it starts with `body:`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal import CompileError, metal_kernel
from tests.metal.lint import lint

SIMD = "#include <metal_simdgroup>\n"
MATRIX = "#include <metal_simdgroup_matrix>\n"

REFUSED = {
    # ---- address spaces ----
    "pointer parameter without address space": "float f(const float* x) { return x[0]; }",
    "reference parameter without address space": "void f(float& x) { x = 1; }",
    "rvalue reference parameter": "template <typename T> float f(T&& x) { return x; }",
    "second parameter without address space": "float f(device float* x, const float* y) { return y[0]; }",
    "returned pointer without address space": "const float* f(const thread float* x) { return x; }",
    "local pointer without address space": "float f(float a) { float* p = &a; return *p; }",
    "local reference without address space": "float f(float a) { float& p = a; return p; }",
    "auto reference without address space": "float f(float a) { auto& p = a; return p; }",
    "auto pointer without address space": "float f(device float* x) { auto* p = x; return *p; }",
    "member pointer without address space": "struct S { const float* p; };",
    "alias of a pointer without address space": "using P = const float*;",
    "typedef of a pointer without address space": "typedef float* P;",
    "C cast without address space": "float f(uint a) { return *(float*)&a; }",
    "reinterpret_cast without address space":
        "float f(uint a) { return *reinterpret_cast<float*>(&a); }",
    "member function without address space": "struct S { float x; float get() const { return x; } };",
    "operator without address space":
        "struct S { float x; float operator()(float a) { return x + a; } };",
    "device pointer to thread pointer": "float f(thread float* x) { return x[0]; }\n"
        "float g(device float* x) { return f(x); }",
    "threadgroup pointer to device pointer": "float f(threadgroup float* x) {\n"
        "  device float* p = x;\n  return *p; }",
    "cast between address spaces": "float f(device float* x) { return *(threadgroup float*)x; }",
    "thread member function on a device object":
        "struct S { float x; float get() thread { return x; } };\n"
        "float f(device S* s) { return s->get(); }",
    "write through constant": "void f(constant float* x) { x[0] = 1; }",
    "write through const device": "void f(const device float* x) { x[0] = 1; }",
    "program-scope variable outside constant": "int counter = 3;",
    "program-scope constexpr outside constant": "constexpr int N = 3;",
    "program-scope device variable": "device int counter;",
    "program-scope threadgroup variable": "threadgroup float tile[32];",
    "uninitialised constant": "constant float table[4];",
    "threadgroup variable in a function":
        "float f(float x) {\n  threadgroup float t[32];\n  t[0] = x;\n  return t[0];\n}",
    "threadgroup variable with a value": "body: threadgroup float t = 0; out[0] = t;",
    # ---- language ----
    "double": "float f(float x) { double y = x; return y; }",
    "long double": "float f(float x) { long double y = 1; return x; }",
    "goto": "float f(float x) { if (x > 0) goto end; x = 1; end: return x; }",
    "recursion": "int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }",
    "mutual recursion": "int g(int n);\nint f(int n) { return n ? g(n - 1) : 0; }\n"
        "int g(int n) { return n ? f(n - 1) : 1; }",
    "function pointer": "float g(float x) { return x; }\nfloat f(float x) { float (*p)(float) = g; return p(x); }",
    "virtual function": "struct S { virtual float f() thread { return 0; } };",
    "exceptions": "float f(float x) { try { return x; } catch (...) { return 0; } }",
    "new": "float f(float x) { thread float* p = new float; return x; }",
    "dynamic_cast": "struct A {}; struct B : A {};\nvoid f(thread A* a) { thread B* b = dynamic_cast<thread B*>(a); }",
    "typeid": "bool f(float x) { return typeid(x) == typeid(float); }",
    "static variable in a function": "int f(int x) { static int n = 0; n += x; return n; }",
    "lambda": "float f(float x) { auto g = [=](float y) { return x + y; }; return g(1); }",
    "variadic function": "int f(int n, ...) { return n; }",
    "variable length array": "float f(int n) { float a[n]; a[0] = 1; return a[0]; }",
    "inline assembly": 'void f() { asm("nop"); }',
    "std::": "float f(float x) { return std::max(x, 0.0f); }",
    "a C++ header": "#include <cmath>\n",
    "a quoted include": '#include "common/reduce.metal"\n',
    "printf": 'void f() { printf("hello"); }',
    "uninitialised variable": "float f(float x) { float s; for (int i = 0; i < 4; ++i) s += x; return s; }",
    "missing return": "float f(float x) { if (x > 0) return x; }",
    # ---- types ----
    "vector of eight": "float f() { vec<float, 8> v = 1; return v[0]; }",
    "float8": "float f(float8 x) { return x[0]; }",
    "OpenCL vector literal": "float4 f(float a) { return (float4)(a, a, a, 1.0f); }",
    "OpenCL components": "float f(float4 a) { return a.s0; }",
    "halves of different length": "float4 f(half4 a) { return a; }",
    "float4 from five values": "body: float4 v = float4(1, 2, 3, 4, 5); out[0] = v.x;",
    "as_type of another size": "float f(ushort x) { return as_type<float>(x); }",
    "max of float and int": "float f(float x) { return max(x, 0); }",
    "exp of an int": "float f(int x) { return exp(x); }",
    "OpenCL's address space words": "float f(__global float* x) { return x[0]; }",
    "OpenCL's builtins": "uint f() { return get_global_id(0); }",
    "atomic<short>": "void f(device atomic<short>* x) { atomic_store_explicit(x, short(1), memory_order_relaxed); }",
    "atomic maximum of floats":
        "void f(device atomic<float>* x) { atomic_fetch_max_explicit(x, 1.0f, memory_order_relaxed); }",
    "plain arithmetic on an atomic": "void f(device atomic_int* x) { *x += 1; }",
    "stronger memory order":
        "void f(device atomic_int* x) { atomic_store_explicit(x, 1, memory_order_seq_cst); }",
    # ---- primitives ----
    "simd_sum without its header": "float f(float x) { return simd_sum(x); }",
    "quad_sum without its header": SIMD + "float f(float x) { return quad_sum(x); }",
    "simdgroup_matrix without its header": SIMD + "simdgroup_matrix<float, 8, 8> f();",
    "simdgroup_matrix of int": MATRIX + "void f() { simdgroup_matrix<int, 8, 8> a; }",
    "simdgroup_matrix 16x16": MATRIX + "void f() { simdgroup_matrix<float, 16, 16> a; }",
    "fragment load of another type": MATRIX
        + "void f(const device half* p) { simdgroup_matrix<float, 8, 8> a; simdgroup_load(a, p, 8); }",
    "fragment load from constant": MATRIX
        + "void f(constant float* p) { simdgroup_matrix<float, 8, 8> a; simdgroup_load(a, p, 8); }",
    "fragments multiplied with *": MATRIX
        + "void f(thread simdgroup_matrix<float, 8, 8>& a) { auto b = a * a; }",
    "shuffle of 64 bits": SIMD + "ulong f(ulong x) { return simd_shuffle(x, 1); }",
    "shuffle of a bool": SIMD + "bool f(bool x) { return simd_shuffle(x, 1); }",
    "simd_and of floats": SIMD + "float f(float x) { return simd_and(x); }",
    "barrier without flags": "body: threadgroup_barrier(); out[0] = x[0];",
    "barrier with a number": "body: threadgroup_barrier(2); out[0] = x[0];",
    "a kernel that returns a value": "[[kernel]] int f(device float* x) { return 1; }",
    "an unknown attribute's name in the body": "body: out[0] = thread_position_in_the_grid.x;",
    "x_shape of a scalar": "body: out[s_shape[0]] = x[0];",
}  # fmt: skip

ACCEPTED = {
    "every qualifier": "float f(const device float* a, threadgroup float* b, constant float* c,\n"
        "        thread float& d, const thread float* e) { return a[0] + b[0] + c[0] + d + e[0]; }",
    "products are no pointers": "float f(float a, float b) { float c = a * b; c = c * a; return a & 1 ? 0 : c; }"
        .replace("a & 1", "uint(a) & 1"),
    "templates and partial specialisation": "template <typename T, int N> struct S { T v[N]; };\n"
        "template <typename T> struct S<T, 1> { T v; };\n"
        "float f(S<float, 1> s, S<float, 3> t) { return s.v + t.v[2]; }",
    "qualified members": "struct S {\n  float x;\n  S(float x_) : x(x_) {}\n"
        "  S(float a, float b) thread : x(a + b) {}\n"
        "  float get() const thread { return x; }\n  float get() const device { return x; }\n"
        "  float operator()(float a) const thread { return x + a; }\n"
        "  static float one() { return 1; }\n};\n"
        "float f(const device S* s, float a) { S t(a, a); return t.get() + s->get() + t(a) + S::one(); }",
    "struct copies from device memory": "struct S { float a; uchar b[4]; };\n"
        "float f(const device S* s, device S* d) { S t = s[1]; d[0] = t; return t.a; }",
    "program-scope constants": "constant float table[2] = {1, 2};\nconstexpr constant int N = 2;\n"
        "static constant constexpr const int M = 3;\nfloat f(int i) { return table[i % N] + M; }",
    "pragma unroll": "float f(const thread float* x) {\n  float s = 0;\n"
        "  _Pragma(\"clang loop unroll(full)\")\n  for (int i = 0; i < 4; ++i) s += x[i];\n"
        "#pragma clang loop unroll(full)\n  for (int i = 0; i < 4; ++i) s += x[i];\n  return s; }",
    "vectors": "float4 f(half4 h, float2 a, uint2 u) {\n  float4 v = float4(a, 0.0f, 1.0f) + float4(h);\n"
        "  v.xy = a.yx * 2; v[3] += float(u.x);\n  vec<float, 4> w = vec<float, 4>(v.xy, a);\n"
        "  return select(v, w, v > w) + float4(1) + static_cast<float4>(h); }",
    "aliases of vectors": "template <typename T> struct S {\n  using V = vec<T, 2>;\n"
        "  static V f(T a) { return V(a, T(0)); }\n};\nfloat2 f(float a) { return S<float>::f(a); }",
    "halves and bfloats": "half f(half a, bfloat b) {\n  bfloat c = b * b + bfloat(a);\n"
        "  half d = a * 2.0h;\n  return d + half(c) + half(as_type<half>(ushort(3))); }",
    "math": "float f(float x, half h) {\n  float y = exp(x) + log2(x) + rsqrt(x) + metal::tanh(x);\n"
        "  y += precise::sqrt(x) + fast::exp(x) + fma(x, x, x) + clamp(x, 0.0f, 1.0f);\n"
        "  return y + float(max(h, half(0))) + pow(x, 2.0f) + fabs(x) + (isnan(x) ? 1 : 0); }",
    "type traits": "template <typename T> constexpr bool wide() { return sizeof(T) > 2; }\n"
        "template <typename T, typename U = conditional_t<is_same_v<T, half>, float, T>>\n"
        "U f(T x) { if constexpr (is_same_v<T, float>) return x; else return U(x) + 1; }\n"
        "float g(half h) { return f(h) + f(1.0f) + (wide<float>() ? 1 : 0); }",
    "collectives": SIMD + "#include <metal_quadgroup>\nfloat f(float x, uint l) {\n"
        "  x = simd_sum(x) + simd_max(x) + simd_shuffle_down(x, 2) + simd_shuffle_xor(x, ushort(1));\n"
        "  x += simd_broadcast(x, 3) + quad_sum(x) + simd_prefix_exclusive_sum(x);\n"
        "  return simd_any(x > 0) && simd_all(x < 1) ? x : float(simd_min(l)); }",
    "fragments": MATRIX + "template <typename T> void f(const threadgroup T* a, device float* d) {\n"
        "  simdgroup_matrix<T, 8, 8> A;\n  simdgroup_float8x8 C = make_filled_simdgroup_matrix<float, 8, 8>(0);\n"
        "  simdgroup_load(A, a, 16, ulong2(0, 0), true);\n  simdgroup_multiply_accumulate(C, A, A, C);\n"
        "  simdgroup_multiply(C, A, A);\n  thread auto& e = C.thread_elements();\n  e[0] = e[0] * 2;\n"
        "  reinterpret_cast<thread float2&>(C.thread_elements()) = float2(1, 2);\n"
        "  simdgroup_store(C, d, 8); }\n"
        "template void f<half>(const threadgroup half*, device float*);\n"
        "template void f<float>(const threadgroup float*, device float*);",
    "atomics": "void f(device atomic<uint>* a, threadgroup atomic_int* b, device atomic_float* c) {\n"
        "  atomic_fetch_add_explicit(a, 1u, memory_order_relaxed);\n"
        "  atomic_store_explicit(b, 2, memory_order_relaxed);\n"
        "  atomic_fetch_add_explicit(c, 1.5f, memory_order_relaxed); }",
    "reinterpreted words": "float f(const device uint* w, const device uchar* b) {\n"
        "  const device uint16_t* h = (const device uint16_t*)w;\n"
        "  const device uint8_t* p = reinterpret_cast<const device uint8_t*>(w);\n"
        "  return float(h[1] & 0x0f0f) + float(p[0] >> 4) + float(b[0]); }",
    "overloads are no recursion": "float f(float2 a) { return a.x; }\n"
        "float f(float a) { return a; }\nfloat g(float a) { return f(a) + f(float2(a, a)); }",
    "threadgroup memory": "body: threadgroup float a[2][16 * (2 + 1)], b;\n"
        "threadgroup half c[(16 > 2 ? 4 : 2)];\n"
        "if (thread_index_in_threadgroup == 0) { a[1][3] = 1; b = 2; c[3] = 3; }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);\n"
        "out[0] = a[1][3] + b + float(c[3]) + x[0];",
    "words of OpenCL that are free in Metal": "float f(float global, float local) { float generic = global; return generic + local; }",
    "strings and comments": "// goto std::max float* p double\n/* new \"double\" */\nfloat f(float x) { return x; } // f(float* x)",
}  # fmt: skip


def build(snippet: str) -> None:
    body = "out[0] = x[0] + s;"
    if snippet.startswith("body:"):
        body, snippet = snippet[5:].strip(), ""
    # A float in a constant input of no dimensions, so that every kind of input is there.
    kernel = metal_kernel("snippet", ["x", "s"], ["out"], body, snippet, check=False)
    kernel(
        inputs=[np.ones(16, np.float32), np.float32(1)],
        output_shapes=[(1,)],
        output_dtypes=[np.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(CompileError) as refused:
        build(REFUSED[name])
    assert "header:" in str(refused.value) or "body:" in str(refused.value)
    assert "emulator_base" not in str(refused.value) or "static assertion" in str(refused.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    build(ACCEPTED[name])


def test_there_are_enough() -> None:
    assert len(REFUSED) >= 75 and len(ACCEPTED) >= 20


def test_the_lint_names_file_and_line() -> None:
    text = '#include <metal_simdgroup>\n#line 7 "a.metal"\nint a;\nvoid f(float* x) {}\n'
    assert lint(text) == ["a.metal:8: parameter `float* x` of f has no address space"]
