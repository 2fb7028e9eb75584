// Which working memory a task gets: the smallest that will do, so that the 18 MB of a long prompt's
// digits do not become everybody's; of equal ones that which the thread had, whose lines its core
// still holds. Where none will do the largest grows.
#include "lease.h"

#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

namespace qrun {

struct Space {
  char* data = nullptr;
  size_t bytes = 0;
  const void* last = nullptr;  // the thread that had it
  bool taken = true;
};

namespace {

struct Spaces {
  std::mutex mutex;
  std::vector<Space*> all;
};

// Never destroyed: a stream's thread may still run when static objects go.
Spaces& spaces() {
  static Spaces& s = *new Spaces;
  return s;
}

const void* this_thread() {
  static thread_local const char self = 0;
  return &self;
}

bool better(const Space& a, const Space& b, size_t bytes) {
  const bool fits = a.bytes >= bytes;
  if (fits != (b.bytes >= bytes)) return fits;
  if (a.bytes != b.bytes) return fits == (a.bytes < b.bytes);
  return a.last == this_thread();
}

Space* take(size_t bytes) {
  Spaces& s = spaces();
  std::lock_guard lock(s.mutex);
  Space* best = nullptr;
  for (Space* space : s.all)
    if (!space->taken && (!best || better(*space, *best, bytes))) best = space;
  if (!best) {
    s.all.reserve(s.all.size() + 1);
    s.all.push_back(best = new Space);
  }
  best->taken = true;
  return best;
}

void give(Space* space) {
  std::lock_guard lock(spaces().mutex);
  space->last = this_thread();
  space->taken = false;
}

// Not from malloc, where what is freed would serve nobody else but this thread.
void grow(Space& space, size_t bytes) {
  if (space.bytes) munmap(space.data, space.bytes);
  space.bytes = 0;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  space.data = static_cast<char*>(memory);
  space.bytes = bytes;
}

}  // namespace

Lease::Lease(size_t bytes) {
  if (!bytes) return;
  space_ = take(bytes);
  try {
    if (space_->bytes < bytes) grow(*space_, bytes);
  } catch (...) {
    give(space_);
    throw;
  }
}

Lease::~Lease() {
  if (space_) give(space_);
}

char* Lease::data() const { return space_ ? space_->data : nullptr; }

}  // namespace qrun
