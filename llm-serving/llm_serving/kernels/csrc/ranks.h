// Processes that compute one model together: each has a part of the weights, and what they compute is added up in
// memory that all of them see.
//
// The memory is a file without a name. Each rank has a seat in its first page, and behind that two places for a piece
// of what it gives: nobody writes one of them again before everybody has read it, since whoever gives a further piece
// has read all of the one before.
//
//     | seats | pieces of rank 0, 1, .. of even rounds | the same of odd rounds |
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

  // Takes the seat of `rank` of `count` in the file behind `fd`, which stays the caller's, and waits for the others.
  // Where that fails, `error` says why.
  Ranks(int fd, size_t rank, size_t count, double timeout_s);
  // Whoever waits for this rank learns that it is gone, as when the process ends.
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // What comes next belongs to the step `tag`, as it must for all; nobody is waited for longer than `timeout_s`.
  void begin(uint64_t tag, double timeout_s);
  // y = the sum of x of all ranks, in their order and in float32, rounded once; y may be x. False where it failed.
  bool all_reduce(const void* x, void* y, size_t count, DType dtype);
  // Of `count` rows of `width` numbers each rank has its columns; afterwards all have all. False where it failed.
  bool all_gather(float* rows, size_t count, size_t width);
  // Whether its columns are those from `first` to `last`.
  bool has(size_t width, int64_t first, int64_t last) const;
  // Copies what each gives, `bytes` of all, to `all`, one behind the other.
  bool exchange(const void* mine, size_t bytes, void* all);

  // Null while all goes well. Once it does not, nothing goes well any more.
  const char* error() const { return failed_ ? error_ : nullptr; }

 private:
  struct alignas(128) Seat {
    std::atomic<uint32_t> round;  // the newest that this rank has given its piece of
    std::atomic<uint32_t> sleepers;
    uint64_t tags[2];
    uint64_t bytes[2];
  };
  static_assert(kMaxCount * sizeof(Seat) <= kSeatsBytes, "seats must fit in their page");
  using Clock = std::chrono::steady_clock;

  Seat& seat(size_t rank) const { return reinterpret_cast<Seat*>(memory_)[rank]; }
  char* piece(size_t rank) const { return memory_ + kSeatsBytes + ((round_ % 2) * count_ + rank) * kPieceBytes; }
  size_t first_column(size_t rank, size_t width) const { return rank * width / count_; }
  // Where this rank's next piece belongs; `meet` gives its `bytes` to the others, and has theirs.
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
  int fd_ = -1;  // of this rank alone: locks belong to it
  char* memory_ = nullptr;
  size_t size_ = 0;
  bool failed_ = false;
  char error_[256] = "";
};

// The ranks that programs of this process compute with; null: it computes alone.
Ranks* ranks_in_use();

}  // namespace llm
