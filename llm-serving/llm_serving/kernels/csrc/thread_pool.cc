#include "thread_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>

#include "floating_mode.h"

namespace llm {
namespace {

// Longer than the gap between two operators of a step, shorter than anything a waiting process would notice.
constexpr std::chrono::microseconds kSpin{100};
constexpr uint32_t kOpen = 1u << 31;

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

// Workers enter a loop while it is open and the caller leaves when it is closed and nobody is inside, so a worker that
// is slow to wake delays nobody.
class Pool {
 public:
  explicit Pool(size_t threads) { resize(threads); }

  size_t threads() const { return limit_.load(std::memory_order_relaxed); }

  void resize(size_t threads) {
    const std::lock_guard<std::mutex> lock(owner_);
    for (; started_ + 1 < threads; started_++) std::thread([this, id = started_ + 1] { work(id); }).detach();
    limit_.store(threads, std::memory_order_relaxed);
  }

  void run(size_t count, void (*body)(void*, size_t), void* context) {
    std::unique_lock<std::mutex> lock(owner_, std::defer_lock);
    if (count <= 1 || threads() <= 1 || inside_loop || !lock.try_lock()) {
      for (size_t i = 0; i < count; i++) body(context, i);
      return;
    }
    body_ = body;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
    take_items();
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; state_.load(std::memory_order_acquire) != 0; relax()) {
      if (++spins % 4096 == 0) sched_yield();
    }
  }

 private:
  void take_items() {
    inside_loop = true;
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) body_(context_, i);
    inside_loop = false;
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
      take_items();
      state_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  // Spins for a while, then sleeps, until the generation differs from `seen`.
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

  std::mutex owner_;  // of the pool: one loop at a time
  size_t started_ = 0;
  std::atomic<size_t> limit_{1};
  void (*body_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  size_t count_ = 0;
  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<uint32_t> state_{0};  // kOpen, and the number of workers inside
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
};

// Never destroyed: its threads may outlive every destructor of the process.
Pool& pool() {
  static Pool* const instance = new Pool(default_threads());
  return *instance;
}

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
    buffer.size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, buffer.size);
    if (buffer.data == nullptr) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace llm
