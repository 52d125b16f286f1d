// What this machine can do at most, for benchmarks to compare with.
#include <atomic>
#include <cstdint>

#include "call.h"
#include "thread_pool.h"

namespace llm {
namespace {

constexpr size_t kChunkBytes = 1 << 20;
constexpr size_t kLineBytes = 64;
constexpr size_t kAheadBytes = 2048;

// Exclusive or of all words: nothing but loads.
uint64_t fold(const char* data, size_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(kLineBytes), aligned(8)));
  Words first = {};
  Words second = {};
  for (size_t i = 0; i + 2 * kLineBytes <= bytes; i += 2 * kLineBytes) {
    __builtin_prefetch(data + i + kAheadBytes);
    __builtin_prefetch(data + i + kAheadBytes + kLineBytes);
    first ^= *reinterpret_cast<const Words*>(data + i);
    second ^= *reinterpret_cast<const Words*>(data + i + kLineBytes);
  }
  uint64_t result = 0;
  for (size_t i = 0; i < kLineBytes / sizeof(uint64_t); i++) result ^= first[i] ^ second[i];
  return result;
}

}  // namespace
}  // namespace llm

// Reads memory once with all threads of the kernels; the result keeps the reads from being left out.
LLM_EXPORT uint64_t llm_read_memory(const void* data, int64_t bytes) {
  using namespace llm;
  std::atomic<uint64_t> result{0};
  auto chunk = [&](size_t i) { result ^= fold(static_cast<const char*>(data) + i * kChunkBytes, kChunkBytes); };
  parallel_for(static_cast<size_t>(bytes) / kChunkBytes, chunk);
  return result;
}
