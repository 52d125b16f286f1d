// The inner product kernel of linear layers and attention: a few rows of activations times a few packed panels.
//
// Every element of the result is one accumulator that adds the inputs in ascending order, whatever the number of rows
// and panels computed beside it. So its bits are the same in tiles of any shape, and when sums are continued from
// memory. Sums in integers are exact within a product; sums in float32 also between products.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "simd.h"
#if defined(LLM_AMX)
#include "amx.h"
#endif

namespace llm::LLM_ISA {

// Sums in float32, which continue from those in memory.
struct FloatSums {
  using Sum = Floats;
  static constexpr bool kQuick = false;

  static LLM_INLINE Sum begin(const float* c, bool add_to_c) { return add_to_c ? load(c) : zeros(); }
  static LLM_INLINE void end(Sum sum, float* c, bool, const float*) { store(c, sum); }
};

// How an element type is multiplied.
// Activation   type of the activations (see `to_activations`)
// kInputs      inputs that are adjacent in a packed panel
// kFactors     factors they are multiplied as, one after the other
// kMultiple    number of inputs is a multiple of this
// Sum          form of sixteen sums between `begin` and `end`
// kQuick       products are faster than reading their panels, unless activations and long passes are prefetched
template <class Element>
struct Operand : FloatSums {
  using Activation = float;
  using Factor = Floats;
  static constexpr size_t kInputs = 1;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = 1;

  static LLM_INLINE Factor load_panel(const Element* panel, size_t) { return load(panel); }
  static LLM_INLINE Factor load_activation(const Activation* a, size_t) { return broadcast(*a); }
  static LLM_INLINE Floats accumulate(Factor a, Factor b, Floats sum) { return accumulate_product(a, b, sum); }
};

#if defined(__AVX512BF16__) || defined(LLM_AMX)
// vdpbf16ps adds the product of the odd inputs, then that of the even ones, to the accumulator; each sum is rounded to
// nearest even, and subnormal inputs, sums and results count as zero.
template <>
struct Operand<BFloat16> : FloatSums {
  using Activation = BFloat16;
  static constexpr size_t kInputs = 2;
#if defined(LLM_AMX)
  static constexpr size_t kMultiple = kHalfStep;
#else
  using Factor = __m512bh;
  static constexpr bool kQuick = true;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = kInputs;

