// Blocks that were freed wait for the next op that wants as much. Otherwise the system takes their
// pages back, and each page faults anew at its first touch: 100 KB a token of a prompt, a seventh
// of the whole time. The layers of a model want the same few sizes over and over.
#include "memory.h"

#include <sys/mman.h>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <mutex>
#include <new>
#include <optional>

namespace qrun {
namespace {

namespace mx = mlx::core;
namespace mem = mx::allocator;

constexpr size_t kSmall = 64 << 10;  // below, malloc itself keeps the pages
constexpr size_t kLarge = 32 << 20;  // above, time goes elsewhere
constexpr size_t kKeep = 32 << 20;   // in all; half of it and half of the faults come back

class Waiting {
 public:
  mem::Buffer take(size_t bytes) {
    std::lock_guard lock(mutex_);
    // The smallest that will do (a prompt's last rows are fewer), of those the last one freed: its
    // lines may still be in a cache.
    auto at = blocks_.end();
    for (auto b = blocks_.begin(); b != blocks_.end(); ++b)
      if (b->bytes >= bytes && b->bytes <= 2 * bytes &&
          (at == blocks_.end() || b->bytes <= at->bytes))
        at = b;
    if (at == blocks_.end()) return mem::Buffer(nullptr);
    const Block found = *at;
    blocks_.erase(at);
    held_ -= found.bytes;
    return found.buffer;
  }

  void give(mem::Buffer buffer, size_t bytes) {
    std::lock_guard lock(mutex_);
    blocks_.push_back({buffer, bytes});
    held_ += bytes;
    for (; held_ > kKeep; blocks_.erase(blocks_.begin())) {  // the one that waited longest
      held_ -= blocks_.front().bytes;
      mem::allocator().free(blocks_.front().buffer);
    }
  }

 private:
  struct Block {
    mem::Buffer buffer;
    size_t bytes;
  };
  std::mutex mutex_;
  std::vector<Block> blocks_;
  size_t held_ = 0;
};

// Never destroyed: Python frees its last arrays after static objects are gone.
Waiting& waiting() {
  static Waiting& all = *new Waiting;
  return all;
}

// Weights pass through once a token, a page after the other: with pages of 4 KB a quarter of the
// time goes into looking up where they lie (more in a virtual machine). A layer's matrices are
// smaller than a large page, so they share chunks; a chunk goes when the last of them does.
constexpr size_t kPage = 2 << 20, kChunk = 32 << 20, kWorthPages = 16 << 20;

// The first large page of `bytes` + kPage of memory; the whole ones from there on are asked for.
// What is left of the last one lies in small pages, or all of it would be resident.
uintptr_t large_pages(const void* memory, size_t bytes) {
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) & ~(kPage - 1);
#if defined(__linux__)
  // Without large pages it is as slow as it would be: nothing to report.
  if (bytes >= kPage)
    (void)madvise(reinterpret_cast<void*>(begin), bytes & ~(kPage - 1), MADV_HUGEPAGE);
#endif
  return begin;
}

// A part of `memory`, which begins at `at`, becomes the array's own.
void place(mx::array& a, const mx::array& memory, uintptr_t at) {
  const auto data = reinterpret_cast<uintptr_t>(memory.data<char>());
  a.copy_shared_buffer(memory, a.strides(), a.flags(), a.size(),
                       static_cast<int64_t>((at - data) / a.itemsize()));
}

mx::array heap(size_t bytes) { return mx::array(mem::malloc(bytes), {1}, mx::uint8); }

struct Chunk {
  std::mutex mutex;
  std::optional<mx::array> memory;
  uintptr_t begin = 0;
  size_t used = 0;
};

Chunk& current() {
  static Chunk& chunk = *new Chunk;  // like waiting()
  return chunk;
}

}  // namespace

void settle(mx::array& out) {
  if (out.nbytes() > kChunk / 2) {
    const mx::array own = heap(out.nbytes() + kPage);
    return place(out, own, large_pages(own.data<char>(), out.nbytes()));
  }
  Chunk& chunk = current();
  std::lock_guard lock(chunk.mutex);
  if (chunk.memory && chunk.memory->data_shared_ptr().use_count() == 1) chunk.used = 0;
  if (!chunk.memory || chunk.used + out.nbytes() > kChunk) {
    chunk.memory = heap(kChunk + kPage);
    chunk.begin = large_pages(chunk.memory->data<char>(), kChunk);
    chunk.used = 0;
  }
  place(out, *chunk.memory, chunk.begin + chunk.used);
  chunk.used += in_lines(out.nbytes());
}

mx::array mapped(size_t bytes) {
  void* m = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m == MAP_FAILED) throw std::bad_alloc();
  *static_cast<size_t*>(m) = bytes - sizeof(size_t);
  return mx::array(mem::Data(mem::Buffer(m), [bytes](mem::Buffer b) { munmap(b.ptr(), bytes); }),
                   {1}, mx::uint8);
}

// All layers' caches in one piece: each is smaller than a large page. Small ones do without, so
// that what a short answer never fills stays out of memory.
std::vector<mx::array> blank(const std::vector<mx::Shape>& shapes, mx::Dtype dtype) {
  std::vector<mx::array> out;
  size_t bytes = 0;
  for (const mx::Shape& shape : shapes) {
    out.emplace_back(shape, dtype, nullptr, std::vector<mx::array>{});
    bytes += in_lines(out.back().nbytes());
  }
  const mx::array memory = mapped(bytes + 2 * kPage);
  const char* data = memory.data<char>();
  uintptr_t at = large_pages(data, bytes < kWorthPages ? 0 : bytes);
  for (mx::array& a : out) {
    place(a, memory, at);
    a.set_status(mx::array::Status::available);
    at += in_lines(a.nbytes());
  }
  return out;
}

void trim() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

mem::Data block(size_t bytes) {
  if (bytes < kSmall || bytes > kLarge) return mem::malloc(bytes);
  mem::Buffer buffer = waiting().take(bytes);
  if (!buffer.ptr()) buffer = mem::allocator().malloc(bytes);
  const size_t all = mem::allocator().size(buffer);
  return mem::Data(buffer, [all](mem::Buffer b) { waiting().give(b, all); });
}

}  // namespace qrun
