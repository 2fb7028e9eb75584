// Blocks that were freed wait for the next op that wants as much. Otherwise the system takes their
// pages back, and each page faults anew at its first touch: 100 KB a token of a prompt, a seventh
// of the whole time. The layers of a model want the same few sizes over and over.
#include "memory.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace qrun {
namespace {

namespace mem = mlx::core::allocator;

constexpr size_t kSmall = 64 << 10;  // below, malloc itself keeps the pages
constexpr size_t kLarge = 32 << 20;  // above, time goes elsewhere
constexpr size_t kKeep = 32 << 20;   // in all

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

}  // namespace

mem::Data block(size_t bytes) {
  if (bytes < kSmall || bytes > kLarge) return mem::malloc(bytes);
  mem::Buffer buffer = waiting().take(bytes);
  if (!buffer.ptr()) buffer = mem::allocator().malloc(bytes);
  const size_t all = mem::allocator().size(buffer);
  return mem::Data(buffer, [all](mem::Buffer b) { waiting().give(b, all); });
}

}  // namespace qrun
