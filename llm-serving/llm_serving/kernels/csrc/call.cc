#include "call.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace llm {
namespace {

std::mutex error_mutex;
char error_text[512] = "";

std::atomic<int64_t> calls{0};

}  // namespace

Call::Call(const char* op, int count, void** data, int* ranks, int64_t** shapes, const char** dtypes)
    : op_(op), count_(count), data_(data), ranks_(ranks), shapes_(shapes), dtypes_(dtypes) {
  calls.fetch_add(1, std::memory_order_relaxed);
}

int64_t num_calls() { return calls.load(std::memory_order_relaxed); }

size_t Call::elements(int i) const {
  size_t product = 1;
  for (int axis = 0; axis < ranks_[i]; axis++) product *= static_cast<size_t>(shapes_[i][axis]);
  return product;
}

int Call::check_within(int i, const char* name, int64_t least, size_t count, const char* of_what) const {
  for (size_t at = 0, size = elements(i); at < size; at++) {
    const int64_t value = integer(i, at);
    if (value < least || value >= static_cast<int64_t>(count)) {
      return fail("%s[%zu] = %lld is outside the %zu %s", name, at, static_cast<long long>(value), count, of_what);
    }
  }
  return 0;
}

int Call::fail(const char* format, ...) const {
  char reason[sizeof(error_text)];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason, sizeof(reason), format, arguments);
  va_end(arguments);
  record_failure(op_, reason);
  return 1;
}

void record_failure(const char* name, const char* reason) {
  const std::lock_guard<std::mutex> lock(error_mutex);
  std::snprintf(error_text, sizeof(error_text), "%s: %s", name, reason);
  std::fprintf(stderr, "llm_serving kernel error: %s\n", error_text);
}

const char* last_error() { return error_text; }

}  // namespace llm
