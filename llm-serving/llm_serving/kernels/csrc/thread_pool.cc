#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "floating_mode.h"

namespace llm {
namespace {

// Longer than the gap between two operators of a step, shorter than anything a waiting process would notice.
constexpr std::chrono::microseconds kSpin{100};
constexpr uint32_t kOpen = 1u << 31;
constexpr size_t kMaxThreads = 1024;

thread_local bool inside_loop = false;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

size_t default_threads() {
  if (const char* value = std::getenv("LLM_SERVING_THREADS")) {
    const long count = std::strtol(value, nullptr, 10);
    if (count > 0) return static_cast<size_t>(count);
  }
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return static_cast<size_t>(CPU_COUNT(&allowed));
  return 1;
}

// Each thread processes the items of its own share in order, for locality, and then takes over half of another thread's
// share. Workers enter a loop while it is open; the caller leaves when it is closed and no worker is inside, so a
// worker that is slow to wake delays no other.
class Pool {
 public:
  explicit Pool(size_t threads) { resize(threads); }

  size_t threads() const { return limit_.load(std::memory_order_relaxed); }

  void resize(size_t threads) {
    const std::lock_guard<std::mutex> lock(owner_);
    threads = std::min(threads, kMaxThreads);
    if (threads > shares_.size()) shares_ = std::vector<Share>(threads);
    while (started_ + 1 < threads && start(started_ + 1)) started_++;
    limit_.store(std::min(threads, started_ + 1), std::memory_order_relaxed);
  }

  void run(size_t count, void (*body)(void*, size_t), void* context) {
    std::unique_lock<std::mutex> lock(owner_, std::defer_lock);
    if (count <= 1 || threads() <= 1 || inside_loop || !lock.try_lock()) {
      for (size_t i = 0; i < count; i++) body(context, i);
      return;
    }
    body_ = body;
    context_ = context;
    const size_t sharers = threads();
    for (size_t id = 0; id < shares_.size(); id++) {
      // A loop that failed may have left items, also in shares that this loop does not use.
      const size_t first = count * std::min(id, sharers) / sharers, last = count * std::min(id + 1, sharers) / sharers;
      shares_[id].left.store(range(first, last), std::memory_order_relaxed);
    }
    state_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
    take_items(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; state_.load(std::memory_order_acquire) != 0; relax()) {
      if (++spins % 4096 == 0) sched_yield();
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  // The remaining items of a thread in one word: from `first` to before `last`.
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };
  static uint64_t range(uint64_t first, uint64_t last) { return first | last << 32; }
  static uint64_t first(uint64_t left) { return left & UINT32_MAX; }
  static uint64_t last(uint64_t left) { return left >> 32; }

  // Returns false if the system cannot create a further thread.
  bool start(size_t id) {
    try {
      std::thread([this, id] { work(id); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  void take_items(size_t id) {
    inside_loop = true;
    try {
      for (uint64_t item; take(id, item);) body_(context_, item);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing_);
      failure_ = std::current_exception();
    }
    inside_loop = false;
  }

  bool take(size_t id, uint64_t& item) {
    do {
      uint64_t left = shares_[id].left.load(std::memory_order_relaxed);
      while (first(left) < last(left)) {
        if (!shares_[id].left.compare_exchange_weak(left, left + 1, std::memory_order_relaxed)) continue;
        item = first(left);
        return true;
      }
    } while (take_over(id));
    return false;
  }

  // Moves the second half of the largest remaining share to this thread, whose share is empty.
  bool take_over(size_t id) {
    for (;;) {
      std::atomic<uint64_t>* longest = nullptr;
      uint64_t left = 0;
      for (size_t other = 0; other < threads(); other++) {
        const uint64_t its = shares_[other].left.load(std::memory_order_relaxed);
        if (first(its) >= last(its) || last(its) - first(its) <= last(left) - first(left)) continue;
        longest = &shares_[other].left;
        left = its;
      }
      if (longest == nullptr) return false;
      const uint64_t middle = first(left) + (last(left) - first(left)) / 2;
      if (!longest->compare_exchange_strong(left, range(first(left), middle), std::memory_order_relaxed)) continue;
      shares_[id].left.store(range(middle, last(left)), std::memory_order_relaxed);
      return true;
    }
  }

  bool enter() {
    uint32_t state = state_.load(std::memory_order_acquire);
    while (state & kOpen) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void work(size_t id) {
    const SubnormalsAsZero mode;
    for (uint32_t seen = 0;;) {
      seen = await_generation(seen);
      if (id >= threads() || !enter()) continue;
      take_items(id);
      state_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  // Spins for `kSpin`, then sleeps, until the generation differs from `seen`.
  uint32_t await_generation(uint32_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (uint32_t spins = 1;; spins++) {
      const uint32_t now = generation_.load(std::memory_order_acquire);
      if (now != seen) return now;
      relax();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() >= deadline) break;
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (generation_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, static_cast<int>(seen));
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return generation_.load(std::memory_order_acquire);
  }

  void futex(int operation, int value) { syscall(SYS_futex, &generation_, operation, value, nullptr, nullptr, 0); }

  std::mutex owner_;  // locked by the owner of the pool: one loop at a time
  size_t started_ = 0;
  std::atomic<size_t> limit_{1};
  void (*body_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  std::mutex failing_;
  std::exception_ptr failure_;  // exception of an item; its thread leaves the loop
  std::vector<Share> shares_;
  alignas(64) std::atomic<uint32_t> state_{0};  // kOpen, and the number of workers inside
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
};

// Never destroyed: its threads may outlive every destructor of the process.
Pool& pool() {
  static Pool* const instance = new Pool(default_threads());
  return *instance;
}

// Larger buffers than a quarter of this are rounded up to large pages and ask the operating system for them: they need
// fewer entries of the TLB.
constexpr size_t kLargePage = 2 << 20;

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

size_t num_threads() { return pool().threads(); }

void set_num_threads(size_t count) { pool().resize(count); }

void parallel_for(size_t count, void (*body)(void*, size_t), void* context) { pool().run(count, body, context); }

void* scratch(Scratch slot, size_t bytes) {
  static thread_local Buffer buffers[static_cast<size_t>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<size_t>(slot)];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    const size_t wanted = bytes + bytes / 2, page = wanted < kLargePage / 4 ? 4096 : kLargePage;
    const size_t size = (wanted + page - 1) / page * page;
    buffer.data = std::aligned_alloc(page, size);
    if (buffer.data != nullptr && page == kLargePage) madvise(buffer.data, size, MADV_HUGEPAGE);
    buffer.size = buffer.data == nullptr ? 0 : size;
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace llm
