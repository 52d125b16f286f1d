#include "call.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace llm {
namespace {

std::mutex error_mutex;
char error_text[512] = "";

}  // namespace

size_t Call::elements(int i) const {
  size_t product = 1;
  for (int axis = 0; axis < ranks_[i]; axis++) product *= static_cast<size_t>(shapes_[i][axis]);
  return product;
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
