#include "addressed.h"

namespace llm {
namespace {

constexpr size_t kRowLength = 7;
constexpr int64_t kMaxAxes = 4;
constexpr const char* kTypes[] = {"float32", "float16", "bfloat16", "int32", "int64", "int8"};
constexpr int64_t kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);

}  // namespace

int AddressedCall::read() {
  if (call_.count() != 2 || call_.dtype(0) != DType::kInt64 || call_.rank(0) != 2 || call_.dim(0, 1) != kRowLength) {
    return call_.fail("expects a table of addresses, int64 [n, %zu]", kRowLength);
  }
  const size_t count = call_.dim(0, 0);
  data_.resize(count);
  ranks_.resize(count);
  shapes_.resize(count);
  dtypes_.resize(count);
  for (size_t i = 0; i < count; i++) {
    int64_t* row = call_.data<int64_t>(0) + i * kRowLength;
    const int64_t type = row[1], rank = row[2];
    bool known = type >= 0 && type < kNumTypes && rank >= 0 && rank <= kMaxAxes;
    for (int64_t axis = 0; known && axis < rank; axis++) known = row[3 + axis] >= 0;
    if (!known) return call_.fail("parameter %zu is of no known type and shape", i);
    data_[i] = reinterpret_cast<void*>(row[0]);
    ranks_[i] = static_cast<int>(rank);
    shapes_[i] = row + 3;
    dtypes_[i] = kTypes[type];
  }
  return 0;
}

}  // namespace llm
