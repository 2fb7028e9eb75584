// The warpgroup's matrix product of compute capability 9.0a. With ptx.cuh, the only asm in the tree.
#pragma once

#include "ptx.cuh"

namespace qrun {

// Operand b: rows of 64 16-bit elements at `p` in shared memory (a multiple of 1024 bytes), chunk c of 16
// bytes of row r at c ^ r % 8: the 128-byte swizzle. What lies i bytes further is wgmma_rows(p) + i / 16, an
// addition: uniform registers are slow to compute in, and the tensor cores would wait.
__device__ __forceinline__ unsigned long long wgmma_rows(const void* p) {
  constexpr unsigned long long swizzle = 1ull << 62, eight_rows = 64ull << 32, unused = 1ull << 16;
  return swizzle | eight_rows | unused | (shared_address(p) & 0x3ffff) >> 4;
}

// Registers that the tensor cores will read or write are ready.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All that was committed but the last `LEFT` is done.
template <int LEFT>
__device__ __forceinline__ void wgmma_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The same; what is done passes through, so that nothing reads it earlier.
template <int LEFT, int COUNT>
__device__ __forceinline__ void wgmma_wait_but(float (&d)[COUNT][4]) {
  wgmma_wait_but<LEFT>();
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// All that was committed is done.
template <int COUNT>
__device__ __forceinline__ void wgmma_wait(float (&d)[COUNT][4]) {
  wgmma_wait_but<0>(d);
}

#define QRUN_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define QRUN_D8(i) \
  QRUN_D(i), QRUN_D(i + 1), QRUN_D(i + 2), QRUN_D(i + 3), QRUN_D(i + 4), QRUN_D(i + 5), QRUN_D(i + 6), QRUN_D(i + 7)
#define QRUN_R32                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QRUN_R64                                                                                     \
  QRUN_R32                                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "    \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QRUN_R128                                                                                    \
  QRUN_R64                                                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "    \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QRUN_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)

// d (64, 8 * COUNT) = a (64, 16) @ b (16, 8 * COUNT) + (add ? d : 0), asynchronous. Warp i of the warpgroup holds rows
// 16i .. of a and d, as in mma(): d[j] is its columns 8j .. 8j+7. A row in shared memory is a column of b; for
// wgmma_along, which has 64 columns, it is one k of all of them.
#define QRUN_WGMMA(FUNCTION, ALONG, TYPE, NAME, COUNT, N, REGISTERS, OPERANDS, A0, A1, A2, A3, B, ADD)                 \
  __device__ __forceinline__ void FUNCTION(float (&d)[COUNT][4], const unsigned (&a)[4],                               \
                                        unsigned long long b, int add, TYPE) {                                         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; wgmma.mma_async.sync.aligned.m64n" N                      \
                 "k16.f32." NAME "." NAME " {" REGISTERS "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B                     \
                 ", p, 1, 1, " ALONG "; }"                                                                             \
                 : OPERANDS                                                                                            \
                 : QRUN_A                                                                                              \
                 : "memory");                                                                                          \
  }
#define QRUN_64 QRUN_D8(0)
#define QRUN_128 QRUN_D8(0), QRUN_D8(8)
QRUN_WGMMA(wgmma, "0", bf16, "bf16", 8, "64", QRUN_R32, QRUN_64, "%32", "%33", "%34", "%35", "%36", "%37")
QRUN_WGMMA(wgmma, "0", f16, "f16", 8, "64", QRUN_R32, QRUN_64, "%32", "%33", "%34", "%35", "%36", "%37")
QRUN_WGMMA(wgmma, "0", bf16, "bf16", 16, "128", QRUN_R64, QRUN_128, "%64", "%65", "%66", "%67", "%68", "%69")
QRUN_WGMMA(wgmma, "0", f16, "f16", 16, "128", QRUN_R64, QRUN_128, "%64", "%65", "%66", "%67", "%68", "%69")
QRUN_WGMMA(wgmma_along, "1", bf16, "bf16", 8, "64", QRUN_R32, QRUN_64, "%32", "%33", "%34", "%35", "%36", "%37")
QRUN_WGMMA(wgmma_along, "1", f16, "f16", 8, "64", QRUN_R32, QRUN_64, "%32", "%33", "%34", "%35", "%36", "%37")
#define QRUN_256 QRUN_128, QRUN_D8(16), QRUN_D8(24)
QRUN_WGMMA(wgmma, "0", bf16, "bf16", 32, "256", QRUN_R128, QRUN_256, "%128", "%129", "%130", "%131", "%132", "%133")
QRUN_WGMMA(wgmma, "0", f16, "f16", 32, "256", QRUN_R128, QRUN_256, "%128", "%129", "%130", "%131", "%132", "%133")
#define QRUN_32 QRUN_D(0), QRUN_D(1), QRUN_D(2), QRUN_D(3)
#define QRUN_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
QRUN_WGMMA(wgmma, "0", bf16, "bf16", 4, "32", QRUN_R16, QRUN_32, "%16", "%17", "%18", "%19", "%20", "%21")
QRUN_WGMMA(wgmma, "0", f16, "f16", 4, "32", QRUN_R16, QRUN_32, "%16", "%17", "%18", "%19", "%20", "%21")
#define QRUN_16 QRUN_D(0), QRUN_D(1)
#define QRUN_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
QRUN_WGMMA(wgmma, "0", bf16, "bf16", 2, "16", QRUN_R8, QRUN_16, "%8", "%9", "%10", "%11", "%12", "%13")
QRUN_WGMMA(wgmma, "0", f16, "f16", 2, "16", QRUN_R8, QRUN_16, "%8", "%9", "%10", "%11", "%12", "%13")
#undef QRUN_16
#undef QRUN_R8
#undef QRUN_256
#undef QRUN_R128
#undef QRUN_32
#undef QRUN_R16
#undef QRUN_D
#undef QRUN_D8
#undef QRUN_R32
#undef QRUN_R64
#undef QRUN_A
#undef QRUN_64
#undef QRUN_128
#undef QRUN_WGMMA

}  // namespace qrun
