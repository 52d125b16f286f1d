// Where the time of a step goes: calls and nanoseconds of every operator, counted while switched on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace llm {

// One for each operator, for the life of the process; they form a list.
struct OperatorClock {
  explicit OperatorClock(const char* name);

  const char* const name;
  OperatorClock* const next;
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> nanoseconds{0};
};

// Starts counting from zero, or stops; the counts stay until the next start.
void set_profiling(bool on);

// The i-th operator that was ever called; null behind the last.
const OperatorClock* operator_clock(size_t i);

extern std::atomic<bool> profiling;

// Adds the time until its end to a clock.
class Timed {
 public:
  explicit Timed(OperatorClock& clock) : clock_(profiling.load(std::memory_order_relaxed) ? &clock : nullptr) {
    if (clock_ != nullptr) start_ = std::chrono::steady_clock::now();
  }
  ~Timed() {
    if (clock_ == nullptr) return;
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    clock_->calls.fetch_add(1, std::memory_order_relaxed);
    clock_->nanoseconds.fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count(),
                                  std::memory_order_relaxed);
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  OperatorClock* const clock_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace llm
