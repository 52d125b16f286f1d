// The product at the heart of linear layers and attention: a few rows of activations times a few packed panels.
//
// Every element of the result is one accumulator that takes the inputs in ascending order, whatever the number of rows
// and panels computed beside it. That fixes its bits: tiles of any shape, and sums continued from memory, agree.
#pragma once

#include "kernels.h"
#include "simd.h"
#if defined(LLM_AMX)
#include "amx.h"
#endif

namespace llm::LLM_ISA {

// How an element type is multiplied.
//   Activation   what rows of activations consist of (see `prepare_row`)
//   kInputs      inputs taken at once: neighbours in a packed panel
//   kMultiple    number of inputs is a multiple of this
template <class Element>
struct Operand {
  using Activation = float;
  static constexpr size_t kInputs = 1;
  static constexpr size_t kMultiple = 1;
  struct Panel {
    Floats values;
  };

  static LLM_INLINE Panel load_panel(const Element* panel) { return {load(panel)}; }

  static LLM_INLINE Floats accumulate(const Activation* a, const Panel& b, Floats sum) {
    return multiply_add(broadcast(*a), b.values, sum);
  }
};

#if defined(__AVX512BF16__)
// vdpbf16ps adds the product of the odd inputs, then that of the even ones, to the accumulator; each sum is rounded to
// nearest even, and subnormal inputs, sums and results count as zero.
template <>
struct Operand<BFloat16> {
  using Activation = BFloat16;
  static constexpr size_t kInputs = 2;
#if defined(LLM_AMX)
  static constexpr size_t kMultiple = kHalfStep;
#else
  static constexpr size_t kMultiple = kInputs;
#endif
  struct Panel {
    __m512bh pairs;
  };

  static LLM_INLINE Panel load_panel(const BFloat16* panel) {
    Panel result;
    __builtin_memcpy(&result.pairs, panel, sizeof(result.pairs));
    return result;
  }

  static LLM_INLINE Floats accumulate(const Activation* a, const Panel& b, Floats sum) {
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof(pair));
    sum.part[0] = _mm512_dpbf16_ps(sum.part[0], (__m512bh)_mm512_set1_epi32(pair), b.pairs);
    return sum;
  }
};
#else
template <>
struct Operand<BFloat16> {
  using Activation = float;
  static constexpr size_t kInputs = 2;
  static constexpr size_t kMultiple = 2;
  struct Panel {
    Floats even, odd;
  };

  static LLM_INLINE Panel load_panel(const BFloat16* panel) {
    Panel result;
    LLM_FOR_PARTS {
      NativeUint pairs;
      __builtin_memcpy(&pairs, panel + 2 * i * kNative, sizeof(pairs));
      result.even.part[i] = (NativeFloat)(pairs << 16);
      result.odd.part[i] = (NativeFloat)(pairs & 0xffff0000);
    }
    return result;
  }

  static LLM_INLINE Floats accumulate(const Activation* a, const Panel& b, Floats sum) {
    return multiply_add(broadcast(a[1]), b.odd, multiply_add(broadcast(a[0]), b.even, sum));
  }
};
#endif

template <class Element>
using ActivationOf = typename Operand<Element>::Activation;

// Shape of the largest tile whose accumulators stay in registers.
#if defined(__AVX512F__)
constexpr size_t kTileRows = 6;
constexpr size_t kTilePanels = 4;
#elif defined(__AVX2__)
constexpr size_t kTileRows = 5;
constexpr size_t kTilePanels = 1;
#else
constexpr size_t kTileRows = 2;
constexpr size_t kTilePanels = 1;
#endif

// c [kRows, kPanels * 16] (+)= a [kRows, inputs] * panels; `inputs` is a multiple of Operand::kMultiple.
// Strides of a and c are in elements. `ahead` elements of each panel are prefetched; 0 for none.
template <class Element, size_t kRows, size_t kPanels>
void tile(const ActivationOf<Element>* a, size_t a_stride, const Element* const* panels, size_t inputs, float* c,
          size_t c_stride, bool add_to_c, size_t ahead) {
  using Op = Operand<Element>;
  Floats sum[kRows][kPanels];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) sum[r][p] = add_to_c ? load(c + r * c_stride + p * kPanelWidth) : zeros();
  }
  const Element* panel[kPanels];
