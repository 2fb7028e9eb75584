// Each part is valid Metal that must compile with a clean lint. See test_refused.py.

//// every qualifier
float f(const device float* a, threadgroup float* b, constant float* c,
        thread float& d, const thread float* e) { return a[0] + b[0] + c[0] + d + e[0]; }

//// products are no pointers
float f(float a, float b) { float c = a * b; c = c * a; return uint(a) & 1 ? 0 : c; }

//// templates and partial specialisation
template <typename T, int N> struct S { T v[N]; };
template <typename T> struct S<T, 1> { T v; };
float f(S<float, 1> s, S<float, 3> t) { return s.v + t.v[2]; }

//// qualified members
struct S {
  float x;
  S(float x_) : x(x_) {}
  S(float a, float b) thread : x(a + b) {}
  float get() const thread { return x; }
  float get() const device { return x; }
  float operator()(float a) const thread { return x + a; }
  static float one() { return 1; }
};
float f(const device S* s, float a) { S t(a, a); return t.get() + s->get() + t(a) + S::one(); }

//// struct copies from device memory
struct S { float a; uchar b[4]; };
float f(const device S* s, device S* d) { S t = s[1]; d[0] = t; return t.a; }

//// program-scope constants
constant float table[2] = {1, 2};
constexpr constant int N = 2;
static constant constexpr const int M = 3;
float f(int i) { return table[i % N] + M; }

//// pragma unroll
float f(const thread float* x) {
  float s = 0;
  _Pragma("clang loop unroll(full)")
  for (int i = 0; i < 4; ++i) s += x[i];
#pragma clang loop unroll(full)
  for (int i = 0; i < 4; ++i) s += x[i];
  return s; }

//// vectors
float4 f(half4 h, float2 a, uint2 u) {
  float4 v = float4(a, 0.0f, 1.0f) + float4(h);
  v.xy = a.yx * 2; v[3] += float(u.x);
  vec<float, 4> w = vec<float, 4>(v.xy, a);
  return select(v, w, v > w) + float4(1) + static_cast<float4>(h); }

//// aliases of vectors
template <typename T> struct S {
  using V = vec<T, 2>;
  static V f(T a) { return V(a, T(0)); }
};
float2 f(float a) { return S<float>::f(a); }

//// halves and bfloats
half f(half a, bfloat b) {
  bfloat c = b * b + bfloat(a);
  half d = a * 2.0h;
  return d + half(c) + half(as_type<half>(ushort(3))); }

//// math
float f(float x, half h) {
  float y = exp(x) + log2(x) + rsqrt(x) + metal::tanh(x);
  y += precise::sqrt(x) + fast::exp(x) + fma(x, x, x) + clamp(x, 0.0f, 1.0f);
  return y + float(max(h, half(0))) + pow(x, 2.0f) + fabs(x) + (isnan(x) ? 1 : 0); }

//// type traits
template <typename T> constexpr bool wide() { return sizeof(T) > 2; }
template <typename T, typename U = conditional_t<is_same_v<T, half>, float, T>>
U f(T x) { if constexpr (is_same_v<T, float>) return x; else return U(x) + 1; }
float g(half h) { return f(h) + f(1.0f) + (wide<float>() ? 1 : 0); }

//// collectives
#include <metal_simdgroup>
#include <metal_quadgroup>
float f(float x, uint l) {
  x = simd_sum(x) + simd_max(x) + simd_shuffle_down(x, 2) + simd_shuffle_xor(x, ushort(1));
  x += simd_broadcast(x, 3) + quad_sum(x) + simd_prefix_exclusive_sum(x);
  return simd_any(x > 0) && simd_all(x < 1) ? x : float(simd_min(l)); }

//// fragments
#include <metal_simdgroup_matrix>
template <typename T> void f(const threadgroup T* a, device float* d) {
  simdgroup_matrix<T, 8, 8> A;
  simdgroup_float8x8 C = make_filled_simdgroup_matrix<float, 8, 8>(0);
  simdgroup_load(A, a, 16, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(C, A, A, C);
  simdgroup_multiply(C, A, A);
  thread auto& e = C.thread_elements();
  e[0] = e[0] * 2;
  reinterpret_cast<thread float2&>(C.thread_elements()) = float2(1, 2);
  simdgroup_store(C, d, 8); }
template void f<half>(const threadgroup half*, device float*);
template void f<float>(const threadgroup float*, device float*);

//// atomics
void f(device atomic<uint>* a, threadgroup atomic_int* b, device atomic_float* c) {
  atomic_fetch_add_explicit(a, 1u, memory_order_relaxed);
  atomic_store_explicit(b, 2, memory_order_relaxed);
  atomic_fetch_add_explicit(c, 1.5f, memory_order_relaxed); }

//// reinterpreted words
float f(const device uint* w, const device uchar* b) {
  const device uint16_t* h = (const device uint16_t*)w;
  const device uint8_t* p = reinterpret_cast<const device uint8_t*>(w);
  return float(h[1] & 0x0f0f) + float(p[0] >> 4) + float(b[0]); }

//// overloads are no recursion
float f(float2 a) { return a.x; }
float f(float a) { return a; }
float g(float a) { return f(a) + f(float2(a, a)); }

//// body: threadgroup memory
threadgroup float a[2][16 * (2 + 1)], b;
threadgroup half c[(16 > 2 ? 4 : 2)];
if (thread_index_in_threadgroup == 0) { a[1][3] = 1; b = 2; c[3] = 3; }
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
out[0] = a[1][3] + b + float(c[3]) + x[0];

//// words of OpenCL that are free in Metal
float f(float global, float local) { float generic = global; return generic + local; }

//// strings and comments
// goto std::max float* p double
/* new "double" */
float f(float x) { return x; } // f(float* x)
