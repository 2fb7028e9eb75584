// Working memory for the length of a task. No MLX and no std: the kernels use it too (types.h).
#pragma once

#include <stddef.h>

namespace qrun {

// With whatever was in it; begins with a page. Given back at the end, so that there are as many as
// were ever in use at once. A thread_local one would stay for every thread that ever was: MLX keeps
// one for each stream, and each Python thread has a stream of its own.
class Lease {
 public:
  explicit Lease(size_t bytes);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  char* data() const;  // null where no bytes were asked for

 private:
  struct Space* space_ = nullptr;
};

}  // namespace qrun
