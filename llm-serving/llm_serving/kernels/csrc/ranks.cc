#include "ranks.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "call.h"
#include "kernels.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Longer than the difference between ranks in a layer if each has a core of its own.
constexpr std::chrono::microseconds kSpin{50};
// Interval at which a sleeping rank checks that the rank it waits for is alive.
constexpr std::chrono::milliseconds kLook{20};
constexpr size_t kChunkBytes = 1 << 15;  // bytes of a piece for each task of the threads

std::atomic<Ranks*> in_use{nullptr};

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout = nullptr) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

struct flock lock_of(size_t rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(rank);
  lock.l_len = 1;
  return lock;
}

// Calls body(i) for rows of so many numbers, on one thread if that is faster than waking another.
template <class Body>
void for_rows(size_t count, size_t width, Body body) {
  const size_t each = std::max(kChunkBytes / (width * sizeof(float)), size_t{1});
  auto chunk = [&](size_t i) {
    for (size_t row = i * each; row < std::min(count, (i + 1) * each); row++) body(row);
  };
  parallel_for((count + each - 1) / each, chunk);
}

// y = the sum of `parts`, each of `size` elements.
void add_up(const char* const* parts, size_t num_parts, char* y, size_t size, DType dtype) {
  if (num_parts == 2 || dtype == DType::kFloat32) {
    const void* sum = parts[0];
    for (size_t i = 1; i < num_parts; i++) {
      kernels().add({sum, parts[i], y, dtype, size});
      sum = y;
    }
    return;
  }
  auto* sum = static_cast<float*>(scratch(Scratch::kItems, 2 * size * sizeof(float)));
  float* part = sum + size;
  widen(parts[0], size, dtype, sum);
  for (size_t i = 1; i < num_parts; i++) {
    widen(parts[i], size, dtype, part);
    kernels().add({sum, part, sum, DType::kFloat32, size});
  }
  kernels().round({sum, nullptr, y, dtype, 1, size, 0, size, 1.0f});
}

}  // namespace

Ranks::Ranks(int fd, size_t rank, size_t count, double timeout_s) : rank_(rank), count_(count), timeout_s_(timeout_s) {
  struct stat file;
  if (count < 2 || count > kMaxCount || rank >= count) {
    fail("rank %zu of %zu: there must be 2 to %zu", rank, count, kMaxCount);
    return;
  }
  size_ = kSeatsBytes + 2 * count * kPieceBytes;
  // Opened again: locks on this description are released when this rank closes it, not when a process that has
  // inherited it does.
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  fd_ = open(path, O_RDWR | O_CLOEXEC);
  if (fd_ < 0 || fstat(fd_, &file) != 0 || static_cast<size_t>(file.st_size) < size_) {
    fail("the memory of %zu ranks must be a file of %zu bytes", count, size_);
    return;
  }
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) {
    fail("the memory of the ranks cannot be mapped: %s", std::strerror(errno));
    return;
  }
  memory_ = static_cast<char*>(memory);
  struct flock lock = lock_of(rank);
  if (fcntl(fd_, F_OFD_SETLK, &lock) != 0) {
    fail("rank %zu is taken", rank);
    return;
  }
  next_piece();
  meet(0, /*joining=*/true);
}

Ranks::~Ranks() {
  Ranks* self = this;
  in_use.compare_exchange_strong(self, nullptr);
  if (fd_ >= 0) close(fd_);
  if (memory_ != nullptr) munmap(memory_, size_);
}

void Ranks::begin(uint64_t tag, double timeout_s) {
  tag_ = tag;
  timeout_s_ = timeout_s;
}

bool Ranks::all_reduce(const void* x, void* y, size_t count, DType dtype) {
  if (failed_) return false;
  const size_t bytes = count * element_size(dtype, nullptr), element = element_size(dtype, nullptr);
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    const size_t size = std::min(bytes - at, kPieceBytes);
    std::memcpy(next_piece(), static_cast<const char*>(x) + at, size);
    if (!meet(size)) return false;
    char* result = static_cast<char*>(y) + at;
    auto chunk = [&](size_t i) {
      const size_t first = i * kChunkBytes, length = std::min(size - first, kChunkBytes);
      const char* parts[kMaxCount] = {};
      for (size_t rank = 0; rank < count_; rank++) parts[rank] = piece(rank) + first;
      add_up(parts, count_, result + first, length / element, dtype);
    };
    parallel_for((size + kChunkBytes - 1) / kChunkBytes, chunk);
  }
  return !failed_;
}

bool Ranks::has(size_t width, int64_t first, int64_t last) const {
  return first == static_cast<int64_t>(first_column(rank_, width)) &&
         last == static_cast<int64_t>(first_column(rank_ + 1, width));
}

bool Ranks::all_gather(float* rows, size_t count, size_t width) {
  if (failed_) return false;
  const size_t most = (width + count_ - 1) / count_;  // columns of a rank
  const size_t columns = std::min(most, kPieceBytes / sizeof(float)), height = kPieceBytes / sizeof(float) / columns;
  for (size_t row = 0; row < count; row += height) {
    const size_t num_rows = std::min(height, count - row);
    for (size_t column = 0; column < most; column += columns) {
      // Calls body(address in the result, address in the piece, bytes) for the columns of a row from the piece of
      // `rank`.
      auto copy = [&](size_t rank, size_t i, auto body) {
        const size_t first = first_column(rank, width) + column, last = first_column(rank + 1, width);
        if (first >= last) return;
        body(rows + (row + i) * width + first, piece(rank) + i * columns * sizeof(float),
             std::min(columns, last - first) * sizeof(float));
      };
      next_piece();
      for_rows(num_rows, columns, [&](size_t i) {
        copy(rank_, i, [](const float* mine, char* given, size_t bytes) { std::memcpy(given, mine, bytes); });
      });
      if (!meet(num_rows * columns * sizeof(float))) return false;
      for_rows(num_rows * count_, columns, [&](size_t i) {
        if (i % count_ == rank_) return;
        copy(i % count_, i / count_,
             [](float* theirs, const char* given, size_t bytes) { std::memcpy(theirs, given, bytes); });
      });
    }
  }
  return !failed_;
}