  static LLM_INLINE Factor load_panel(const void* panel, size_t) {
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
struct Operand<BFloat16> : FloatSums {
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
  static LLM_INLINE Floats accumulate(Factor a, Factor b, Floats sum) { return accumulate_product(a, b, sum); }
};
#endif

template <class Element>
using ActivationOf = typename Operand<Element>::Activation;

// Shape of the largest tile whose accumulators stay in registers.
#if defined(__AVX512F__)
constexpr size_t kTileRows = 6;
constexpr size_t kTilePanels = 4;
#elif defined(__AVX2__)
constexpr size_t kTileRows = 6;
constexpr size_t kTilePanels = 1;
#else
constexpr size_t kTileRows = 2;
constexpr size_t kTilePanels = 1;
#endif

// Most panels of a product.
constexpr size_t kMaxPanels = 16;

// Rows that a tile, or a pair of AMX tiles, computes together.
#if defined(LLM_AMX)
constexpr size_t kRowMultiple = 2 * kTileHeight;
#else
constexpr size_t kRowMultiple = kTileRows;
#endif

// Whether `multiply` uses AMX tiles for a type. Products of blocks have their own (amx_blocks.h).
template <class Element>
constexpr bool kMultipliesTiles = false;
#if defined(LLM_AMX)
template <>
constexpr bool kMultipliesTiles<BFloat16> = true;
#endif

// Whether the sums of a type are not stored but given to an `Ending`:
// before_tile(end)       is called before the tile of the rows up to `end`
// begin(row, panel)      returns the value from which sixteen sums of a row begin
// between(segment, k)    is called in large tiles after the inputs from `k` on: other work, for units that products do
//                        not use
// end(row, panel, sums)  uses the sums of adjacent panels
template <class Element>
constexpr bool kHasEnding = false;
template <class Element>
struct Ending {};

// c (+)= a [rows, segments * inputs] * panels. Strides are in elements; those of c are of [num_panels][rows][16] unless
// stated otherwise. `Packed` is the type of panels in memory, `Element` the type to which they are widened.
template <class Element, class Packed = Element>
struct Product {
  static constexpr bool kWeightOnly = !std::is_same<Element, Packed>::value;
  // Widened panels are in the first-level cache, so they are as fast.
  static constexpr bool kQuick = kWeightOnly || Operand<Element>::kQuick;

  size_t rows;
  const ActivationOf<Element>* a;
  const Element* const* panels;  // [segments][num_panels], each of `inputs` inputs
  size_t num_panels;
  size_t inputs;  // inputs of a segment; a multiple of Operand::kMultiple
  float* c;
  size_t segments = 1;
  size_t a_stride = inputs;
  size_t a_tile = 0;  // columns of a tile if a is a pass of tiles, a_stride columns wide (see `TiledLayout`)
  size_t c_stride = kPanelWidth;
  size_t c_panel = rows * kPanelWidth;  // elements from the sums of a panel to those of the next
  bool add_to_c = false;
  size_t panels_at_once = kTilePanels;            // panels side by side in registers
  const Packed* const* next = nullptr;            // like panels: read afterwards, to be prefetched; may be null
  const ActivationOf<Element>* a_next = nullptr;  // like `a`: read afterwards; may be null
  const float* row_scales = nullptr;              // [rows], if Operand::end uses them
  const Ending<Element>* ending = nullptr;

  Product(size_t rows, const ActivationOf<Element>* a, const Element* const* panels, size_t num_panels, size_t inputs,
          float* c)
      : rows(rows), a(a), panels(panels), num_panels(num_panels), inputs(inputs), c(c) {}
};

// Whether panels are prefetched into the second-level cache only, even by a tile that is about to read them. AMD CPUs
// without tiles can have more outstanding lines there than in the first-level cache: few rows are multiplied 1.2 to 1.6
// times as fast on Zen 4, and 1.05 times as fast on Zen 3.
#if (defined(__AVX512BF16__) && !defined(LLM_AMX)) || LLM_AVX2_ONLY
constexpr bool kFirstLevelIsNarrow = true;
#else
constexpr bool kFirstLevelIsNarrow = false;
#endif

// The part of a product that begins at `row` and `panel`. Prefetches `kAhead` panels of `next` from `ahead` on. Fast
// products whose sums are stored also prefetch the activations of the following rows, unless the tile prefetches all
// panels: then no tile follows.
template <class Element, class Packed, size_t kRows, size_t kPanels, size_t kAhead>
void tile(const Product<Element, Packed>& product, size_t row, size_t panel, size_t ahead) {
  using Op = Operand<Element>;
  constexpr bool kQuick = Product<Element, Packed>::kQuick;
  constexpr int kLocality = kFirstLevelIsNarrow || (kQuick && kAhead == 1) ? 2 : 3;
  float* c = product.c + row * product.c_stride + panel * product.c_panel;
  typename Op::Sum sum[kRows][kPanels];
  Ending<Element> ending;  // a copy: stores cannot change it
  if constexpr (kHasEnding<Element>) {
    ending = *product.ending;
    ending.before_tile(row + kRows);
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      if constexpr (kHasEnding<Element>) {
        sum[r][p] = ending.begin(row + r, panel + p);
      } else {
        sum[r][p] = Op::begin(c + r * product.c_stride + p * product.c_panel, product.add_to_c);
      }
    }
  }
  const ActivationOf<Element>* a = product.a + row * product.a_stride;
  const Element* const* panels = product.panels + panel;
  const Packed* const* next = kAhead > 0 ? product.next + ahead : nullptr;
  for (size_t segment = 0; segment < product.segments; segment++) {
    const Element* b[kPanels];
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) b[p] = panels[p];
    for (size_t k = 0; k < product.inputs; k += Op::kInputs) {
      if (kQuick && !kHasEnding<Element> && kAhead < kPanels) __builtin_prefetch(a + kRows * (product.a_stride + k));
#pragma GCC unroll 8
      for (size_t p = 0; p < kAhead; p++) __builtin_prefetch(next[p] + k * kPanelWidth, 0, kLocality);
#pragma GCC unroll 2
      for (size_t factor = 0; factor < Op::kFactors; factor++) {
        typename Op::Factor values[kPanels];
#pragma GCC unroll 8
        for (size_t p = 0; p < kPanels; p++) values[p] = Op::load_panel(b[p] + k * kPanelWidth, factor);
#pragma GCC unroll 8
        for (size_t r = 0; r < kRows; r++) {
          const typename Op::Factor x = Op::load_activation(a + r * product.a_stride + k, factor);
#pragma GCC unroll 8
          for (size_t p = 0; p < kPanels; p++) sum[r][p] = Op::accumulate(x, values[p], sum[r][p]);
        }
      }
      if constexpr (kHasEnding<Element> && kRows == kTileRows && kPanels == kTilePanels) ending.between(segment, k);
    }
    a += product.inputs;
    panels += product.num_panels;
    if (kAhead > 0) next += product.num_panels;
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
    if constexpr (kHasEnding<Element>) {
      ending.end(row + r, panel, sum[r]);
      continue;
    }
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      float* target = c + r * product.c_stride + p * product.c_panel;
      Op::end(sum[r][p], target, product.add_to_c, product.row_scales + row + r);
    }
  }
}

