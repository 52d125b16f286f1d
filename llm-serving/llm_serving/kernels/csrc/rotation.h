// Rotation of rows by Hadamard matrices before they are rounded to qvalues.
//
// A large number is spread over its block, so that one scale for a row loses less of the other numbers (QuaRot,
// Ashkboos et al. 2024). Each stage replaces numbers i and i + stride of a block by their sum and their difference, for
// strides of 1, 2, 4, .. The matrix H of all stages has H * H = block * 1: the product of two rotated rows is `block`
// times that of the rows. The bits are those of kernels/rotation.py on every instruction set.
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
      NativeUint sign;
      for (size_t j = 0; j < kNative; j++) sign[j] = (j & kStride) == 0 ? 0 : 0x80000000u;
      result.part[i] = exchanged<kStride>(value.part[i]) + (NativeFloat)((NativeUint)value.part[i] ^ sign);
    }
  }
  return result;
}

// Rotates rows of `size` numbers in place; `size` is a multiple of `block`, which rotation_block returned.
LLM_INLINE void rotate(float* x, size_t size, size_t block) {
  if (block == 1) return;
  for (size_t i = 0; i < size; i += kLanes) {
    store(x + i, lane_stage<8>(lane_stage<4>(lane_stage<2>(lane_stage<1>(load(x + i))))));
  }
  for (size_t stride = kLanes; stride < block; stride *= 2) {
    for (size_t first = 0; first < size; first += 2 * stride) {
      for (size_t i = first; i < first + stride; i += kLanes) {
        const Floats a = load(x + i), b = load(x + i + stride);
        store(x + i, a + b);
        store(x + i + stride, a - b);
      }
    }
  }
}

// Rotates a row less an offset, which may be null, into `rotated`.
template <class Element>
LLM_INLINE void rotate_row(const Element* x, const float* offset, size_t size, float* rotated) {
  for (size_t i = 0; i < size; i += kLanes) {
    const Floats value = load_first(x + i, size - i);
    store_first(rotated + i, offset == nullptr ? value : value - load_first(offset + i, size - i), size - i);
  }
  rotate(rotated, size, rotation_block(size));
}

}  // namespace llm::LLM_ISA
