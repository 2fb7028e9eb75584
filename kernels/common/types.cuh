// The element types, and their ways to and from float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace qrun {

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(f16 v) { return __half2float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ f16 from_float<f16>(float v) { return __float2half_rn(v); }

// Two 16-bit elements in one register; a in the low half.
template <typename T>
__device__ __forceinline__ unsigned pack(float a, float b);
template <>
__device__ __forceinline__ unsigned pack<bf16>(float a, float b) {
  return static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(b))) << 16 |
         __bfloat16_as_ushort(__float2bfloat16_rn(a));
}
template <>
__device__ __forceinline__ unsigned pack<f16>(float a, float b) {
  return static_cast<unsigned>(__half_as_ushort(__float2half_rn(b))) << 16 |
         __half_as_ushort(__float2half_rn(a));
}

__device__ __forceinline__ unsigned twice(bf16 v) { return __byte_perm(__bfloat16_as_ushort(v), 0, 0x1010); }
__device__ __forceinline__ unsigned twice(f16 v) { return __byte_perm(__half_as_ushort(v), 0, 0x1010); }

template <typename T>
__device__ __forceinline__ float2 unpack(unsigned v);
template <>
__device__ __forceinline__ float2 unpack<bf16>(unsigned v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<f16>(unsigned v) {
  return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(v & 0xffffu))),
                     __half2float(__ushort_as_half(static_cast<unsigned short>(v >> 16))));
}

// One of the two elements in a register.
template <typename T>
__device__ __forceinline__ float half_of(unsigned v, int which);
template <>
__device__ __forceinline__ float half_of<bf16>(unsigned v, int which) {
  return __uint_as_float(__byte_perm(v, 0, which ? 0x3244 : 0x1044));
}
template <>
__device__ __forceinline__ float half_of<f16>(unsigned v, int which) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(__byte_perm(v, 0, which ? 0x4432 : 0x4410))));
}

// COUNT elements from an address that is a multiple of their size in all (at most 16 bytes a load).
template <int COUNT, typename T>
__device__ __forceinline__ void load(float (&v)[COUNT], const T* p) {
  constexpr int BYTES = COUNT * static_cast<int>(sizeof(T));
  if constexpr (sizeof(T) == 2 && COUNT == 8) {
    const uint4 r = *reinterpret_cast<const uint4*>(p);
    const float2 a = unpack<T>(r.x), b = unpack<T>(r.y), c = unpack<T>(r.z), d = unpack<T>(r.w);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y, v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
  } else if constexpr (sizeof(T) == 4 && BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const float4 r = *reinterpret_cast<const float4*>(p + i);
      v[i] = r.x, v[i + 1] = r.y, v[i + 2] = r.z, v[i + 3] = r.w;
    }
  } else if constexpr (sizeof(T) == 2 && COUNT % 2 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      const float2 r = unpack<T>(*reinterpret_cast<const unsigned*>(p + i));
      v[i] = r.x, v[i + 1] = r.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = to_float(p[i]);
  }
}

// The same in the other direction; each value is rounded once.
template <int COUNT, typename T>
__device__ __forceinline__ void store(T* p, const float (&v)[COUNT]) {
  if constexpr (sizeof(T) == 2 && COUNT == 8) {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]),
                                              pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
  } else if constexpr (sizeof(T) == 4 && COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
      *reinterpret_cast<float4*>(p + i) = make_float4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) p[i] = from_float<T>(v[i]);
  }
}

}  // namespace qrun
