#include "dtype.h"

namespace llm {
namespace {

struct Name {
  const char* name;
  DType dtype;
  size_t size;
};

constexpr Name kNames[] = {
    {"none", DType::kNone, 0},         {"bool", DType::kBool, 1},       {"int32", DType::kInt32, 4},
    {"int64", DType::kInt64, 8},       {"float32", DType::kFloat32, 4}, {"float16", DType::kFloat16, 2},
    {"bfloat16", DType::kBFloat16, 2}, {"int8", DType::kOther, 1},      {"uint8", DType::kOther, 1},
    {"int16", DType::kOther, 2},       {"uint16", DType::kOther, 2},    {"uint32", DType::kOther, 4},
    {"uint64", DType::kOther, 8},      {"float64", DType::kOther, 8},   {"complex64", DType::kOther, 8},
    {"complex128", DType::kOther, 16},
};

}  // namespace

DType parse_dtype(const char* name) {
  if (name == nullptr) return DType::kNone;
  for (const Name& known : kNames) {
    if (std::strcmp(known.name, name) == 0) return known.dtype;
  }
  return DType::kOther;
}

size_t element_size(DType dtype, const char* name) {
  for (const Name& known : kNames) {
    if (known.dtype == dtype && (name == nullptr || std::strcmp(known.name, name) == 0)) return known.size;
  }
  return 0;
}

}  // namespace llm
