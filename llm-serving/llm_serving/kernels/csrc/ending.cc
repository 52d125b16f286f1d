#include "ending.h"

#include <sys/socket.h>

#include <cerrno>
#include <mutex>
#include <string>

namespace llm {
namespace {

// What must be left when the master is told: it needs some 2 ms for a step of 128 rows while all cores compute.
constexpr std::chrono::milliseconds kLead{5};

struct Announcement {
  std::mutex mutex;
  int socket = -1;
  std::string frame;  // empty: written, or never given
};

Announcement& announcement() {
  static Announcement instance;
  return instance;
}

// A frame is written whole or, if nobody listens any more, not needed.
void write_all(int socket, const std::string& frame) {
  for (size_t written = 0; written < frame.size();) {
    const ssize_t count = send(socket, frame.data() + written, frame.size() - written, MSG_NOSIGNAL);
    if (count < 0 && errno != EINTR) return;
    if (count > 0) written += static_cast<size_t>(count);
  }
}

}  // namespace

void announce_ending(int socket, const char* frame, size_t bytes) {
  Announcement& next = announcement();
  const std::lock_guard<std::mutex> lock(next.mutex);
  next.socket = socket;
  next.frame.assign(frame, bytes);
}

void Ending::layer_done() {
  done_++;
  // It can wait for one more layer if what is left then takes long enough. Layers are expected to take as long as those
  // before them, but for the last one, which may compute a few rows only.
  const size_t after_next = done_ + 2 < num_layers_ ? num_layers_ - done_ - 2 : 0;
  if ((Clock::now() - start_) / done_ * after_next >= kLead) return;
  Announcement& given = announcement();
  const std::lock_guard<std::mutex> lock(given.mutex);
  write_all(given.socket, given.frame);
  given.frame.clear();
}

}  // namespace llm
