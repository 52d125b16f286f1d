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
    {"bfloat16", DType::kBFloat16, 2}, {"int8", DType::kInt8, 1},       {"uint8", DType::kOther, 1},
    {"int16", DType::kOther, 2},       {"uint16", DType::kOther, 2},    {"uint32", DType::kOther, 4},
    {"uint64", DType::kOther, 8},      {"float64", DType::kOther, 8},   {"complex64", DType::kOther, 8},
    {"complex128", DType::kOther, 16},
};

float weight_only(BFloat16 element) {
  const uint32_t bits = uint32_t{element.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

float weight_only(Float16 element) {
  const uint32_t sign = uint32_t{element.bits} >> 15 << 31, exponent = element.bits >> 10 & 31u;
  const uint32_t fraction = element.bits & 1023u;
  if (exponent == 0) {  // a multiple of the smallest one, 2^-24
    const float size = static_cast<float>(fraction) * 0x1p-24f;
    return sign == 0 ? size : -size;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

template <class T>
void widen_all(const void* elements, size_t count, float* result) {
  const T* each = static_cast<const T*>(elements);
  for (size_t i = 0; i < count; i++) result[i] = weight_only(each[i]);
}

}  // namespace

void widen(const void* elements, size_t count, DType dtype, float* result) {
  if (dtype == DType::kBFloat16) {
    widen_all<BFloat16>(elements, count, result);
  } else if (dtype == DType::kFloat16) {
    widen_all<Float16>(elements, count, result);
  } else {
    std::memcpy(result, elements, count * sizeof(float));
  }
}

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
