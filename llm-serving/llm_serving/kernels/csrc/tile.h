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
//   Activation   what rows of activations consist of (see `to_activations`)
//   kInputs      inputs that are neighbours in a packed panel
//   kFactors     factors they are multiplied as, one after the other
//   kMultiple    number of inputs is a multiple of this
template <class Element>
struct Operand {
  using Activation = float;
  using Factor = Floats;
  static constexpr size_t kInputs = 1;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = 1;

  static LLM_INLINE Factor load_panel(const Element* panel, size_t) { return load(panel); }
  static LLM_INLINE Factor load_activation(const Activation* a, size_t) { return broadcast(*a); }
  static LLM_INLINE Floats accumulate(Factor a, Factor b, Floats sum) { return multiply_add(a, b, sum); }
};

#if defined(__AVX512BF16__) || defined(LLM_AMX)
// vdpbf16ps adds the product of the odd inputs, then that of the even ones, to the accumulator; each sum is rounded to
// nearest even, and subnormal inputs, sums and results count as zero.
template <>
struct Operand<BFloat16> {
  using Activation = BFloat16;
  static constexpr size_t kInputs = 2;
#if defined(LLM_AMX)
  static constexpr size_t kMultiple = kHalfStep;
#else
  using Factor = __m512bh;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = kInputs;

  static LLM_INLINE Factor load_panel(const BFloat16* panel, size_t) {
    Factor result;
    __builtin_memcpy(&result, panel, sizeof(result));
    return result;
  }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t) {
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }

  static LLM_INLINE Floats accumulate(Factor a, Factor b, Floats sum) {
    sum.part[0] = _mm512_dpbf16_ps(sum.part[0], a, b);
    return sum;
  }
#endif
};
#else
// The even inputs of a panel's pairs, then the odd ones: four panels of each fit the registers beside the sums.
template <>
struct Operand<BFloat16> {
  using Activation = float;
  using Factor = Floats;
  static constexpr size_t kInputs = 2;
  static constexpr size_t kFactors = 2;
  static constexpr size_t kMultiple = 2;

  static LLM_INLINE Factor load_panel(const BFloat16* panel, size_t factor) {
    Factor result;
    LLM_FOR_PARTS {
      NativeUint pairs;
      __builtin_memcpy(&pairs, panel + 2 * i * kNative, sizeof(pairs));
      result.part[i] = (NativeFloat)(factor == 0 ? pairs << 16 : pairs & 0xffff0000);
    }
    return result;
  }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t factor) { return broadcast(a[factor]); }
  static LLM_INLINE Floats accumulate(Factor a, Factor b, Floats sum) { return multiply_add(a, b, sum); }
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

// Rows that a tile, or a pair of AMX tiles, computes at once.
#if defined(LLM_AMX)
constexpr size_t kRowMultiple = 2 * kTileHeight;
#else
constexpr size_t kRowMultiple = kTileRows;
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
#pragma GCC unroll 2
      for (size_t factor = 0; factor < Op::kFactors; factor++) {
        typename Op::Factor values[kPanels];
#pragma GCC unroll 8
        for (size_t p = 0; p < kPanels; p++) {
          if (kPrefetch && factor == 0) __builtin_prefetch(next[p] + k * kPanelWidth);
          values[p] = Op::load_panel(b[p] + k * kPanelWidth, factor);
        }
#pragma GCC unroll 8
        for (size_t r = 0; r < kRows; r++) {
          const typename Op::Factor x = Op::load_activation(a + r * product.a_stride + k, factor);
#pragma GCC unroll 8
          for (size_t p = 0; p < kPanels; p++) sum[r][p] = Op::accumulate(x, values[p], sum[r][p]);
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
void tile_panels(const Product<Element>& product, size_t panel, size_t count) {
  if (count == 1) return tile_rows<Element, 1>(product, panel);
#if defined(__AVX512F__)
  if (count == 2) return tile_rows<Element, 2>(product, panel);
  if (count == 3) return tile_rows<Element, 3>(product, panel);
  tile_rows<Element, 4>(product, panel);
#endif
}

// From this number of rows on, panels are widened to float32 once, in the first-level cache, rather than by each tile.
constexpr size_t kUnpackRows = 24;
// Inputs of four panels whose float32 values fill 32 KB.
constexpr size_t kUnpackedInputs = 128;

// Columns of `count` panels from `panel` on, by way of their float32 values: the same products in the same order.
template <class Element>
void tile_unpacked(const Product<Element>& product, size_t panel, size_t count) {
  using Op = Operand<Element>;
  alignas(64) float values[kUnpackedInputs * kTilePanels * kPanelWidth];
  const float* unpacked[kUnpackedInputs * kTilePanels];
  const size_t segments_at_once = product.inputs < kUnpackedInputs ? kUnpackedInputs / product.inputs : 1;
  const size_t inputs_at_once = product.inputs < kUnpackedInputs ? product.inputs : kUnpackedInputs;
  bool add_to_c = product.add_to_c;
  for (size_t segment = 0; segment < product.segments; segment += segments_at_once) {
    const size_t left = product.segments - segment;
    const size_t segments = left < segments_at_once ? left : segments_at_once;
    for (size_t first = 0; first < product.inputs; first += inputs_at_once) {
      const size_t inputs = product.inputs - first < inputs_at_once ? product.inputs - first : inputs_at_once;
      float* target = values;
      for (size_t s = 0; s < segments; s++) {
        for (size_t p = 0; p < count; p++) {
          const size_t at = (segment + s) * product.num_panels + panel + p;
          const Element* source = product.panels[at] + first * kPanelWidth;
          const Element* next = product.next == nullptr ? source : product.next[at] + first * kPanelWidth;
          unpacked[s * count + p] = target;
          for (size_t k = 0; k < inputs; k += Op::kInputs) {
            __builtin_prefetch(next + k * kPanelWidth);
            for (size_t factor = 0; factor < Op::kFactors; factor++, target += kPanelWidth) {
              store(target, Op::load_panel(source + k * kPanelWidth, factor));
            }
          }
        }
      }
      const float* a = product.a + segment * product.inputs + first;
      float* c = product.c + panel * kPanelWidth;
      tile_panels<float>({product.rows, a, product.a_stride, unpacked, count, segments, inputs, c, product.c_stride,
                          add_to_c, nullptr},
                         0, count);
      add_to_c = true;
    }
  }
}

template <class Element>
void multiply(const Product<Element>& product) {
  for (size_t panel = 0; panel < product.num_panels; panel += kTilePanels) {
    const size_t left = product.num_panels - panel;
    const size_t count = left < kTilePanels ? left : kTilePanels;
    if constexpr (sizeof(ActivationOf<Element>) > sizeof(Element)) {
      if (product.rows >= kUnpackRows && product.inputs > 0) {
        tile_unpacked<Element>(product, panel, count);
        continue;
      }
    }
    tile_panels<Element>(product, panel, count);
  }
}

#if defined(LLM_AMX)
template <>
inline void multiply<BFloat16>(const Product<BFloat16>& product) {
  TileShape shape;
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
      part.add_to_c = product.add_to_c;
      multiply_by_tiles(part, shape);
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
