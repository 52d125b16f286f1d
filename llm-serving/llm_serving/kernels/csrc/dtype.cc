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

float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(half & 0x7fff) << 13;
  if (rest >= 0x0f800000) return bits_to_float(sign | rest | 0x7f800000);  // infinity, NaN
  // Multiplying by 2^112 moves the exponent bias from 15 to 127 and makes subnormal halves normal.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * 0x1p112f));
}

uint16_t float_to_half(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 2^16 or more
  if (magnitude < 0x38800000) {
    // Adding 0.5 leaves the subnormal half in the low bits, rounded by the adder.
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000));
  }
  const uint32_t rebased = magnitude - 0x38000000;
  return static_cast<uint16_t>(sign | ((rebased + 0xfff + (rebased >> 13 & 1)) >> 13));
}

uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

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

float load_element(const void* data, DType dtype, size_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat16:
      return half_to_float(static_cast<const uint16_t*>(data)[index]);
    case DType::kBFloat16:
      return bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16);
    default:
      return 0.0f;
  }
}

void store_element(void* data, DType dtype, size_t index, float value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = value;
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_half(value);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_bfloat(value);
      break;
    default:
      break;
  }
}

}  // namespace llm
