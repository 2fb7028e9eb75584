// The ceilings of this machine, and memory that ends where reading must end.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "op.h"
#include "pool.h"

namespace qrun {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Pages {
  char* p;
  size_t bytes;
  explicit Pages(size_t n) : bytes(n) {
    void* m = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED) throw std::bad_alloc();
    p = static_cast<char*>(m);
#if defined(__linux__)  // as the weights have them (memory.cpp)
    (void)madvise(m, n, MADV_HUGEPAGE);
#endif
  }
  ~Pages() { munmap(p, bytes); }
  Pages(const Pages&) = delete;
};

}  // namespace

// GB/s of one pass over `bytes` of memory, dealt out as a product deals out its blocks. The memory
// stays allocated between calls, so that repeated calls measure reading and not page faults.
double read_bandwidth(size_t bytes, int use) {
  static std::unique_ptr<Pages> pages;
  if (!pages || pages->bytes < bytes) {
    pages.reset();
    pages = std::make_unique<Pages>(bytes);
    std::memset(pages->p, 1, bytes);
  }
  constexpr size_t step = 256 << 10;
  const int steps = static_cast<int>(bytes / step);
  require(steps >= 1, "read_bandwidth: at least 256 KB");
  const auto pass = [&](int i0, int i1) {
    for (int i = i0; i < i1; i++) kernels().read(pages->p + i * step, step);
  };
  const double start = seconds();
  if (use == 1)
    pass(0, steps);
  else
    parallel(steps, 1, pass);
  return steps * step / (seconds() - start) / 1e9;
}

// GOP/s of all threads together (they may share a core), or of one; multiply and add counted as
// two. kind: "f32", "int8", or "unit" for the matrix unit, 0 where there is none.
double peak_flops(const std::string& kind, int use) {
  require(kind == "f32" || kind == "int8" || kind == "unit",
          "peak_flops: kind must be f32, int8 or unit");
  const int number = kind == "f32" ? 0 : kind == "int8" ? 1 : 2;
  double best = 0;
  for (int i = 0; i < 5; i++) {
    std::vector<double> operations(use == 1 ? 1 : threads());
    const auto pass = [&](int i0, int i1) {
      for (int t = i0; t < i1; t++) operations[t] = kernels().peak(number, 200000);
    };
    const double start = seconds();
    if (use == 1)
      pass(0, 1);
    else
      parallel(threads(), 1, pass);
    const double all = std::accumulate(operations.begin(), operations.end(), 0.0);
    best = std::max(best, all / (seconds() - start) / 1e9);
  }
  return best;
}

// A copy whose last byte is the last byte before an unreadable page: a read past the end faults.
mx::array guarded(const mx::array& a) {
  mx::array x = a;
  x.eval();
  x.wait();
  require(x.flags().row_contiguous, "guarded: the array must be row contiguous");
  const size_t page = sysconf(_SC_PAGESIZE), bytes = x.nbytes();
  const size_t body = page + (bytes + page - 1) / page * page;  // one in front for MLX's own word
  const mx::array whole = mapped(body + page);
  char* base = static_cast<char*>(whole.buffer().ptr());
  if (mprotect(base + body, page, PROT_NONE) != 0) throw std::bad_alloc();
  char* start = base + body - bytes;
  std::memcpy(start, x.data<char>(), bytes);
  mx::array out(x.shape(), x.dtype(), nullptr, {});
  out.copy_shared_buffer(whole, x.strides(), x.flags(), x.size(),
                         (start - whole.data<char>()) / static_cast<int64_t>(x.itemsize()));
  out.set_status(mx::array::Status::available);
  return out;
}

}  // namespace qrun
