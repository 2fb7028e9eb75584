// Blocks that were freed wait for the next op that wants as much. Otherwise the system takes their
// pages back, and each page faults anew at its first touch: 100 KB a token of a prompt, a seventh
// of the whole time. The layers of a model want the same few sizes over and over.
#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

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
    // The last one freed first: its lines may still be in a cache.
    const auto at = std::find_if(blocks_.rbegin(), blocks_.rend(), [bytes](const Block& b) {
      return b.bytes >= bytes && b.bytes <= bytes + bytes / 8;
    });
    if (at == blocks_.rend()) return mem::Buffer(nullptr);
    const Block found = *at;
    blocks_.erase(std::next(at).base());
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
constexpr size_t kPage = 2 << 20, kChunk = 32 << 20;

mx::array large_pages(size_t bytes) {
  mx::array chunk(mem::malloc(bytes + kPage), {static_cast<int>(1)}, mx::uint8);
#if defined(__linux__)
  const auto begin = reinterpret_cast<uintptr_t>(chunk.data<char>());
  const uintptr_t first = (begin + kPage - 1) & ~(kPage - 1),
                  end = (begin + bytes + kPage) & ~(kPage - 1);
  // Without large pages it is as slow as it would be: nothing to report.
  if (end > first) (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return chunk;
}

struct Chunk {
  std::mutex mutex;
  std::optional<mx::array> memory;
  size_t used = 0;
};

Chunk& current() {
  static Chunk& chunk = *new Chunk;  // like waiting()
  return chunk;
}

}  // namespace

void settle(mx::array& out) {
  const auto view = [&out](const mx::array& memory, size_t offset) {
    out.copy_shared_buffer(memory, out.strides(), out.flags(), out.size(),
                           static_cast<int64_t>(offset / out.itemsize()));
  };
  if (out.nbytes() > kChunk / 2) {
    const mx::array own = large_pages(out.nbytes());
    return view(own, to_line(own.data<char>()));
  }
  Chunk& chunk = current();
  std::lock_guard lock(chunk.mutex);
  if (chunk.memory && chunk.memory->data_shared_ptr().use_count() == 1) chunk.used = 0;
  if (!chunk.memory || chunk.used + out.nbytes() > kChunk) {
    chunk.memory = large_pages(kChunk);
    chunk.used = 0;
  }
  const char* begin = chunk.memory->data<char>();
  chunk.used += to_line(begin + chunk.used);
  view(*chunk.memory, chunk.used);
  chunk.used += out.nbytes();
}

mem::Data block(size_t bytes) {
  if (bytes < kSmall || bytes > kLarge) return mem::malloc(bytes);
  mem::Buffer buffer = waiting().take(bytes);
  if (!buffer.ptr()) buffer = mem::allocator().malloc(bytes);
  const size_t all = mem::allocator().size(buffer);
  return mem::Data(buffer, [all](mem::Buffer b) { waiting().give(b, all); });
}

}  // namespace qrun
