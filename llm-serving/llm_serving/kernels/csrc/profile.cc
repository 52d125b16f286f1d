#include "profile.h"

namespace llm {
namespace {

std::atomic<OperatorClock*> first{nullptr};

// Inserts the clock at the head of the list; returns the previous head.
OperatorClock* link(OperatorClock* clock) { return first.exchange(clock); }

}  // namespace

std::atomic<bool> profiling{false};

OperatorClock::OperatorClock(const char* operator_name) : name(operator_name), next(link(this)) {}

void set_profiling(bool on) {
  if (on) {
    for (OperatorClock* clock = first.load(); clock != nullptr; clock = clock->next) {
      clock->calls.store(0);
      clock->nanoseconds.store(0);
    }
  }
  profiling.store(on);
}

const OperatorClock* operator_clock(size_t i) {
  const OperatorClock* clock = first.load();
  for (; clock != nullptr && i > 0; i--) clock = clock->next;
  return clock;
}

}  // namespace llm
