#include "call.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <mutex>
#include <new>

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

int Call::run(int (*operation)(const Call&)) const {
  try {
    return operation(*this);
  } catch (const std::bad_alloc&) {
    return fail("there is no memory for what it computes on its way");
  } catch (const std::exception& error) {
    return fail("%s", error.what());
  }
}

int Call::fail(const char* format, ...) const {
  const std::lock_guard<std::mutex> lock(error_mutex);
  const int used = std::snprintf(error_text, sizeof(error_text), "%s: ", op_);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_text + used, sizeof(error_text) - static_cast<size_t>(used), format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "llm_serving kernel error: %s\n", error_text);
  return 1;
}

const char* last_error() { return error_text; }

}  // namespace llm
