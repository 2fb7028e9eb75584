// The threads that share a kernel's work with the caller. See pool.cpp.
#pragma once

#include <cstddef>

namespace qrun {

using Task = void (*)(const void* context, int begin, int end);

// Runs task over 0..items in steps of `step`, on the caller and on the pool's threads; returns when
// all is done. Which thread takes which step is left open: results must not depend on it.
void run_parallel(int items, int step, Task task, const void* context);

template <class F>
void parallel(int items, int step, const F& f) {
  run_parallel(
      items, step, [](const void* c, int begin, int end) { (*(const F*)c)(begin, end); }, &f);
}

int threads();
void set_threads(int n);  // 0: QRUN_NUM_THREADS, or the processors this process may use

}  // namespace qrun
