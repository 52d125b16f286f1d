// Tells that a step is about to end, so that the next one is formed as late as it can and yet nothing waits for it.
#pragma once

#include <chrono>
#include <cstddef>

namespace llm {

// Once the layers of the next step are nearly done, `tell` is called, once; null: nobody is told.
void announce_ending(void (*tell)());

// Follows the layers of one step, and calls what `announce_ending` was given when it is time.
class Ending {
 public:
  explicit Ending(size_t num_layers) : num_layers_(num_layers) {}

  // To be called after each layer.
  void layer_done();

 private:
  using Clock = std::chrono::steady_clock;

  const size_t num_layers_;
  const Clock::time_point start_ = Clock::now();
  size_t done_ = 0;
};

}  // namespace llm
