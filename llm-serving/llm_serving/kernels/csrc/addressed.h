// Parameters that a call names by their addresses, in a tensor whose shape is always the same: around an operator whose
// shapes may change MindSpore takes twenty times as long, as it opens the library again to infer that of the result.
#pragma once

#include <vector>

#include "call.h"

namespace llm {

// A call with all of its parameters in their places. Those by address stand in `table`, int64 [n, 6], one a row: its
// number, address, type (0 float32, 1 float16, 2 bfloat16, 3 int32, 4 int64), rank, and two dimensions; the others keep
// their order. The table itself is none of them, nor is the last parameter, by which MindSpore knows that the call is
// done. Addresses and dimensions are those of arrays: they cannot be checked.
class AddressedCall {
 public:
  AddressedCall(const Call& call, int table) : call_(call), table_(table) {}

  // A status as operators return it.
  int read();
  // After `read`.
  Call call() { return {call_.op(), count_, data_.data(), ranks_.data(), shapes_.data(), dtypes_.data()}; }

 private:
  int read_row(int64_t* row);
  void put(int i, void* data, int rank, int64_t* shape, const char* dtype);

  const Call& call_;
  const int table_;
  int count_ = 0;
  std::vector<void*> data_;
  std::vector<int> ranks_;
  std::vector<int64_t*> shapes_;
  std::vector<const char*> dtypes_;
};

}  // namespace llm
