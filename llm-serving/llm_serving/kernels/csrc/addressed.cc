#include "addressed.h"

namespace llm {
namespace {

constexpr size_t kRowLength = 6;
constexpr const char* kTypes[] = {"float32", "float16", "bfloat16", "int32", "int64"};
constexpr int64_t kNumTypes = sizeof(kTypes) / sizeof(kTypes[0]);

}  // namespace

int AddressedCall::read() {
  if (call_.count() < table_ + 2 || call_.dtype(table_) != DType::kInt64 || call_.rank(table_) != 2 ||
      call_.dim(table_, 1) != kRowLength) {
    return call_.fail("parameter %d must be a table of addresses, int64 [n, %zu]", table_, kRowLength);
  }
  const size_t rows = call_.dim(table_, 0);
  count_ = call_.count() - 2 + static_cast<int>(rows);
  const size_t count = static_cast<size_t>(count_);
  data_.resize(count);
  ranks_.resize(count);
  shapes_.resize(count);
  dtypes_.assign(count, nullptr);
  for (size_t row = 0; row < rows; row++) {
    if (const int status = read_row(call_.data<int64_t>(table_) + row * kRowLength)) return status;
  }
  int next = 0;
  for (int i = 0; i + 1 < call_.count(); i++) {
    if (i == table_) continue;
    while (dtypes_[static_cast<size_t>(next)] != nullptr) next++;
    put(next, call_.data<void>(i), call_.rank(i), call_.shape(i), call_.dtype_name(i));
  }
  return 0;
}

int AddressedCall::read_row(int64_t* row) {
  const int64_t number = row[0], type = row[2], rank = row[3];
  if (number < 0 || number >= count_ || dtypes_[static_cast<size_t>(number)] != nullptr) {
    return call_.fail("there is no place %lld for a parameter by address", static_cast<long long>(number));
  }
  if (type < 0 || type >= kNumTypes || rank < 0 || rank > 2 || row[4] < 0 || row[5] < 0) {
    return call_.fail("parameter %lld is of no known type and shape", static_cast<long long>(number));
  }
  put(static_cast<int>(number), reinterpret_cast<void*>(row[1]), static_cast<int>(rank), row + 4, kTypes[type]);
  return 0;
}

void AddressedCall::put(int i, void* data, int rank, int64_t* shape, const char* dtype) {
  const size_t at = static_cast<size_t>(i);
  data_[at] = data;
  ranks_[at] = rank;
  shapes_[at] = shape;
  dtypes_[at] = dtype;
}

}  // namespace llm
