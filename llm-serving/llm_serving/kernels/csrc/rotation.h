// Rotation of rows by Hadamard matrices before they are rounded to qvalues.
//
// A large number is spread over its block, so that one scale for a row loses less of the other numbers (QuaRot,
// Ashkboos et al. 2024). Each stage replaces numbers i and i + stride of a block by their sum and their difference, for
// strides of 1, 2, 4, .. The matrix H of all stages has H * H = block * 1: the product of two rotated rows is `block`
// times the product of the rows before rotation. The bits are those of tests/support/kernels/quantized_products.py on
// every instruction set.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace llm::LLM_ISA {

// The lane whose index differs by `kStride`, for each lane of a register.
template <size_t kStride>
LLM_INLINE NativeFloat exchanged(NativeFloat value) {
#if defined(__clang__)
  NativeFloat result = value;
  for (size_t j = 0; j < kNative; j++) result[j] = value[j ^ kStride];
  return result;
#else
  NativeInt index;
  for (size_t j = 0; j < kNative; j++) index[j] = static_cast<int32_t>(j ^ kStride);
  return __builtin_shuffle(value, index);
#endif
}

// The stage of a stride below sixteen.
template <size_t kStride>
LLM_INLINE Floats lane_stage(Floats value) {
  Floats result;
  LLM_FOR_PARTS {
    if constexpr (kStride >= kNative) {
      constexpr size_t kApart = kStride / kNative;
      const NativeFloat other = value.part[i ^ kApart];
      result.part[i] = (i & kApart) == 0 ? value.part[i] + other : other - value.part[i];
    } else {
      NativeFloat sign;
      for (size_t j = 0; j < kNative; j++) sign[j] = (j & kStride) == 0 ? 1.0f : -1.0f;
      // Rounded once, whether fused or not: products with 1 and -1 are exact.
      result.part[i] = native_multiply_add(value.part[i], sign, exchanged<kStride>(value.part[i]));
    }
  }
  return result;
}

// Rotates a row in blocks of kVectors * 16, which stay in registers.
template <size_t kVectors, class Element>
LLM_INLINE void rotate_blocks(const Element* x, size_t size, float* rotated) {
  for (size_t first = 0; first < size; first += kVectors * kLanes) {
    Floats v[kVectors];
#pragma GCC unroll 8
    for (size_t i = 0; i < kVectors; i++) {
      const Floats value = load(x + first + i * kLanes);
      v[i] = lane_stage<8>(lane_stage<4>(lane_stage<2>(lane_stage<1>(value))));
    }
#pragma GCC unroll 3
    for (size_t stride = 1; stride < kVectors; stride *= 2) {
#pragma GCC unroll 8
      for (size_t i = 0; i < kVectors; i++) {
        if ((i & stride) != 0) continue;
        const Floats a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < kVectors; i++) store(rotated + first + i * kLanes, v[i]);
  }
}

// Rotates a row into `rotated`, which may be x itself.
template <class Element>
void rotate_row(const Element* x, size_t size, float* rotated) {
  switch (rotation_block(size)) {
    case 128:
      return rotate_blocks<8>(x, size, rotated);
    case 64:
      return rotate_blocks<4>(x, size, rotated);
    case 32:
      return rotate_blocks<2>(x, size, rotated);
    case 16:
      return rotate_blocks<1>(x, size, rotated);
    default:
      break;
  }
  for (size_t i = 0; i < size; i += kLanes) store_first(rotated + i, load_first(x + i, size - i), size - i);
}

}  // namespace llm::LLM_ISA
