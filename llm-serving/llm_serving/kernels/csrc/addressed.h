// Operator calls whose parameters are passed by their addresses, in a tensor of constant shape. Around an operator
// whose shapes may change, MindSpore takes twenty times as long: it opens the library again to infer the shape of the
// result, and it checks every parameter at every call.
#pragma once

#include <vector>

#include "call.h"

namespace llm {

// A call whose parameters are passed by address. Parameter 0 is a table int64 [n, 7] with one row for each parameter:
// its address, type (0 float32, 1 float16, 2 bfloat16, 3 int32, 4 int64, 5 int8), rank and up to four dimensions. The
// output behind the table tells MindSpore that the call is done. Addresses and dimensions are those of existing arrays
// and cannot be checked.
class AddressedCall {
 public:
  explicit AddressedCall(const Call& call) : call_(call) {}

  // Reads the table; returns a status as operators do.
  int read();
  // The call with its parameters; valid after `read`.
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
