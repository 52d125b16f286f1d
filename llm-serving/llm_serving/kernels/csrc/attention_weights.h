// Attention weights. Those of most rows are computed while the values of earlier rows are multiplied, because
// exponentials use execution units that products hardly use.
#pragma once

#include "attention_items.h"
#include "tile.h"

namespace llm::LLM_ISA {

// Base of an `Ending` that computes the weights of the rows in order, by `Weigher::weigh(row)`.
template <class Weigher>
struct WeighedRows {
  Weigher weigher;
  size_t* next;  // the first row without weights
  size_t end;

  LLM_INLINE void weigh_until(size_t row) const {
    while (*next < row) weigher.weigh((*next)++);
  }
  LLM_INLINE void before_tile(size_t row) const { weigh_until(row); }
  LLM_INLINE void between(size_t segment, size_t k) const {
    // These calls compute the weights of six rows while four groups of tokens are multiplied.
    if (kNative < kLanes || (k != 4 && (k != 12 || segment % 2 == 1))) return;
    if (*next < end) weigher.weigh((*next)++);
  }
};

// Computes weights from scores.
template <class Weight>
struct SoftmaxWeigher {
  const float* scores;     // [rows, kChunkTokens]
  const float* scale;      // [rows], factor of scores, in units of log 2
  const float* reference;  // [rows], largest scaled score so far
  const float* factor;     // [rows], factor of earlier sums
  float* total;            // [rows][16], sums of weights so far
  Weight* weights;         // [rows, kChunkTokens]

  LLM_INLINE void weigh(size_t row) const { weigh<Part::kAll>(row, {0, kChunkTokens}); }

  // Tokens that the row does not see in partly visible groups get the weight zero.
  template <Part kPart>
  LLM_INLINE void weigh(size_t row, const Seen seen) const {
    const float* of_row = scores + row * kChunkTokens;
    Weight* target = weights + row * kChunkTokens;
    const Floats of_scores = broadcast(scale[row]), most = broadcast(reference[row]);
    Floats sum = zeros();
    const size_t end = seen.template end_lane<kPart>();  // stores of weights could change what is read from memory
    // Not fused, so that the exponent of the largest score is zero.
    auto exponent = [&](size_t i) {
      const Floats value = load(of_row + i) * of_scores - most;
      return seen.template keep<kPart>(value, i, -__builtin_inff());
    };
    if constexpr (std::is_same<Weight, BFloat16>::value) {
#pragma GCC unroll 2
      for (size_t i = seen.template first_lane<kPart>() / (2 * kLanes) * (2 * kLanes); i < end; i += 2 * kLanes) {
        const bool has_second = kPart == Part::kAll || i + kLanes < end;
        const Floats second = has_second ? coarse_exp2(exponent(i + kLanes)) : zeros();
        sum = store_and_add(target + i, coarse_exp2(exponent(i)), second, sum);
      }
    } else {
#pragma GCC unroll 4
      for (size_t i = seen.template first_lane<kPart>(); i < end; i += kLanes) {
        store(target + i, exp2(exponent(i)));
        sum = sum + load(target + i);
      }
    }
    float* of_total = total + row * kLanes;
    store(of_total, multiply_add(load(of_total), broadcast(factor[row]), sum));
  }
};

// Element type of bfloat16 values in the cache, for products that compute the weights of the next rows in between.
struct ValueBFloat16 {
  BFloat16 value;
};

// Whether products of values of type `Element` compute the weights of the next rows in between.
template <class Element>
constexpr bool kWeighsBetween = false;
#if defined(__AVX512BF16__) && !defined(LLM_AMX)
template <>
constexpr bool kWeighsBetween<BFloat16> = true;
#endif

template <>
struct Operand<ValueBFloat16> : Operand<BFloat16> {};

// Rescales the sums of earlier chunks and adds the products to them.
template <>
constexpr bool kHasEnding<ValueBFloat16> = true;
template <>
struct Ending<ValueBFloat16> : WeighedRows<SoftmaxWeigher<ActivationOf<BFloat16>>> {
  const float* factor;  // [rows], factor of earlier sums
  float* sums;          // [rows, dim]
  size_t dim;

  LLM_INLINE Floats begin(size_t row, size_t panel) const {
    return load(sums + row * dim + panel * kPanelWidth) * broadcast(factor[row]);
  }

  template <size_t kPanels>
  LLM_INLINE void end(size_t row, size_t panel, const Floats (&found)[kPanels]) const {
    asm("" : "+r"(row));  // or gcc would keep the addresses of `begin` in vector registers
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) store(sums + row * dim + (panel + p) * kPanelWidth, found[p]);
  }
};

}  // namespace llm::LLM_ISA
