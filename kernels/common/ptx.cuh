// Every line of PTX that the kernels use, each behind one typed function, and the few intrinsics with a
// fixed meaning for a whole warp. Nothing else in the tree contains asm.
#pragma once

#include "types.cuh"

namespace qrun {

// The launch's dynamic shared memory; 16-byte aligned.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ uint4 qrun_shared[];
  return reinterpret_cast<char*>(qrun_shared);
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Programmatic dependent launch (compute capability 9.0): every kernel calls both once. From the first on,
// the kernel behind it in the stream may take the places that this one's blocks leave. From the second
// on, what the kernels before it wrote can be read, and written over; until then only constants may be
// touched (weights, scales). A kernel launched in the ordinary way passes both.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Threads of a block that wait for one another; id 0 is __syncthreads().
__device__ __forceinline__ void barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 16 or 8 bytes that nobody reads twice: they shall not push x out of L1.
// L2 fetches lines of 128 bytes: what is left out of one is wanted next.
__device__ __forceinline__ void load_stream(unsigned (&v)[4], const void* p) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(p));
}

__device__ __forceinline__ void load_stream(unsigned (&v)[2], const void* p) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p));
}

// One store, and no branch around it.
__device__ __forceinline__ void store_if(bool wanted, void* p, unsigned v) {
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %0, 0; @q st.global.u32 [%1], %2; }" ::"r"(int(wanted)), "l"(p), "r"(v)
               : "memory");
}

__device__ __forceinline__ void store_if(bool wanted, void* p, unsigned short v) {
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %0, 0; @q st.global.u16 [%1], %2; }" ::"r"(int(wanted)), "l"(p), "h"(v)
               : "memory");
}

// 2^v within two units of the last place; 0 below float32's normal numbers.
__device__ __forceinline__ float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// The line of memory there is wanted soon: into L2.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// d (16, 8) += a (16, 16) @ b (16, 8) in float32. Lane = 4 * g + t holds
//   a[0] row g, k 2t 2t+1    a[1] row g+8, same k    a[2] row g, k 2t+8 2t+9    a[3] row g+8, same k
//   b[0] k 2t 2t+1, column g     b[1] k 2t+8 2t+9, column g
//   d[0] d[1] row g, columns 2t 2t+1     d[2] d[3] row g+8
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                    bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                    f16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a * b + c on two 16-bit elements, rounded once; subnormals count.
__device__ __forceinline__ unsigned fma_pair(unsigned a, unsigned b, unsigned c, bf16) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ unsigned fma_pair(unsigned a, unsigned b, unsigned c, f16) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8i .. 8i+7 pass the addresses of the rows of matrix i
// (16 bytes each, in shared memory); lane 4 * g + t gets elements 2t, 2t+1 of row g of each.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, transposed: the lane gets elements g of rows 2t and 2t+1.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// 16 bytes to shared memory behind the program's back; zeros, and no read, where not `valid`.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// What this thread wrote to shared memory can be read by wgmma, once a barrier has told the others.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Returns when at most `LEFT` of this thread's committed groups are still under way.
template <int LEFT>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A barrier in shared memory, for compute capability 9.0: a phase is over after so many arrivals and, where
// they are expected, bytes of copies. Phases alternate; `parity` 0 is the first.
__device__ __forceinline__ void barrier_init(unsigned long long* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned long long* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Arrives, too.
__device__ __forceinline__ void barrier_expect(unsigned long long* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned long long* bar, int parity) {
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; "
      "bra WAIT; DONE: }" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// `bytes` to shared memory behind the program's back; all three are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, int bytes,
                                          unsigned long long* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(bar))
      : "memory");
}

// All threads of the blocks of a cluster (compute capability 9.0), in two halves: what each wrote before it
// arrived can be read by those who have waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// From this address of shared memory in the block of that rank in the cluster.
__device__ __forceinline__ float4 cluster_load(const float4* shared, int rank) {
  float4 v;
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(shared)), "r"(rank));
  return v;
}

// To this address of shared memory in the block of that rank in the cluster.
__device__ __forceinline__ void cluster_store(float* shared, int rank, float v) {
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; st.shared::cluster.f32 [at], %2; }" ::"r"(
          shared_address(shared)),
      "r"(rank), "f"(v)
      : "memory");
}

}  // namespace qrun
