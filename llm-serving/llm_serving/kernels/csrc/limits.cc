// Measures the memory bandwidth of this machine, for benchmarks to compare with.
#include <atomic>
#include <cstdint>

#include "call.h"
#include "thread_pool.h"

namespace llm {
namespace {

constexpr size_t kChunkBytes = 1 << 20;
constexpr size_t kLineBytes = 64;
constexpr size_t kAheadBytes = 1024;
// Parts of a chunk that are read side by side: a single one does not keep enough lines in flight.
constexpr size_t kStreams = 4;
constexpr size_t kStreamBytes = kChunkBytes / kStreams;

// Exclusive or of a word of each line of a chunk: loads only. Lines are prefetched with this locality.
template <int kLocality>
uint64_t fold(const char* data) {
  uint64_t sums[kStreams] = {};
  for (size_t i = 0; i < kStreamBytes; i += kLineBytes) {
    for (size_t stream = 0; stream < kStreams; stream++) {
      const char* line = data + stream * kStreamBytes + i;
      __builtin_prefetch(line + kAheadBytes, 0, kLocality);
      sums[stream] ^= *reinterpret_cast<const uint64_t*>(line);
    }
  }
  uint64_t result = 0;
  for (const uint64_t sum : sums) result ^= sum;
  return result;
}

}  // namespace
}  // namespace llm

// Reads memory once with all threads of the kernels, through the first- or the second-level cache; the result keeps the
// compiler from removing the reads.
LLM_EXPORT uint64_t llm_read_memory(const void* data, int64_t bytes, int64_t cache_level) {
  using namespace llm;
  std::atomic<uint64_t> result{0};
  auto chunk = [&](size_t i) {
    const char* begin = static_cast<const char*>(data) + i * kChunkBytes;
    result ^= cache_level == 1 ? fold<3>(begin) : fold<2>(begin);
  };
  parallel_for(static_cast<size_t>(bytes) / kChunkBytes, chunk);
  return result;
}
