// Runs the cases that were linked in: checks products against float64, times graphs, prints a table.
// ./bench TEXT: those whose group contains it. ./bench TEXT once: each a single time, nothing timed.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "bench_cuda.cuh"

#define CHECK(e)                                                                           \
  do {                                                                                     \
    cudaError_t r = (e);                                                                   \
    if (r != cudaSuccess) {                                                                \
      printf("%s: %s\n", #e, cudaGetErrorString(r));                                       \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)

__device__ unsigned mix(unsigned v) {
  v ^= v >> 16, v *= 0x7feb352du, v ^= v >> 15, v *= 0x846ca68bu;
  return v ^ v >> 16;
}

__global__ void fill(void* p, size_t count, char kind, unsigned seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    const unsigned r = mix(unsigned(i) * 2654435761u + seed + unsigned(i >> 32));
    const float u = (r & 0xffff) / 65536.f, v = (r >> 16) / 65536.f;
    const float normal = sqrtf(-2 * logf(u + 1e-5f)) * cospif(2 * v);
    if (kind == 'u') static_cast<unsigned*>(p)[i] = r;
    if (kind == 'b') static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(normal);
    if (kind == 's') static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(normal * 0.01f);
  }
}

// Row `m` of x times every row of w, in float64.
__global__ void reference(const __nv_bfloat16* x, const unsigned* w, const __nv_bfloat16* s,
                          const __nv_bfloat16* b, double* y, int m, int n, int k, int g) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= n) return;
  double sum = 0;
  for (int i = 0; i < k; i++) {
    const unsigned q = w[size_t(row) * (k / 8) + i / 8] >> i % 8 * 4 & 15;
    const size_t at = size_t(row) * (k / g) + i / g;
    sum += (double(__bfloat162float(s[at])) * q + double(__bfloat162float(b[at]))) *
           double(__bfloat162float(x[size_t(m) * k + i]));
  }
  y[row] = sum;
}

static std::map<std::string, char*> pool;  // by name, grown: allocation is slow
static std::map<std::string, size_t> pool_size;

static Buffers buffers(const Case& c, int copies) {
  Buffers b;
  for (const Array& a : c.arrays) {
    const size_t stride = (a.bytes + 255) / 256 * 256, all = a.rotating ? stride * copies : stride;
    if (pool_size[a.name] < all) {
      if (pool_size[a.name]) CHECK(cudaFree(pool[a.name]));
      CHECK(cudaMalloc(&pool[a.name], all));
      pool_size[a.name] = all;
    }
    b.base[a.name] = pool[a.name];
    if (a.rotating) b.stride[a.name] = stride;
    if (a.kind == 'i') {
      CHECK(cudaMemcpy(pool[a.name], &a.value, 4, cudaMemcpyHostToDevice));
    } else if (a.kind) {
      fill<<<2048, 256>>>(pool[a.name], all / (a.kind == 'u' ? 4 : 2), a.kind, unsigned(a.name[0]) * 77);
    } else {
      CHECK(cudaMemset(pool[a.name], 0xff, all));
    }
  }
  return b;
}

// The largest error of a product over the largest result, or -1.
static double check(const Case& c, Buffers& b, cudaStream_t stream) {
  if (!c.m) return -1;
  b.copy = 0;
  c.launch(b, stream);
  CHECK(cudaStreamSynchronize(stream));
  static double* ref = nullptr;
  if (!ref) CHECK(cudaMalloc(&ref, 8 << 20));
  double worst = 0, most = 0;
  std::vector<double> want(c.n);
  std::vector<__nv_bfloat16> got(c.n);
  for (int m : {0, c.m / 3, c.m - 1}) {
    reference<<<(c.n + 127) / 128, 128, 0, stream>>>(
        b.get<__nv_bfloat16>("x"), b.get<unsigned>("w"), b.get<__nv_bfloat16>("scales"),
        b.get<__nv_bfloat16>("biases"), ref, m, c.n, c.k, c.g);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(want.data(), ref, c.n * 8, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), b.get<__nv_bfloat16>("y") + size_t(m) * c.n, c.n * 2, cudaMemcpyDeviceToHost));
    for (int i = 0; i < c.n; i++) {
      const double e = std::fabs(__bfloat162float(got[i]) - want[i]);
      if (std::isnan(e)) return e;
      worst = std::max(worst, e);
      most = std::max(most, std::fabs(want[i]));
    }
  }
  return worst / most;
}

static float time_us(const Case& c, Buffers& b, int copies, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  const double guess = std::max(c.bytes / 3e12, c.flops / 3e14) * 1e6 + 3;
  const int launches = std::max(10, std::min(200, int(4000 / guess)));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < launches; i++) {
    b.copy = i % copies;
    c.launch(b, stream);
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t from, to;
  CHECK(cudaEventCreate(&from));
  CHECK(cudaEventCreate(&to));
  std::vector<float> times;
  for (int i = 0; i < 6; i++) {
    CHECK(cudaEventRecord(from, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(to, stream));
    CHECK(cudaEventSynchronize(to));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, from, to));
    if (i) times.push_back(ms * 1000 / launches);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

int main(int argc, char** argv) {
  std::stable_sort(cases().begin(), cases().end(),
                   [](const Case& a, const Case& b) { return a.group < b.group; });
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  std::map<std::string, std::pair<float, std::string>> best;
  std::vector<std::string> order;
  int bad = 0;
  for (const Case& c : cases()) {
    if (argc > 1 && c.group.find(argv[1]) == std::string::npos) continue;
    size_t rotating = 0;
    for (const Array& a : c.arrays)
      if (a.rotating) rotating += a.bytes;
    const int copies = rotating ? std::max(2, std::min(300, int((size_t(320) << 20) / rotating) + 1)) : 1;
    Buffers b = buffers(c, copies);
    CHECK(cudaDeviceSynchronize());
    const double error = check(c, b, stream);
    if (argc > 2) {
      if (!c.m) c.launch(b, stream);
      CHECK(cudaStreamSynchronize(stream));
      printf("%-28s %s  error %8.1e\n", c.group.c_str(), c.label.c_str(), error);
      continue;
    }
    early = false;
    const float alone = time_us(c, b, copies, stream);
    early = true;
    const float us = time_us(c, b, copies, stream);
    CHECK(cudaGetLastError());
    const bool wrong = c.m && !(error < 5e-3);
    bad += wrong;
    printf("%-28s %-34s %9.2f us, chained %9.2f us %7.2f TB/s %7.1f TFLOP/s  error %8.1e%s\n",
           c.group.c_str(), c.label.c_str(), alone, us, c.bytes / us * 1e-6, c.flops / us * 1e-6, error, wrong ? " WRONG" : "");
    fflush(stdout);
    if (!best.count(c.group)) order.push_back(c.group);
    if (!wrong && (!best.count(c.group) || us < best[c.group].first)) best[c.group] = {us, c.label};
  }
  printf("\nbest of each, %d wrong\n", bad);
  for (const std::string& g : order)
    printf("%-28s %9.2f us chained  %s\n", g.c_str(), best[g].first, best[g].second.c_str());
  return bad != 0;
}
