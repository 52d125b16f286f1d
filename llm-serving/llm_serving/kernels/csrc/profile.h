// Profile of a step: calls and nanoseconds of every operator, counted while switched on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace llm {

// The counter of one operator, in a list, for the lifetime of the process.
struct OperatorClock {
  explicit OperatorClock(const char* name);

  const char* const name;
  OperatorClock* const next;
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> nanoseconds{0};
};

// Starts counting from zero, or stops; the counts stay until the next start.
void set_profiling(bool on);

// Returns the i-th operator that was ever called; null behind the last.
const OperatorClock* operator_clock(size_t i);

extern std::atomic<bool> profiling;

// Adds its lifetime to a clock, without the time of nested timers in the same thread.
class Timed {
 public:
  explicit Timed(OperatorClock& clock) : clock_(profiling.load(std::memory_order_relaxed) ? &clock : nullptr) {
    if (clock_ == nullptr) return;
    before_ = inside;
    inside = {};
    start_ = std::chrono::steady_clock::now();
  }
  ~Timed() {
    if (clock_ == nullptr) return;
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    const auto own = std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed - inside);
    clock_->calls.fetch_add(1, std::memory_order_relaxed);
    clock_->nanoseconds.fetch_add(own.count(), std::memory_order_relaxed);
    inside = before_ + elapsed;
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  using Duration = std::chrono::steady_clock::duration;
  // Time of finished nested timers that the innermost active one excludes.
  static inline thread_local Duration inside{};

  OperatorClock* const clock_;
  Duration before_{};
  std::chrono::steady_clock::time_point start_;
};

}  // namespace llm
