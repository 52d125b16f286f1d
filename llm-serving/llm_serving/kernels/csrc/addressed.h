// Parameters that a call names by their addresses, in a tensor whose shape is always the same: around an operator whose
// shapes may change MindSpore takes twenty times as long, as it opens the library again to infer that of the result,
// and it looks at every parameter of its own at every call.
#pragma once

#include <vector>

#include "call.h"

namespace llm {

// A call with all of its parameters in their places. They stand in the first one, a table int64 [n, 7], one a row: its
// address, type (0 float32, 1 float16, 2 bfloat16, 3 int32, 4 int64, 5 int8), rank and dimensions, four at most. What
// is behind the table tells MindSpore that the call is done. Addresses and dimensions are those of arrays: they cannot
// be checked.
class AddressedCall {
 public:
  explicit AddressedCall(const Call& call) : call_(call) {}

  // A status as operators return it.
  int read();
  // After `read`.
  Call call() {
    return {call_.op(), static_cast<int>(data_.size()), data_.data(), ranks_.data(), shapes_.data(), dtypes_.data()};
  }

 private:
  const Call& call_;
  std::vector<void*> data_;
  std::vector<int> ranks_;
  std::vector<int64_t*> shapes_;
  std::vector<const char*> dtypes_;
};

}  // namespace llm
