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

// c [rows, num_panels * 16] (+)= a [rows, segments * inputs] * panels. Strides are in elements.
template <class Element>
struct Product {
  size_t rows;
  const ActivationOf<Element>* a;
  size_t a_stride;
  const Element* const* panels;  // [segments][num_panels], each of `inputs` inputs
  size_t num_panels, segments;
  size_t inputs;  // of a segment; a multiple of Operand::kMultiple
  float* c;
  size_t c_stride;
  bool add_to_c;
  const Element* const* next;  // as panels: what is read after them, to be prefetched meanwhile; null for nothing
};

// The part of a product that begins at `row` and `panel`.
template <class Element, size_t kRows, size_t kPanels, bool kPrefetch>
void tile(const Product<Element>& product, size_t row, size_t panel) {
  using Op = Operand<Element>;
  float* c = product.c + row * product.c_stride + panel * kPanelWidth;
  Floats sum[kRows][kPanels];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      sum[r][p] = product.add_to_c ? load(c + r * product.c_stride + p * kPanelWidth) : zeros();
    }
  }
  const ActivationOf<Element>* a = product.a + row * product.a_stride;
  const Element* const* panels = product.panels + panel;
  const Element* const* next = kPrefetch ? product.next + panel : nullptr;
  for (size_t segment = 0; segment < product.segments; segment++) {
    const Element* b[kPanels];
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) b[p] = panels[p];
    for (size_t k = 0; k < product.inputs; k += Op::kInputs) {
      typename Op::Panel values[kPanels];
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) {
        if (kPrefetch) __builtin_prefetch(next[p] + k * kPanelWidth);
        values[p] = Op::load_panel(b[p] + k * kPanelWidth);
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (size_t p = 0; p < kPanels; p++) {
          sum[r][p] = Op::accumulate(a + r * product.a_stride + k, values[p], sum[r][p]);
        }
      }
    }
    a += product.inputs;
    panels += product.num_panels;
    if (kPrefetch) next += product.num_panels;
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) store(c + r * product.c_stride + p * kPanelWidth, sum[r][p]);
  }
}

template <class Element, size_t kPanels, bool kPrefetch>
void tile_of(size_t height, const Product<Element>& product, size_t row, size_t panel) {
  switch (height) {
    case 1:
      return tile<Element, 1, kPanels, kPrefetch>(product, row, panel);
    case 2:
      return tile<Element, 2, kPanels, kPrefetch>(product, row, panel);
    case 3:
      return tile<Element, 3, kPanels, kPrefetch>(product, row, panel);
    case 4:
      return tile<Element, 4, kPanels, kPrefetch>(product, row, panel);
    case 5:
      return tile<Element, 5, kPanels, kPrefetch>(product, row, panel);
    case 6:
      return tile<Element, 6, kPanels, kPrefetch>(product, row, panel);
    default:
      return;
  }
}

// All rows of a few panels, in tiles of nearly equal height; the first of them prefetches.
template <class Element, size_t kPanels>
void tile_rows(const Product<Element>& product, size_t panel) {
  bool prefetch = product.next != nullptr;
  size_t row = 0;
  for (size_t tiles = (product.rows + kTileRows - 1) / kTileRows; tiles > 0; tiles--, prefetch = false) {
    const size_t height = (product.rows - row + tiles - 1) / tiles;
    if (prefetch) {
      tile_of<Element, kPanels, true>(height, product, row, panel);
    } else {
      tile_of<Element, kPanels, false>(height, product, row, panel);
    }
    row += height;
  }
}

template <class Element>
void multiply(const Product<Element>& product) {
  size_t panel = 0;
  for (; panel + kTilePanels <= product.num_panels; panel += kTilePanels) {
    tile_rows<Element, kTilePanels>(product, panel);
  }
  for (; panel < product.num_panels; panel++) tile_rows<Element, 1>(product, panel);
}

#if defined(LLM_AMX)
template <>
inline void multiply<BFloat16>(const Product<BFloat16>& product) {
  for (size_t row = 0; row < product.rows && !product.add_to_c; row++) {
    __builtin_memset(product.c + row * product.c_stride, 0, product.num_panels * kPanelWidth * sizeof(float));
  }
  for (size_t panel = 0; panel < product.num_panels; panel += 2) {
    for (size_t row = 0; row < product.rows; row += 2 * kTileHeight) {
      const size_t left = product.rows - row;
      TileProduct part;
      part.rows = left < 2 * kTileHeight ? left : 2 * kTileHeight;
      part.two_panels = panel + 1 < product.num_panels;
      part.a = product.a + row * product.a_stride;
      part.a_stride = product.a_stride;
      part.panels = product.panels + panel;
      part.next = product.next != nullptr && row == 0 ? product.next + panel : nullptr;
      part.panels_stride = product.num_panels;
      part.segments = product.segments;
      part.inputs = product.inputs;
      part.c = product.c + row * product.c_stride + panel * kPanelWidth;
      part.c_stride = product.c_stride;
      multiply_by_tiles(part);
    }
  }
  LLM_TILE_RELEASE();
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
