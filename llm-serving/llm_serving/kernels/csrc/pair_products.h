// Products of rows and panels of bfloat16 in vector registers, for panels that are widened or dequantized there. The
// order of additions, and so the bits, are those of a panel in memory (tile.h, amx.h).
#pragma once

#include "tile.h"

namespace llm::LLM_ISA {

#if defined(__AVX512F__)

// The even and the odd inputs of sixteen pairs.
struct FloatPairs {
  __m512 even, odd;
};

// Pairs of bfloat16 as float32.
LLM_INLINE FloatPairs widened_pairs(__m512i pairs) {
  const __m512i odd = _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
  return {(__m512)_mm512_slli_epi32(pairs, 16), (__m512)odd};
}
#endif

#if defined(LLM_AMX)
#define LLM_PAIR_PRODUCTS
// For one or two rows, this is faster than writing a panel to a buffer for AMX tiles. The order is that of tdpbf16ps:
// in each step of 32 inputs, the products of the even inputs are summed from zero, and so are those of the odd inputs.
// The two sums are added, and the result is added to the total.
struct PairProduct {
  using Activation = BFloat16;
  using Factor = FloatPairs;
  struct Sum {
    __m512 even = {}, odd = {}, total = {};
  };
  static constexpr bool kIsExact = false;

  static LLM_INLINE Sum begin(const int32_t*) { return Sum(); }
  static LLM_INLINE Factor of_pairs(__m512i pairs) { return widened_pairs(pairs); }
  static LLM_INLINE Sum accumulate(Factor a, Factor b, Sum sum) {
    return {_mm512_fmadd_ps(a.even, b.even, sum.even), _mm512_fmadd_ps(a.odd, b.odd, sum.odd), sum.total};
  }
  static LLM_INLINE Sum end_step(Sum sum) {
    return {_mm512_setzero_ps(), _mm512_setzero_ps(), sum.total + (sum.even + sum.odd)};
  }
  static LLM_INLINE Floats total(const Sum& sum) { return {{sum.total}}; }
};

constexpr size_t kPairSteps = kStep<BFloat16>;
// Most rows: three sums for each row and panel must fit the registers.
constexpr size_t kPairRows = 2;
#elif defined(__AVX512BF16__)
#define LLM_PAIR_PRODUCTS
struct PairProduct {
  using Activation = BFloat16;
  using Factor = __m512bh;
  using Sum = Floats;
  static constexpr bool kIsExact = false;

  static LLM_INLINE Sum begin(const int32_t*) { return zeros(); }
  static LLM_INLINE Factor of_pairs(__m512i pairs) { return (__m512bh)pairs; }
  static LLM_INLINE Sum accumulate(Factor a, Factor b, Sum sum) { return Operand<BFloat16>::accumulate(a, b, sum); }
  static LLM_INLINE Sum end_step(Sum sum) { return sum; }
  static LLM_INLINE Floats total(const Sum& sum) { return sum; }
};

constexpr size_t kPairSteps = 0;
constexpr size_t kPairRows = kTileRows;
#endif

#if defined(LLM_PAIR_PRODUCTS)
// A pair of a row's inputs, in all lanes.
LLM_INLINE PairProduct::Factor broadcast_pair(const BFloat16* a) {
  int32_t pair;
  __builtin_memcpy(&pair, a, sizeof(pair));
  return PairProduct::of_pairs(_mm512_set1_epi32(pair));
}
#endif

}  // namespace llm::LLM_ISA
