// Element types of the operators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// A small function of inner loops.
#define LLM_INLINE inline __attribute__((always_inline))
#define LLM_INLINE_LAMBDA __attribute__((always_inline))

// A function that the kernels of an instruction set call, which are a library of their own.
#define LLM_SHARED __attribute__((visibility("default")))

// A function that MindSpore or Python calls.
#define LLM_EXPORT extern "C" __attribute__((visibility("default")))

namespace llm {

enum class DType : uint8_t { kNone, kBool, kInt32, kInt64, kFloat32, kFloat16, kBFloat16, kInt8, kOther };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

DType parse_dtype(const char* name);

// Returns the bytes of one element; 0 for an unknown type.
size_t element_size(DType dtype, const char* name);

// Converts elements to float32, exactly.
void widen(const void* elements, size_t count, DType dtype, float* result);

LLM_INLINE bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

}  // namespace llm