template <class Element, class Packed, size_t kPanels, size_t kAhead>
void tile_of(size_t height, const Product<Element, Packed>& product, size_t row, size_t panel, size_t ahead) {
  switch (height) {
    case 1:
      return tile<Element, Packed, 1, kPanels, kAhead>(product, row, panel, ahead);
    case 2:
      return tile<Element, Packed, 2, kPanels, kAhead>(product, row, panel, ahead);
    case 3:
      return tile<Element, Packed, 3, kPanels, kAhead>(product, row, panel, ahead);
    case 4:
      return tile<Element, Packed, 4, kPanels, kAhead>(product, row, panel, ahead);
    case 5:
      return tile<Element, Packed, 5, kPanels, kAhead>(product, row, panel, ahead);
    case 6:
      return tile<Element, Packed, 6, kPanels, kAhead>(product, row, panel, ahead);
    default:
      return;
  }
}

// Whether several tiles share the prefetches of what comes next, so that the first tile must not read it itself.
template <class Element>
constexpr bool spreads_prefetches(size_t rows) {
  return rows > (kMultipliesTiles<Element> ? kRowMultiple : kTileRows);
}

// Multiplies all rows by a few panels, in tiles of nearly equal height. The first tiles prefetch what comes next, as
// few panels each as possible, so that reading memory takes as long as multiplying: many requests at once would stall a
// tile.
template <class Element, class Packed, size_t kPanels>
void tile_rows(const Product<Element, Packed>& product, size_t panel) {
  constexpr size_t kHalf = (kPanels + 1) / 2;
  const size_t tiles = (product.rows + kTileRows - 1) / kTileRows;
  const size_t each = tiles >= kPanels ? 1 : tiles > 1 ? kHalf : kPanels;
  for (size_t i = 0, row = 0, ahead = 0; i < tiles; i++) {
    const size_t height = (product.rows - row + tiles - i - 1) / (tiles - i);
    const size_t left = product.next == nullptr ? 0 : kPanels - ahead;
    const size_t count = left < each ? left : each;
    if (count == 0) {
      tile_of<Element, Packed, kPanels, 0>(height, product, row, panel, 0);
    } else if (count == 1) {
      tile_of<Element, Packed, kPanels, 1>(height, product, row, panel, panel + ahead);
    } else if (count == kHalf) {
      tile_of<Element, Packed, kPanels, kHalf>(height, product, row, panel, panel + ahead);
    } else {
      tile_of<Element, Packed, kPanels, kPanels>(height, product, row, panel, panel + ahead);
    }
    ahead += count;
    row += height;
  }
}

template <class Element, class Packed>
void tile_panels(const Product<Element, Packed>& product, size_t panel, size_t count) {
  if (count == 1) return tile_rows<Element, Packed, 1>(product, panel);
#if defined(__AVX512F__)
  if (count == 2) return tile_rows<Element, Packed, 2>(product, panel);
  if (count == 3) return tile_rows<Element, Packed, 3>(product, panel);
  tile_rows<Element, Packed, 4>(product, panel);
#endif
}

// From this number of rows on, panels are widened to float32 once, in the first-level cache, rather than by each tile.
// Not with AVX2: its tiles widen panels while they wait for multiplications.
constexpr size_t kUnpackRows = LLM_AVX2_ONLY ? SIZE_MAX : 24;

template <class Element>
constexpr bool kWidens = std::is_same<ActivationOf<Element>, float>::value && !std::is_same<Element, float>::value;

template <class Element>
constexpr bool unpacks(size_t rows) {
  return kWidens<Element> && rows >= kUnpackRows;
}

// Inputs of four panels whose float32 values fill 32 KB.
constexpr size_t kUnpackedInputs = 128;

// Computes the columns of `count` panels from `panel` on through their float32 values: the same products in the same
// order.
template <class Element>
void tile_unpacked(const Product<Element>& product, size_t panel, size_t count) {
  using Op = Operand<Element>;
  alignas(64) float values[kUnpackedInputs * kTilePanels * kPanelWidth];
  const float* unpacked[kUnpackedInputs * kTilePanels];
  const Element* next[kUnpackedInputs * kTilePanels];
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
          unpacked[s * count + p] = target;
          if (product.next != nullptr) next[s * count + p] = product.next[at] + first * kPanelWidth;
          for (size_t k = 0; k < inputs; k += Op::kInputs) {
            for (size_t factor = 0; factor < Op::kFactors; factor++, target += kPanelWidth) {
              store(target, Op::load_panel(source + k * kPanelWidth, factor));
            }
          }
        }
      }
      const float* a = product.a + segment * product.inputs + first;
      Product<float, Element> part(product.rows, a, unpacked, count, inputs, product.c + panel * product.c_panel);
      part.segments = segments;
      part.a_stride = product.a_stride;
      part.c_stride = product.c_stride;
      part.c_panel = product.c_panel;
      part.add_to_c = add_to_c;
      part.next = product.next == nullptr ? nullptr : next;
      tile_panels(part, 0, count);
      add_to_c = true;
    }
  }
}

