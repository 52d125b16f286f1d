// Element types of the operators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Also for what files of several instruction sets share: of an instance that is called, the linker would keep one,
// which another CPU cannot run.
#define LLM_INLINE inline __attribute__((always_inline))

namespace llm {

enum class DType : uint8_t { kNone, kBool, kInt32, kInt64, kFloat32, kFloat16, kBFloat16, kInt8, kOther };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

DType parse_dtype(const char* name);

// Bytes of one element; 0 for a type the library does not know.
size_t element_size(DType dtype, const char* name);

// Elements as float32, which holds each exactly.
void widen(const void* elements, size_t count, DType dtype, float* result);

LLM_INLINE bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

}  // namespace llm