#pragma GCC unroll 8
  for (size_t p = 0; p < kPanels; p++) panel[p] = panels[p];
  for (size_t k = 0; k < inputs; k += Op::kInputs) {
    typename Op::Panel b[kPanels];
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      if (ahead > 0) __builtin_prefetch(panel[p] + k * kPanelWidth + ahead);
      b[p] = Op::load_panel(panel[p] + k * kPanelWidth);
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) sum[r][p] = Op::accumulate(a + r * a_stride + k, b[p], sum[r][p]);
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) store(c + r * c_stride + p * kPanelWidth, sum[r][p]);
  }
}

template <class Element, size_t kPanels>
void tile_of(size_t rows, const ActivationOf<Element>* a, size_t a_stride, const Element* const* panels, size_t inputs,
             float* c, size_t c_stride, bool add_to_c, size_t ahead) {
  switch (rows) {
    case 1:
      return tile<Element, 1, kPanels>(a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    case 2:
      return tile<Element, 2, kPanels>(a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    case 3:
      return tile<Element, 3, kPanels>(a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    case 4:
      return tile<Element, 4, kPanels>(a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    case 5:
      return tile<Element, 5, kPanels>(a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    case 6:
      return tile<Element, 6, kPanels>(a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    default:
      return;
  }
}

// All rows, in tiles of nearly equal height; the first brings the panels into the cache.
template <class Element, size_t kPanels>
void tile_rows(size_t rows, const ActivationOf<Element>* a, size_t a_stride, const Element* const* panels,
               size_t inputs, float* c, size_t c_stride, bool add_to_c, size_t ahead) {
  for (size_t tiles = (rows + kTileRows - 1) / kTileRows; tiles > 0; tiles--, ahead = 0) {
    const size_t height = (rows + tiles - 1) / tiles;
    tile_of<Element, kPanels>(height, a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
    a += height * a_stride;
    c += height * c_stride;
    rows -= height;
  }
}

// c [rows, num_panels * 16] (+)= a [rows, inputs] * panels, in tiles.
template <class Element>
void multiply(size_t rows, const ActivationOf<Element>* a, size_t a_stride, const Element* const* panels,
              size_t num_panels, size_t inputs, float* c, size_t c_stride, bool add_to_c, size_t ahead = 0) {
  for (; num_panels >= kTilePanels; num_panels -= kTilePanels, panels += kTilePanels, c += kTilePanels * kPanelWidth) {
    tile_rows<Element, kTilePanels>(rows, a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
  }
  for (; num_panels > 0; num_panels--, panels++, c += kPanelWidth) {
    tile_rows<Element, 1>(rows, a, a_stride, panels, inputs, c, c_stride, add_to_c, ahead);
  }
}

#if defined(LLM_AMX)
template <>
inline void multiply<BFloat16>(size_t rows, const BFloat16* a, size_t a_stride, const BFloat16* const* panels,
                               size_t num_panels, size_t inputs, float* c, size_t c_stride, bool add_to_c, size_t) {
  multiply_by_tiles(rows, a, a_stride, panels, num_panels, inputs, c, c_stride, add_to_c);
}
#endif

LLM_INLINE void to_activations(const BFloat16* source, size_t count, BFloat16* target) {
  __builtin_memcpy(target, source, count * sizeof(BFloat16));
}

LLM_INLINE void to_activations(const float* source, size_t count, float* target) {
  __builtin_memcpy(target, source, count * sizeof(float));
}

template <class Element>
LLM_INLINE void to_activations(const Element* source, size_t count, float* target) {
  for (size_t i = 0; i < count; i += kLanes) store_first(target + i, load_first(source + i, count - i), count - i);
}

}  // namespace llm::LLM_ISA