// With sums in vector registers.
template <class Element>
void multiply_vectors(const Product<Element>& product) {
  for (size_t panel = 0; panel < product.num_panels; panel += product.panels_at_once) {
    const size_t left = product.num_panels - panel;
    const size_t count = left < product.panels_at_once ? left : product.panels_at_once;
    if constexpr (kWidens<Element> && kUnpackRows < SIZE_MAX) {
      if (unpacks<Element>(product.rows) && product.inputs > 0) {
        tile_unpacked<Element>(product, panel, count);
        continue;
      }
    }
    tile_panels<Element, Element>(product, panel, count);
  }
}

template <class Element>
void multiply(const Product<Element>& product) {
  multiply_vectors(product);
}

#if defined(LLM_AMX)
// Sets what the product of a block of rows and two panels prefetches. The first block of rows does not prefetch panels,
// because it is still reading its own.
template <class Element>
void look_ahead(const Product<Element>& product, size_t row, size_t panel, const float* c, Ahead& ahead) {
  if (product.add_to_c) {
    const float* sums = c + kRowMultiple * product.c_stride;
    ahead.sums[0] = reinterpret_cast<const char*>(sums);
    ahead.sums[1] = reinterpret_cast<const char*>(sums + product.c_panel);
    ahead.sums_step = Ahead::kSumLines * Ahead::kLine;
  }
  if (row == 0) ahead.panels_step = 0;
  if (row != kRowMultiple || product.next == nullptr) return;
  const size_t after = panel + 2 < product.num_panels ? panel + 2 : 0;
  const Element* const* next = after > 0 ? product.panels + after : product.next;
  ahead.panels[0] = reinterpret_cast<const char*>(next[0]);
  ahead.panels[1] = reinterpret_cast<const char*>(next[after + 1 < product.num_panels ? 1 : 0]);
  ahead.panels_step = Ahead::kPanelLines * Ahead::kLine;
}

// With AMX tiles, in blocks of 32 rows and two panels.
template <class Element>
void multiply_tiles(const Product<Element>& product) {
  TileShape shape;
  const TiledLayout tiles = {product.rows, product.a_stride, product.a_tile};
  const bool in_tiles = product.a_tile > 0, is_large = in_tiles && product.rows > kRowMultiple;
  Ahead ahead(reinterpret_cast<const char*>(product.c));
  if (product.a_next != nullptr) {
    ahead.rows = reinterpret_cast<const char*>(product.a_next);
    ahead.rows_step = Ahead::kRowLines * Ahead::kLine;
  }
  for (size_t panel = 0; panel < product.num_panels; panel += 2) {
    for (size_t row = 0; row < product.rows; row += kRowMultiple) {
      const size_t left = product.rows - row;
      TileProduct<Element, ActivationOf<Element>> part;
      part.rows = left < kRowMultiple ? left : kRowMultiple;
      part.two_panels = panel + 1 < product.num_panels;
      part.a = product.a + tiles.row_offset(row);
      part.a_stride = in_tiles ? product.a_tile : product.a_stride;
      part.a_step = in_tiles ? kTileHeight : 1;
      part.a_high = tiles.row_offset(kTileHeight);
      part.panels = product.panels + panel;
      part.next = product.next == nullptr ? nullptr : product.next + panel;
      part.next_first = row / kRowMultiple;
      part.next_stride = (product.rows + kRowMultiple - 1) / kRowMultiple;
      part.panels_stride = product.num_panels;
      part.segments = product.segments;
      part.inputs = product.inputs;
      part.c = product.c + row * product.c_stride + panel * product.c_panel;
      part.c_stride = product.c_stride;
      part.c_panel = product.c_panel;
      part.add_to_c = product.add_to_c;
      part.ahead = is_large ? &ahead : nullptr;
      if (is_large) look_ahead(product, row, panel, part.c, ahead);
      multiply_by_tiles(part, shape);
    }
  }
  LLM_TILE_RELEASE();
}

template <>
inline void multiply<BFloat16>(const Product<BFloat16>& product) {
  multiply_tiles(product);
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
