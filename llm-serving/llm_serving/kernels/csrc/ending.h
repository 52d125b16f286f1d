// Announces that a step is about to end, so that the master builds the next step as late as possible without a gap.
#pragma once

#include <chrono>
#include <cstddef>

namespace llm {

// Requests one call of `tell` when the layers of the next step are nearly done; null: no call.
void announce_ending(void (*tell)());

// Follows the layers of one step, and makes the requested call of `announce_ending` in time.
class Ending {
 public:
  explicit Ending(size_t num_layers) : num_layers_(num_layers) {}

  // Called after each layer.
  void layer_done();

 private:
  using Clock = std::chrono::steady_clock;

  const size_t num_layers_;
  const Clock::time_point start_ = Clock::now();
  size_t done_ = 0;
};

}  // namespace llm
