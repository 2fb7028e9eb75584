// The timing half of scripts/bench_cuda.py: buffers, CUDA graphs, a float64 check. Every generated case is
// a translation unit that includes this and registers itself.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

struct Shape {
  int at[10];
  __host__ __device__ int operator[](int i) const { return at[i]; }
};

// Named device buffers; the rotating ones exist `copies` times, so that no launch finds its weights in L2.
struct Buffers {
  std::map<std::string, char*> base;
  std::map<std::string, size_t> stride;
  int copy = 0;
  template <typename T>
  T* get(const char* name) const {
    return reinterpret_cast<T*>(base.at(name) + (stride.count(name) ? stride.at(name) * copy : 0));
  }
};

struct Array {
  const char* name;
  size_t bytes;
  char kind;      // b bf16 normal, s bf16 scales, u random bits, i an int32 (value), 0 scratch
  bool rotating;
  int value;
};

struct Case {
  std::string label, group;  // cases of one group are alternatives for the same work
  std::vector<Array> arrays;
  std::function<void(const Buffers&, cudaStream_t)> launch;
  double bytes, flops;
  int m, n, k, g;  // of a product, to be checked; 0: none
};

// Whether a kernel may start before the one in front of it has ended, as in a replayed decode step.
inline bool early = false;

template <typename... P, typename... A>
void launch(void (*kernel)(P...), dim3 grid, int threads, int shared, cudaStream_t stream, A... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = early;
  if (cudaLaunchKernelEx(&config, kernel, P(arguments)...) != cudaSuccess) printf("launch failed\n");
}

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  explicit Register(Case c) { cases().push_back(std::move(c)); }
};
