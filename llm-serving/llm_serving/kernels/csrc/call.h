// One call of an operator by MindSpore: inputs, outputs and workspace as they arrive.
#pragma once

#include <exception>
#include <new>

#include "dtype.h"
#include "floating_mode.h"
#include "profile.h"

namespace llm {

// Status of functions that threw an exception.
constexpr int kThrown = -1;

// Records and logs why the operator or function `name` failed.
void record_failure(const char* name, const char* reason);

// Returns the status that `body` returns, or kThrown with the reason recorded if it throws: no exception may reach
// MindSpore or Python.
template <class Body>
int guarded(const char* name, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    record_failure(name, "there is no memory for what it computes on its way");
  } catch (const std::exception& error) {
    record_failure(name, error.what());
  }
  return kThrown;
}

// Absent optional inputs are null with dtype "none"; scalar arguments are tensors of rank 0.
class Call {
 public:
  Call(const char* op, int count, void** data, int* ranks, int64_t** shapes, const char** dtypes);

  const char* op() const { return op_; }
  int count() const { return count_; }
  bool present(int i) const { return data_[i] != nullptr && dtype(i) != DType::kNone; }
  DType dtype(int i) const { return parse_dtype(dtypes_[i]); }
  size_t element_bytes(int i) const { return element_size(dtype(i), dtypes_[i]); }
  const char* dtype_name(int i) const { return dtypes_[i]; }
  int rank(int i) const { return ranks_[i]; }
  int64_t* shape(int i) const { return shapes_[i]; }
  // Size of axis `axis`; negative axes count from the end.
  size_t dim(int i, int axis) const { return static_cast<size_t>(shapes_[i][axis < 0 ? ranks_[i] + axis : axis]); }
  size_t elements(int i) const;

  template <class T>
  T* data(int i) const {
    return static_cast<T*>(data_[i]);
  }

  // Element `index` of an int32 or int64 tensor.
  int64_t integer(int i, size_t index = 0) const {
    return dtype(i) == DType::kInt32 ? data<const int32_t>(i)[index] : data<const int64_t>(i)[index];
  }
  bool boolean(int i) const { return *data<const bool>(i); }
  float number(int i) const { return *data<const float>(i); }
  bool is_integer(int i) const { return dtype(i) == DType::kInt32 || dtype(i) == DType::kInt64; }

  // Refuses integers of a parameter outside of `least` to before `count`, like `fail`; its type must have been checked.
  int check_within(int i, const char* name, int64_t least, size_t count, const char* of_what) const;

  // Records and logs the reason; returns a non-zero status, which MindSpore reports as an error.
  int fail(const char* format, ...) const __attribute__((format(printf, 2, 3)));

 private:
  const char* op_;
  int count_;
  void** data_;
  int* ranks_;
  int64_t** shapes_;
  const char** dtypes_;
};

// Number of operators called so far; it shows whether MindSpore uses the library.
int64_t num_calls();

// The latest failure in this process.
const char* last_error();

}  // namespace llm

// Declares and opens an operator under the name MindSpore looks up.
#define LLM_OPERATOR(name)                                                                                       \
  static int run_##name(const llm::Call& call);                                                                  \
  LLM_EXPORT int name(int count, void** data, int* ranks, int64_t** shapes, const char** dtypes, void*, void*) { \
    static llm::OperatorClock clock(#name);                                                                      \
    const llm::Timed timed(clock);                                                                               \
    const llm::SubnormalsAsZero mode;                                                                            \
    const llm::Call call(#name, count, data, ranks, shapes, dtypes);                                             \
    return llm::guarded(#name, [&] { return run_##name(call); });                                                \
  }                                                                                                              \
  static int run_##name(const llm::Call& call)
