// top_k and top_p as a threshold on weights, found by bisection: no sort, and no input that makes it slow.
#pragma once

#include "token_weights.h"

namespace llm::LLM_ISA {

// Bits of a positive float ascend as the float does.
constexpr uint32_t kBelowWeights = 0x2effffff;  // just below 2^-33
constexpr uint32_t kAboveWeights = 0x3f800001;  // just above 1

LLM_INLINE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Copies the weights from `low` to below `high` to `target`, which may be `source`; returns their number, padded with
// zeros to whole strides.
LLM_INLINE size_t select_weights(const float* source, size_t size, float low, float high, float* target) {
  size_t count = 0;
#if defined(__AVX512F__)
  for (size_t i = 0; i < size; i += kLanes) {
    const __m512 value = _mm512_loadu_ps(source + i);
    const __mmask16 inside = _mm512_cmp_ps_mask(value, _mm512_set1_ps(low), _CMP_GE_OQ) &
                             _mm512_cmp_ps_mask(value, _mm512_set1_ps(high), _CMP_LT_OQ);
    _mm512_storeu_ps(target + count, _mm512_maskz_compress_ps(inside, value));
    count += static_cast<size_t>(__builtin_popcount(inside));
  }
#else
  for (size_t i = 0; i < size; i++) {
    const float value = source[i];
    target[count] = value;
    count += static_cast<size_t>((value >= low) & (value < high));
  }
#endif
  const size_t padded = padded_size(count);
  for (size_t i = count; i < padded; i++) target[i] = 0;
  return padded;
}

struct Threshold {
  float weight;  // smallest weight that is kept
  double above;  // measure of the weights above it
};

// Finds the largest threshold from which on the weights measure at least `wanted`; below every weight if they never do.
// Changes `candidates`.
template <class Measure>
LLM_INLINE Threshold find_threshold(float* candidates, size_t size, double wanted, Measure measure) {
  constexpr int kStepsBetweenSelections = 4;
  uint32_t low = kBelowWeights;
  uint32_t high = kAboveWeights;
  double above = 0;
  double dropped = 0;  // measure of the removed candidates above `high`
  for (int step = 1; high - low > 1; step++) {
    const uint32_t middle = low + (high - low) / 2;
    const double reached = dropped + measure(candidates, size, float_of(middle));
    if (reached >= wanted) {
      low = middle;
    } else {
      high = middle;
      above = reached;
    }
    if (step % kStepsBetweenSelections == 0 && size > kStride) {
      size = select_weights(candidates, size, float_of(low), float_of(high), candidates);
      dropped = above;
    }
  }
  return {float_of(low), above};
}

// Sets the weights below `threshold` to 0, and all but the first `num_equal` equal to it.
LLM_INLINE void keep_from(float* weights, size_t size, float threshold, size_t num_equal) {
  size_t equal = 0;
  NativeInt matches = {};
  for (size_t i = 0; i < padded_size(size); i += kNative) {
    const NativeFloat weight = native_load(weights + i);
    matches -= weight == threshold;
    native_store(weights + i, weight >= threshold ? weight : NativeFloat{});
  }
  for (size_t j = 0; j < kNative; j++) equal += static_cast<size_t>(matches[j]);
  for (size_t i = size; equal > num_equal; equal--) {
    while (weights[--i] != threshold) {
    }
    weights[i] = 0;
  }
}

// Keeps the `count` largest weights, of equal ones the lowest ids. `room` is as large as `weights`.
LLM_INLINE void keep_top_k(float* weights, size_t size, size_t count, float* room) {
  if (count >= size) return;
  const size_t candidates = select_weights(weights, padded_size(size), float_of(kBelowWeights), 2.0f, room);
  const double wanted = static_cast<double>(count);
  auto measure = [](const float* from, size_t n, float least) { return count_from(from, n, least); };
  const Threshold found = find_threshold(room, candidates, wanted, measure);
  keep_from(weights, size, found.weight, count - static_cast<size_t>(found.above));
}

// Keeps the fewest of the largest weights whose sum is at least `share` (below 1) of the total.
LLM_INLINE void keep_top_p(float* weights, size_t size, double share, float* room) {
  const size_t candidates = select_weights(weights, padded_size(size), float_of(kBelowWeights), 2.0f, room);
  const double wanted = share * sum_from(room, candidates, 0);
  auto measure = [](const float* from, size_t n, float least) { return sum_from(from, n, least); };
  const Threshold found = find_threshold(room, candidates, wanted, measure);
  // The quotient may be off by its rounding; the products and sums are exact.
  const double each = found.weight;
  double num_equal = static_cast<double>(static_cast<int64_t>((wanted - found.above) / each));
  while (found.above + num_equal * each < wanted) num_equal += 1;
  while (num_equal > 1 && found.above + (num_equal - 1) * each >= wanted) num_equal -= 1;
  keep_from(weights, size, found.weight, static_cast<size_t>(num_equal));
}

}  // namespace llm::LLM_ISA
