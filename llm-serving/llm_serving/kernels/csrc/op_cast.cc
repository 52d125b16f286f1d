// Cast between any numeric types except complex ones.
//
// MindSpore's own operator compares all pairs of types at every call: for the few rows of a step that takes a hundred
// times as long as the conversion.
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "call.h"
#include "kernels.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Fewer elements are processed by one thread, which is faster than waking another.
constexpr size_t kElementsPerTask = 16384;

using Convert = void (*)(const void*, void*, size_t);

// Truncates fractions. A number beyond the range of an integer type becomes its limit, NaN becomes 0: C++ leaves both
// undefined, and vectorised loops differ from their remainders.
template <class To, class From>
To converted(From x) {
  if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To> && !std::is_same_v<To, bool>) {
    using Integers = std::numeric_limits<To>;
    constexpr From kEnd = 2 * static_cast<From>(Integers::max() / 2 + 1);
    if (x != x) return 0;
    if (x <= static_cast<From>(Integers::min())) return Integers::min();
    if (x >= kEnd) return Integers::max();
  }
  return static_cast<To>(x);
}

template <class From, class To>
void convert(const void* x, void* y, size_t count) {
  const From* from = static_cast<const From*>(x);
  To* to = static_cast<To*>(y);
  for (size_t i = 0; i < count; i++) to[i] = converted<To>(from[i]);
}

template <class... Types>
struct Conversions {
  using Row = std::array<Convert, sizeof...(Types)>;

  template <class From>
  static constexpr Row row() {
    return {convert<From, Types>...};
  }
  static constexpr std::array<Row, sizeof...(Types)> kOf = {row<Types>()...};
  static constexpr std::array<size_t, sizeof...(Types)> kSizes = {sizeof(Types)...};
};

// float16 and bfloat16 are converted through float32, which holds each exactly.
constexpr const char* kNames[] = {"bool",   "int8",   "int16",  "int32",   "int64",  "uint8",
                                  "uint16", "uint32", "uint64", "float32", "float64"};
using Numbers =
    Conversions<bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, float, double>;
constexpr size_t kNumTypes = sizeof(kNames) / sizeof(kNames[0]);
static_assert(kNumTypes == Numbers::kSizes.size());

size_t type_of(const char* name) {
  size_t type = 0;
  while (type < kNumTypes && std::strcmp(kNames[type], name) != 0) type++;
  return type;
}

bool is_short(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// Calls body(first, count) for parts of `count` elements.
template <class Body>
void in_parts(size_t count, Body body) {
  auto task = [&](size_t i) {
    const size_t first = i * kElementsPerTask;
    body(first, count - first < kElementsPerTask ? count - first : kElementsPerTask);
  };
  parallel_for((count + kElementsPerTask - 1) / kElementsPerTask, task);
}

void widen_all(const void* x, DType dtype, float* y, size_t count) {
  in_parts(count, [&](size_t first, size_t part) {
    widen(static_cast<const char*>(x) + first * sizeof(uint16_t), part, dtype, y + first);
  });
}

void convert_all(const void* x, size_t from, void* y, size_t to, size_t count) {
  in_parts(count, [&](size_t first, size_t part) {
    Numbers::kOf[from][to](static_cast<const char*>(x) + first * Numbers::kSizes[from],
                           static_cast<char*>(y) + first * Numbers::kSizes[to], part);
  });
}

int cast(const Call& call, int y) {
  const size_t count = call.elements(y);
  const size_t float32 = type_of("float32");
  const DType dtype = call.dtype(0), y_dtype = call.dtype(y);
  const size_t from = is_short(dtype) ? float32 : type_of(call.dtype_name(0));
  const size_t to = is_short(y_dtype) ? float32 : type_of(call.dtype_name(y));
  if (from == kNumTypes || to == kNumTypes) {
    return call.fail("%s to %s is no cast of numbers", call.dtype_name(0), call.dtype_name(y));
  }
  if (call.elements(0) != count) return call.fail("the result must have as many elements as the input");
  const void* x = call.data<void>(0);
  std::vector<float> wide, rounded;
  if (is_short(dtype)) {
    if (y_dtype == DType::kFloat32) {
      widen_all(x, dtype, call.data<float>(y), count);
      return 0;
    }
    wide.resize(count);
    widen_all(x, dtype, wide.data(), count);
    x = wide.data();
  }
  if (!is_short(y_dtype)) {
    convert_all(x, from, call.data<void>(y), to, count);
    return 0;
  }
  if (from != float32) {
    rounded.resize(count);
    convert_all(x, from, rounded.data(), float32, count);
    x = rounded.data();
  }
  const size_t columns = call.rank(y) == 0 ? 1 : call.dim(y, -1);
  const size_t rows = count == 0 ? 0 : count / columns;
  kernels().round(
      {static_cast<const float*>(x), nullptr, call.data<void>(y), y_dtype, rows, columns, 0, columns, 1.0f});
  return 0;
}

}  // namespace
}  // namespace llm

// x, optional type | y
LLM_OPERATOR(Cast) {
  if (call.count() < 2) return call.fail("expects at least 2 parameters, got %d", call.count());
  return llm::cast(call, call.count() - 1);
}
