#include "ending.h"

#include <atomic>

namespace llm {
namespace {

// Lead time of the announcement: the master needs some 2 ms for a step of 128 rows while all cores compute.
constexpr std::chrono::milliseconds kLead{5};

std::atomic<void (*)()> to_tell{nullptr};

}  // namespace

void announce_ending(void (*tell)()) { to_tell.store(tell); }

void Ending::layer_done() {
  done_++;
  // Wait for one more layer if the remaining time is then still long enough. Layers are expected to take as long as the
  // previous ones, except the last one, which may compute a few rows only.
  const size_t after_next = done_ + 2 < num_layers_ ? num_layers_ - done_ - 2 : 0;
  if ((Clock::now() - start_) / done_ * after_next >= kLead) return;
  if (void (*tell)() = to_tell.exchange(nullptr)) tell();
}

}  // namespace llm
