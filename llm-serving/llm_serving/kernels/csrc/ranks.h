// Ranks: processes that compute one model together. Each has a part of the weights, and their partial sums are added in
// shared memory.
//
// The memory is an anonymous file. Each rank has a slot in its first page, followed by two buffers for the pieces that
// it contributes. A buffer is reused only after every rank has read it, because a rank that contributes a further piece
// has read all of the previous round.
//
// | slots | pieces of rank 0, 1, .. of even rounds | pieces of odd rounds |
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace llm {

class Ranks {
 public:
  static constexpr size_t kMaxCount = 16;
  static constexpr size_t kPieceBytes = 1 << 20;
  static constexpr size_t kSeatsBytes = 4096;

  // Occupies the slot of `rank` of `count` in the file `fd`, which the caller keeps, and waits for the other ranks. On
  // failure, `error` has the reason.
  Ranks(int fd, size_t rank, size_t count, double timeout_s);
  // Other ranks that wait for this one see that it has left, as when its process ends.
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Begins the step `tag`, which must be the same on all ranks; each wait takes at most `timeout_s`.
  void begin(uint64_t tag, double timeout_s);
  // y = the sum of x of all ranks, in rank order and in float32, rounded once; y may be x. Returns false on failure.
  bool all_reduce(const void* x, void* y, size_t count, DType dtype);
  // Each rank has its columns of `count` rows of `width` numbers; afterwards all ranks have all columns. Returns false
  // on failure.
  bool all_gather(float* rows, size_t count, size_t width);
  // Whether this rank's columns are those from `first` to `last`.
  bool has(size_t width, int64_t first, int64_t last) const;
  // Copies `bytes` bytes from each rank to `all`, in rank order.
  bool exchange(const void* mine, size_t bytes, void* all);

  // Null until a failure; after one, every call fails.
  const char* error() const { return failed_ ? error_ : nullptr; }

 private:
  struct alignas(128) Seat {
    std::atomic<uint32_t> round;  // newest round to which this rank has contributed
    std::atomic<uint32_t> sleepers;
    uint64_t tags[2];
    uint64_t bytes[2];
  };
  static_assert(kMaxCount * sizeof(Seat) <= kSeatsBytes, "seats must fit in their page");
  using Clock = std::chrono::steady_clock;

  Seat& seat(size_t rank) const { return reinterpret_cast<Seat*>(memory_)[rank]; }
  char* piece(size_t rank) const { return memory_ + kSeatsBytes + ((round_ % 2) * count_ + rank) * kPieceBytes; }
  size_t first_column(size_t rank, size_t width) const { return rank * width / count_; }
  // Buffer of this rank's next piece; `meet` publishes its `bytes` and waits for the others' pieces.
  char* next_piece() {
    round_++;
    return piece(rank_);
  }
  bool meet(size_t bytes, bool joining = false);
  bool await(size_t other, Clock::time_point deadline, bool joining);
  bool has_left(size_t other) const;
  bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));

  const size_t rank_, count_;
  double timeout_s_;
  uint64_t tag_ = 0;
  uint32_t round_ = 0;
  int fd_ = -1;  // opened by this rank alone, because locks belong to it
  char* memory_ = nullptr;
  size_t size_ = 0;
  bool failed_ = false;
  char error_[256] = "";
};

// The ranks that programs of this process use; null: a single process.
Ranks* ranks_in_use();

}  // namespace llm
