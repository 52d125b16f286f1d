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
// Parts of a chunk that are read side by side: one alone does not keep enough lines on their way.
constexpr size_t kStreams = 4;
constexpr size_t kStreamBytes = kChunkBytes / kStreams;

// Exclusive or of all words of a chunk: nothing but loads.
uint64_t fold(const char* data) {
  typedef uint64_t Words __attribute__((vector_size(kLineBytes), aligned(8)));
  Words sums[kStreams] = {};
  for (size_t i = 0; i < kStreamBytes; i += kLineBytes) {
    for (size_t stream = 0; stream < kStreams; stream++) {
      const char* line = data + stream * kStreamBytes + i;
      __builtin_prefetch(line + kAheadBytes);
      sums[stream] ^= *reinterpret_cast<const Words*>(line);
    }
  }
  uint64_t result = 0;
  for (const Words& sum : sums) {
    for (size_t i = 0; i < kLineBytes / sizeof(uint64_t); i++) result ^= sum[i];
  }
  return result;
}

}  // namespace
}  // namespace llm

// Reads memory once with all threads of the kernels; the result keeps the reads from being left out.
LLM_EXPORT uint64_t llm_read_memory(const void* data, int64_t bytes) {
  using namespace llm;
  std::atomic<uint64_t> result{0};
  auto chunk = [&](size_t i) { result ^= fold(static_cast<const char*>(data) + i * kChunkBytes); };
  parallel_for(static_cast<size_t>(bytes) / kChunkBytes, chunk);
  return result;
}
