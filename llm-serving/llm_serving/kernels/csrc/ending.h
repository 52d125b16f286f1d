// Tells the master that a step is about to end: it forms the next one as late as it can, and yet nothing waits for it.
#pragma once

#include <chrono>
#include <cstddef>

namespace llm {

// Once the layers of the next step are nearly done, `frame` is written to the socket; `frame` is copied.
void announce_ending(int socket, const char* frame, size_t bytes);

// Follows the layers of one step, and writes what `announce_ending` was given when it is time.
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
