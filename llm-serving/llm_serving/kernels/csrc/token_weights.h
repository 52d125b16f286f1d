// Weights of tokens, as worker/logprobs.py defines them: multiples of 2^-33 from 0 to 1, so that float64 sums of
// them are exact and neither the instruction set nor any order of summation can change a choice. No product here is
// fused with a sum.
//
// Arrays of weights are padded with zeros to whole strides.
#pragma once

#include "simd.h"

namespace llm::LLM_ISA {

// Weights that a loop processes together: enough sums side by side to hide the latency of additions.
constexpr size_t kStride = 4 * kLanes;

LLM_INLINE size_t padded_size(size_t size) { return (size + kStride - 1) / kStride * kStride; }

constexpr size_t kHalfNative = kNative / 2;
typedef float HalfFloat __attribute__((vector_size(kHalfNative * 4)));
typedef double NativeDouble __attribute__((vector_size(kHalfNative * 8)));

LLM_INLINE NativeDouble load_doubles(const float* source) {
  HalfFloat values;
  __builtin_memcpy(&values, source, sizeof(values));
  return __builtin_convertvector(values, NativeDouble);
}

// 2^y for y <= 0, rounded to a multiple of 2^-33.
LLM_INLINE NativeFloat native_weight(NativeFloat y) {
  const NativeFloat lowest = native_broadcast(-64.0f);
  const NativeFloat to_integer = native_broadcast(12582912.0f);  // 1.5 * 2^23
  const NativeFloat to_quantum = native_broadcast(0x1p-10f);
  y = y > lowest ? y : lowest;
  // The integer is in the low bits of the sum: shifted to the bits of the exponent it multiplies by 2^integer.
  const NativeFloat rounded = y + to_integer;
  const NativeUint exponent = (NativeUint)rounded << 23;
  const NativeFloat f = y - (rounded - to_integer);
  // ln(2)^k / k!
  NativeFloat p = native_broadcast(1.5252733804059841e-05f);
  p = p * f + native_broadcast(1.5403530393381606e-04f);
  p = p * f + native_broadcast(1.3333558146428441e-03f);
  p = p * f + native_broadcast(9.6181291076284770e-03f);
  p = p * f + native_broadcast(5.5504108664821580e-02f);
  p = p * f + native_broadcast(2.4022650695910072e-01f);
  p = p * f + native_broadcast(6.9314718055994530e-01f);
  p = p * f + native_broadcast(1.0f);
  const NativeFloat power = (NativeFloat)((NativeUint)p + exponent);
  return power < to_quantum ? (power + to_quantum) - to_quantum : power;
}

// Factor from a difference of logits to the exponent of a weight.
LLM_INLINE float weight_scale(float temperature) {
  const float scale = 1.44269504088896340736f / temperature;
  return scale < __FLT_MAX__ ? scale : __FLT_MAX__;
}

// Writes the weights of `values` [size] that are at least `min_p`, 0 for the others.
LLM_INLINE void weigh(const float* values, size_t size, float largest, float scale, float min_p, float* weights) {
  for (size_t i = 0; i < padded_size(size); i += kLanes) {
    const size_t count = i < size ? size - i : 0;
    Floats value = count >= kLanes ? load(values + i) : broadcast(-__builtin_inff());
    if (count > 0 && count < kLanes) value = keep_first(load_first(values + i, count), count, -__builtin_inff());
    for (size_t j = 0; j < kParts; j++) {
      const NativeFloat weight = native_weight((value.part[j] - largest) * scale);
      native_store(weights + i + j * kNative, weight >= min_p ? weight : NativeFloat{});
    }
  }
}

// Returns the sum of the weights that are at least `threshold`; `size` in whole strides.
LLM_INLINE double sum_from(const float* weights, size_t size, float threshold) {
  constexpr size_t kSums = 8;
  const NativeDouble limit = NativeDouble{} + static_cast<double>(threshold);
  NativeDouble sums[kSums] = {};
  for (size_t i = 0; i < size; i += kSums * kHalfNative) {
#pragma GCC unroll 8
    for (size_t j = 0; j < kSums; j++) {
      const NativeDouble weight = load_doubles(weights + i + j * kHalfNative);
      sums[j] += weight >= limit ? weight : NativeDouble{};
    }
  }
  for (size_t j = 1; j < kSums; j++) sums[0] += sums[j];
  double sum = 0;
  for (size_t j = 0; j < kHalfNative; j++) sum += sums[0][j];
  return sum;
}

// Returns the number of weights that are at least `threshold`; `size` in whole strides, `threshold` above 0.
LLM_INLINE double count_from(const float* weights, size_t size, float threshold) {
  NativeInt counts[4] = {};
  for (size_t i = 0; i < size; i += 4 * kNative) {
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; j++) counts[j] -= native_load(weights + i + j * kNative) >= threshold;
  }
  counts[0] += counts[1] + counts[2] + counts[3];
  double count = 0;
  for (size_t j = 0; j < kNative; j++) count += counts[0][j];
  return count;
}

// Returns the first token at which the cumulative weight exceeds `number` (in [0, 1)) times the total, which is above
// 0.
LLM_INLINE size_t draw_token(const float* weights, size_t size, double number) {
  constexpr size_t kBlock = 2 * kStride;
  const double target = number * sum_from(weights, padded_size(size), 0);
  double before = 0;
  size_t begin = 0;
  for (; begin + kBlock < size; begin += kBlock) {
    const double after = before + sum_from(weights + begin, kBlock, 0);
    if (after > target) break;
    before = after;
  }
  for (size_t i = begin; i + 1 < size; i++) {
    before += static_cast<double>(weights[i]);
    if (before > target) return i;
  }
  return size - 1;
}

}  // namespace llm::LLM_ISA