bool Ranks::exchange(const void* mine, size_t bytes, void* all) {
  if (failed_) return false;
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    const size_t size = std::min(bytes - at, kPieceBytes);
    std::memcpy(next_piece(), static_cast<const char*>(mine) + at, size);
    if (!meet(size)) return false;
    for (size_t rank = 0; rank < count_; rank++) {
      std::memcpy(static_cast<char*>(all) + rank * bytes + at, piece(rank), size);
    }
  }
  return !failed_;
}

// Waits until all ranks have contributed their piece of the same round.
bool Ranks::meet(size_t bytes, bool joining) {
  Seat& own = seat(rank_);
  own.tags[round_ % 2] = tag_;
  own.bytes[round_ % 2] = bytes;
  own.round.store(round_, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) > 0) futex(own.round, FUTEX_WAKE, INT_MAX);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(std::min(timeout_s_, 1e6)));
  for (size_t other = 0; other < count_; other++) {
    if (other != rank_ && !await(other, deadline, joining)) return false;
  }
  for (size_t other = 0; other < count_; other++) {
    const uint64_t tag = seat(other).tags[round_ % 2], size = seat(other).bytes[round_ % 2];
    if (tag == tag_ && size == bytes) continue;
    return fail("rank %zu gives %llu bytes of step %lld, rank %zu has %zu of step %lld", other,
                static_cast<unsigned long long>(size), static_cast<long long>(tag), rank_, bytes,
                static_cast<long long>(tag_));
  }
  return true;
}

bool Ranks::await(size_t other, Clock::time_point deadline, bool joining) {
  std::atomic<uint32_t>& round = seat(other).round;
  auto is_there = [&](uint32_t seen) { return static_cast<int32_t>(seen - round_) >= 0; };
  const auto until = Clock::now() + kSpin;
  for (uint32_t spins = 1;; spins++) {
    if (is_there(round.load(std::memory_order_acquire))) return true;
    relax();
    if (spins % 64 == 0 && Clock::now() >= until) break;
  }
  const timespec look = {0, std::chrono::nanoseconds(kLook).count()};
  seat(other).sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool found = false;
  while (!failed_) {
    const uint32_t seen = round.load(std::memory_order_seq_cst);
    if ((found = is_there(seen))) break;
    const bool slept = futex(round, FUTEX_WAIT, seen, &look) != 0 && errno == ETIMEDOUT;
    if (!slept) continue;
    // A rank that has never joined is not known to be lost. One that contributed its piece and left before it was
    // checked is not missing.
    if (!joining && has_left(other) && !is_there(round.load(std::memory_order_seq_cst))) {
      fail("rank %zu is gone", other);
    } else if (Clock::now() >= deadline) {
      fail("rank %zu did not come to step %lld in %g s", other, static_cast<long long>(tag_), timeout_s_);
    }
  }
  seat(other).sleepers.fetch_sub(1, std::memory_order_relaxed);
  return found;
}

bool Ranks::has_left(size_t other) const {
  struct flock lock = lock_of(other);
  return fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool Ranks::fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_, sizeof(error_), format, arguments);
  va_end(arguments);
  failed_ = true;
  return false;
}

Ranks* ranks_in_use() { return in_use.load(); }

}  // namespace llm

// For Python: see kernels/ranks.py.
LLM_EXPORT void* llm_join_ranks(int64_t fd, int64_t rank, int64_t count, double timeout_s) {
  return new llm::Ranks(static_cast<int>(fd), static_cast<size_t>(rank), static_cast<size_t>(count), timeout_s);
}

LLM_EXPORT void llm_leave_ranks(void* ranks) { delete static_cast<llm::Ranks*>(ranks); }

LLM_EXPORT void llm_use_ranks(void* ranks) { llm::in_use.store(static_cast<llm::Ranks*>(ranks)); }

LLM_EXPORT const char* llm_error_of_ranks(void* ranks) { return static_cast<llm::Ranks*>(ranks)->error(); }

LLM_EXPORT void llm_begin_step(void* ranks, int64_t tag, double timeout_s) {
  static_cast<llm::Ranks*>(ranks)->begin(static_cast<uint64_t>(tag), timeout_s);
}

LLM_EXPORT void llm_all_reduce(void* ranks, const void* x, void* y, int64_t count, const char* dtype) {
  static_cast<llm::Ranks*>(ranks)->all_reduce(x, y, static_cast<size_t>(count), llm::parse_dtype(dtype));
}

LLM_EXPORT void llm_all_gather(void* ranks, float* rows, int64_t count, int64_t width) {
  static_cast<llm::Ranks*>(ranks)->all_gather(rows, static_cast<size_t>(count), static_cast<size_t>(width));
}

LLM_EXPORT void llm_exchange(void* ranks, const void* mine, int64_t bytes, void* all) {
  static_cast<llm::Ranks*>(ranks)->exchange(mine, static_cast<size_t>(bytes), all);
}
