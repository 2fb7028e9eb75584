// Threads that stay hot between the ops of a token and sleep between tokens.
//
// A job is published by writing its fields and then a new epoch into `state`. A worker enters by
// counting itself in, takes steps until none is left, and counts itself out. The caller works too,
// then closes the door and waits only for those inside: a worker that was asleep costs nothing, it
// finds the door closed.
//
// Each thread has a share of the items, side by side, and takes its steps in order, a third of what
// is left at a time: what a kernel asks memory for ahead of the end is its own next step, and no
// load passes the locked instruction that takes one. Who has done his share takes the back half of
// what another still has.
//
//   state   epoch (high bits) | closed | workers inside (16 bits)
//
// Idle workers spin for about 150 us, yielding now and then to whatever else wants the core (the
// Python thread that prepares the next step), then sleep on the epoch.
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#elif defined(__APPLE__)
#include <pthread.h>
#endif

namespace qrun {
namespace {

constexpr auto kSpin = std::chrono::microseconds(150);
constexpr uint64_t kInside = 0xffff, kClosed = 0x10000, kEpoch = 0x20000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int workers) : shares_(workers + 1) {
    for (int i = 1; i <= workers; i++) threads_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

  void run(int items, int step, Task task, const void* context) {
    items_ = items;
    step_ = step;
    task_ = task;
    context_ = context;
    const int64_t steps = (items + step - 1) / step, all = static_cast<int64_t>(shares_.size());
    for (int64_t i = 0; i < all; i++)
      shares_[i].left.store(pair(steps * i / all, steps * (i + 1) / all),
                            std::memory_order_relaxed);
    const uint64_t epoch = (state_.load(std::memory_order_relaxed) & ~(kEpoch - 1)) + kEpoch;
    state_.store(epoch, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      wake_.fetch_add(1);
      wake_.notify_all();
    }
    take(0);
    state_.fetch_or(kClosed, std::memory_order_acq_rel);
    while (state_.load(std::memory_order_acquire) & kInside) pause();
  }

 private:
  // Steps first .. end-1 in one word, so that a step is taken, or half of them, at once.
  static uint64_t pair(uint64_t first, uint64_t end) { return end << 32 | first; }

  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  void take(size_t own) {
    std::atomic<uint64_t>& left = shares_[own].left;
    do {
      for (uint64_t now = left.load(std::memory_order_relaxed); (uint32_t)now < now >> 32;) {
        const int first = (int)(uint32_t)now, some = std::max(1, ((int)(now >> 32) - first) / 3);
        if (!left.compare_exchange_weak(now, now + some, std::memory_order_relaxed)) continue;
        task_(context_, first * step_, std::min((first + some) * step_, items_));
        now = left.load(std::memory_order_relaxed);
      }
    } while (take_over(left, own));
  }

  // The back half of the steps of the next one who has any becomes `left`.
  bool take_over(std::atomic<uint64_t>& left, size_t own) {
    for (size_t i = 1; i < shares_.size(); i++) {
      std::atomic<uint64_t>& other = shares_[(own + i) % shares_.size()].left;
      for (uint64_t now = other.load(std::memory_order_relaxed); (uint32_t)now < now >> 32;) {
        const uint64_t first = (uint32_t)now, end = now >> 32, middle = first + (end - first) / 2;
        if (!other.compare_exchange_weak(now, pair(first, middle), std::memory_order_relaxed))
          continue;
        left.store(pair(middle, end), std::memory_order_relaxed);
        return true;
      }
    }
    return false;
  }

  bool enter(uint64_t seen) {
    return !(seen & kClosed) &&
           state_.compare_exchange_strong(seen, seen + 1, std::memory_order_acq_rel);
  }

  void work(size_t own) {
    uint64_t done = 0;  // the last epoch this worker has had its share of
    while (!stop_.load(std::memory_order_relaxed)) {
      const auto since = std::chrono::steady_clock::now();
      for (int spins = 0;; spins++) {
        const uint64_t seen = state_.load(std::memory_order_acquire);
        if (seen / kEpoch != done && !(seen & kClosed)) {
          if (!enter(seen)) continue;
          done = seen / kEpoch;
          take(own);
          state_.fetch_sub(1, std::memory_order_acq_rel);
          break;
        }
        pause();
        if (spins % 64 == 63) {
          if (std::chrono::steady_clock::now() - since > kSpin) {
            sleep(done);
            break;
          }
          std::this_thread::yield();
        }
      }
    }
  }

  void sleep(uint64_t done) {
    const uint32_t ticket = wake_.load();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = state_.load(std::memory_order_seq_cst);
    const bool news = seen / kEpoch != done && !(seen & kClosed);
    if (!news && !stop_.load()) wake_.wait(ticket);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  int items_ = 0, step_ = 1;
  Task task_ = nullptr;
  const void* context_ = nullptr;
  std::vector<Share> shares_;
  alignas(64) std::atomic<uint64_t> state_{kClosed};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// Whole processors that a cgroup grants, or 0 for no limit.
int cgroup_limit() {
  long long quota = 0, period = 0;
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(f, "%lld %lld", &quota, &period) != 2) quota = 0;  // "max": no limit
    std::fclose(f);
  } else {
    auto number = [](const char* path) {
      long long n = 0;
      if (FILE* g = std::fopen(path, "r")) {
        if (std::fscanf(g, "%lld", &n) != 1) n = 0;
        std::fclose(g);
      }
      return n;
    };
    quota = number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    period = number("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  }
  return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

int default_threads() {
  if (const char* text = std::getenv("QRUN_NUM_THREADS"); text && *text) {
    char* end;
    const long n = std::strtol(text, &end, 10);
    if (*end || n < 1 || n > 1024)
      throw std::invalid_argument("QRUN_NUM_THREADS=" + std::string(text) +
                                  ": must be a number from 1 to 1024");
    return (int)n;
  }
  int n = (int)std::thread::hardware_concurrency();
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
  if (int limit = cgroup_limit()) n = std::min(n, limit);
  return std::max(n, 1);
}

struct Shared {
  std::mutex mutex;
  std::unique_ptr<Pool> pool;
  int count = 0;  // threads, the caller included; 0: not yet asked
};

Shared& shared() {
  static Shared s;
#if !defined(_WIN32)
  // A forked child has none of the threads: forget them (a join would wait forever) and start anew.
  static const int once = pthread_atfork(nullptr, nullptr, [] {
    Shared& child = shared();
    (void)child.pool.release();
    new (&child.mutex) std::mutex;
  });
  (void)once;
#endif
  return s;
}

int count_locked(Shared& s) {
  if (!s.count) s.count = default_threads();
  return s.count;
}

}  // namespace

void run_parallel(int items, int step, Task task, const void* context) {
  Shared& s = shared();
  std::unique_lock lock(s.mutex, std::try_to_lock);
  // Too little to share, or another stream has the pool: the caller does it alone.
  if (items <= step || !lock || count_locked(s) == 1) return task(context, 0, items);
  if (!s.pool) s.pool = std::make_unique<Pool>(s.count - 1);
  s.pool->run(items, step, task, context);
}

int threads() {
  Shared& s = shared();
  std::lock_guard lock(s.mutex);
  return count_locked(s);
}

void set_threads(int n) {
  if (n < 0 || n > 1024) throw std::invalid_argument("threads must be 0 to 1024");
  Shared& s = shared();
  std::lock_guard lock(s.mutex);
  const int wanted = n ? n : default_threads();
  if (wanted != s.count) s.pool.reset();
  s.count = wanted;
}

}  // namespace qrun
