// Products by AMX tiles of 16 rows x 64 bytes, of bfloat16 and of 8-bit qvalues, behind the same `multiply` as the
// other instruction sets.
//
// tmm0-3  sums: rows 0-15 and 16-31 by two panels      tmm4-5  activations of those rows      tmm6-7  the two panels
// tdpbf16ps sums the products of a step of 32 inputs (even and odd ones apart) from zero and then adds to the sums, so
// the division of the inputs into steps is part of the order: steps of 32 from the first input on, and one of 16 at the
// end. tdpbusd and tdpbsud add products of up to 64 signed and unsigned qvalues in 32 bits exactly, so any division
// gives the same sums.
//
// LLM_AMX_EMULATED replaces the instructions by loops, so that the rest can be tested on a CPU without AMX.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace llm::LLM_ISA {

// Elements of a row of a tile, and the smallest remainder of bfloat16 elements at the end of a row.
template <class Element>
constexpr size_t kStep = kTileBytes / sizeof(Element);
constexpr size_t kHalfStep = 16;
// Bytes of each column that are adjacent in a panel: pairs of bfloat16, groups of four qvalues.
constexpr size_t kColumnBytes = 4;

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#if defined(LLM_AMX_EMULATED)
struct EmulatedTiles {
  TileConfig config;
  char bytes[8][1024] = {};  // constant, so that no use of a thread checks whether it was initialised
};
inline thread_local EmulatedTiles emulated;

inline void emulated_load(int tile, const void* source, size_t stride) {
  for (size_t row = 0; row < emulated.config.rows[tile]; row++) {
    __builtin_memcpy(emulated.bytes[tile] + row * 64, static_cast<const char*>(source) + row * stride,
                     emulated.config.row_bytes[tile]);
  }
}

inline void emulated_store(int tile, void* target, size_t stride) {
  for (size_t row = 0; row < emulated.config.rows[tile]; row++) {
    __builtin_memcpy(static_cast<char*>(target) + row * stride, emulated.bytes[tile] + row * 64,
                     emulated.config.row_bytes[tile]);
  }
}

inline float emulated_element(int tile, size_t row, size_t index) {
  uint16_t half;
  __builtin_memcpy(&half, emulated.bytes[tile] + row * 64 + index * sizeof(half), sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Sums of the even inputs and of the odd ones, each in ascending order. Columns are innermost and optimised for, since
// tests spend most of their time here.
__attribute__((optimize("O3"))) inline void emulated_multiply(int c, int a, int b) {
  const size_t pairs = emulated.config.rows[b];
  float y[2][kPanelWidth][kPanelWidth];
  for (size_t pair = 0; pair < pairs; pair++) {
    for (size_t column = 0; column < kPanelWidth; column++) {
      for (size_t i = 0; i < 2; i++) y[i][pair][column] = emulated_element(b, pair, 2 * column + i);
    }
  }
  for (size_t row = 0; row < emulated.config.rows[c]; row++) {
    float sums[2][kPanelWidth] = {};
    for (size_t pair = 0; pair < pairs; pair++) {
      for (size_t i = 0; i < 2; i++) {
        const float x = emulated_element(a, row, 2 * pair + i);
        for (size_t column = 0; column < kPanelWidth; column++) {
          sums[i][column] = __builtin_fmaf(x, y[i][pair][column], sums[i][column]);
        }
      }
    }
    float result[kPanelWidth];
    __builtin_memcpy(result, emulated.bytes[c] + row * 64, sizeof(result));
    for (size_t column = 0; column < kPanelWidth; column++) result[column] += sums[0][column] + sums[1][column];
    __builtin_memcpy(emulated.bytes[c] + row * 64, result, sizeof(result));
  }
}

// Products of qvalues of 8 bits: exact.
template <class A, class B>
__attribute__((optimize("O3"))) void emulated_multiply_qvalues(int c, int a, int b) {
  for (size_t row = 0; row < emulated.config.rows[c]; row++) {
    int32_t sums[kPanelWidth];
    __builtin_memcpy(sums, emulated.bytes[c] + row * 64, sizeof(sums));
    for (size_t four = 0; four < emulated.config.rows[b]; four++) {
      for (size_t column = 0; column < kPanelWidth; column++) {
        for (size_t i = 0; i < kColumnBytes; i++) {
          const auto x = static_cast<A>(emulated.bytes[a][row * 64 + kColumnBytes * four + i]);
          sums[column] += x * static_cast<B>(emulated.bytes[b][four * 64 + kColumnBytes * column + i]);
        }
      }
    }
    __builtin_memcpy(emulated.bytes[c] + row * 64, sums, sizeof(sums));
  }
}

#define LLM_TILE_CONFIGURE(config) emulated.config = config
#define LLM_TILE_RELEASE()
#define LLM_TILE_LOAD(tile, source, stride) emulated_load(tile, source, stride)
#define LLM_TILE_STREAM(tile, source, stride) emulated_load(tile, source, stride)
#define LLM_TILE_STORE(tile, target, stride) emulated_store(tile, target, stride)
#define LLM_TILE_ZERO(tile) __builtin_memset(emulated.bytes[tile], 0, sizeof(emulated.bytes[tile]))
#define LLM_TILE_MULTIPLY(c, a, b) emulated_multiply(c, a, b)
#define LLM_TILE_MULTIPLY_QVALUES(c, a, b) emulated_multiply_qvalues<uint8_t, int8_t>(c, a, b)
#define LLM_TILE_MULTIPLY_BLOCKS(c, a, b) emulated_multiply_qvalues<int8_t, uint8_t>(c, a, b)
#else
// Written out because gcc 12's intrinsics do not tell the compiler which memory they read.
#define LLM_TILE_CONFIGURE(config) asm volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define LLM_TILE_RELEASE() asm volatile("tilerelease")
#define LLM_TILE_ADDRESS(memory, stride) "r"(memory), "r"(static_cast<int64_t>(stride))
#define LLM_TILE_LOAD(tile, source, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::LLM_TILE_ADDRESS(source, stride) : "memory")
// Loads what must not evict panels from the first-level cache.
#define LLM_TILE_STREAM(tile, source, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile::LLM_TILE_ADDRESS(source, stride) : "memory")
#define LLM_TILE_STORE(tile, target, stride) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::LLM_TILE_ADDRESS(target, stride) : "memory")
#define LLM_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile::)
#define LLM_TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#define LLM_TILE_MULTIPLY_QVALUES(c, a, b) asm volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#define LLM_TILE_MULTIPLY_BLOCKS(c, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#endif

#define LLM_TILE_ADD(c, a, b)             \
  do {                                    \
    if constexpr (sizeof(Element) == 1) { \
      LLM_TILE_MULTIPLY_QVALUES(c, a, b); \
    } else {                              \
      LLM_TILE_MULTIPLY(c, a, b);         \
    }                                     \
  } while (0)

// Addresses that products of more than 32 rows prefetch, a few lines at each step: many prefetches at once would delay
// the loads of tiles. Sums of the following rows go to the first-level cache; the following two panels, and the rows of
// the following pass, go to the second-level cache.
struct Ahead {
  static constexpr size_t kLine = 64;
  static constexpr size_t kSumLines = 2, kPanelLines = 2, kRowLines = 4;

  const char* sums[2];
  const char* panels[2];
  const char* rows;
  // Bytes from a step to the next. With 0, each step prefetches the same cached lines, which spares a branch.
  size_t sums_step = 0, panels_step = 0, rows_step = 0;

  explicit Ahead(const char* cached) : sums{cached, cached}, panels{cached, cached}, rows(cached) {}

  LLM_INLINE void prefetch() {
#pragma GCC unroll 2
    for (size_t p = 0; p < 2; p++) {
#pragma GCC unroll 2
      for (size_t i = 0; i < kSumLines; i++) __builtin_prefetch(sums[p] + i * kLine);
#pragma GCC unroll 2
      for (size_t i = 0; i < kPanelLines; i++) __builtin_prefetch(panels[p] + i * kLine, 0, 2);
      sums[p] += sums_step;
      panels[p] += panels_step;
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < kRowLines; i++) __builtin_prefetch(rows + i * kLine, 0, 2);
    rows += rows_step;
  }
};

// Sums of up to 32 rows and two panels, and the products to add to them or to zero (see `Product` of tile.h).
template <class Element, class Activation>
struct TileProduct {
  size_t rows;
  bool two_panels;
  const Activation* a;
  size_t a_stride;  // elements from a row to the next
  size_t a_step;    // elements of `a` for each input, at whole steps: 16 in tiles, 1 in rows
  size_t a_high;    // to row 16
  const Element* const* panels;
  const Element* const* next;      // panels that are read afterwards; may be null
  size_t next_first, next_stride;  // at each step, lines next_first, next_first + next_stride .. of them are prefetched
  Ahead* ahead;                    // null for up to 32 rows, and if `a` is not in tiles
  size_t panels_stride;            // from the panels of a segment to those of the next
  size_t segments, inputs;
  float* c;
  size_t c_stride;
  size_t c_panel;
  bool add_to_c;
};

// Configuration of the tiles, cached because loading one takes about as long as a step of products.
struct TileShape {
  size_t rows = 0;
  size_t step_bytes = 0;
};

inline void configure(size_t rows, size_t step_bytes, TileShape& shape) {
  if (shape.rows == rows && shape.step_bytes == step_bytes) return;
  shape = {rows, step_bytes};
  TileConfig config;
  const size_t low = rows < kTileHeight ? rows : kTileHeight;
  const size_t high = rows > kTileHeight ? rows - kTileHeight : 1;
  for (size_t tile = 0; tile < 8; tile++) {
    const bool panel = tile >= 6;
    const bool activations = tile == 4 || tile == 5;
    const bool upper = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = static_cast<uint8_t>(panel ? step_bytes / kColumnBytes : upper ? high : low);
    config.row_bytes[tile] = static_cast<uint16_t>(activations ? step_bytes : kTileBytes);
  }
  LLM_TILE_CONFIGURE(config);
}

template <class Element, class Activation>
void prefetch_step(const TileProduct<Element, Activation>& product, size_t segment, size_t k, size_t step) {
  constexpr size_t kInputs = kColumnBytes / sizeof(Element);
  for (size_t p = 0; p < (product.two_panels ? 2 : 1); p++) {
    const Element* next = product.next[segment * product.panels_stride + p] + k * kPanelWidth;
    for (size_t i = product.next_first * kInputs; i < step; i += product.next_stride * kInputs) {
      __builtin_prefetch(next + i * kPanelWidth);
    }
  }
}

// Adds the inputs from `first` to `last` of every segment, `step` at a time.
template <bool kHigh, bool kTwoPanels, bool kLarge, class Element, class Activation>
LLM_INLINE void add_steps(const TileProduct<Element, Activation>& product, size_t first, size_t last, size_t step) {
  const size_t a_bytes = product.a_stride * sizeof(Activation);
  Ahead ahead = kLarge ? *product.ahead : Ahead(nullptr);
  const size_t a_step = product.a_step * step, panel_step = step * kPanelWidth;
  for (size_t segment = 0; segment < product.segments; segment++) {
    const Activation* low = product.a + segment * product.inputs + first * product.a_step;
    const Activation* high = low + product.a_high;
    const Element* const* panels = product.panels + segment * product.panels_stride;
    const Element* left = panels[0] + first * kPanelWidth;
    const Element* right = panels[kTwoPanels ? 1 : 0] + first * kPanelWidth;
    for (size_t k = first; k < last; k += step) {
      if (!kLarge && product.next != nullptr) prefetch_step(product, segment, k, step);
      if constexpr (kLarge) ahead.prefetch();
      LLM_TILE_LOAD(6, left, 64);
      if constexpr (kLarge) {
        LLM_TILE_STREAM(4, low, a_bytes);
      } else {
        LLM_TILE_LOAD(4, low, a_bytes);
      }
      LLM_TILE_ADD(0, 4, 6);
      if constexpr (kTwoPanels) {
        LLM_TILE_LOAD(7, right, 64);
        LLM_TILE_ADD(1, 4, 7);
      }
      if constexpr (kHigh) {
        if constexpr (kLarge) {
          LLM_TILE_STREAM(5, high, a_bytes);
        } else {
          LLM_TILE_LOAD(5, high, a_bytes);
        }
        LLM_TILE_ADD(2, 5, 6);
        if constexpr (kTwoPanels) LLM_TILE_ADD(3, 5, 7);
      }
      left += panel_step;
      right += panel_step;
      low += a_step;
      high += a_step;
    }
  }
  if constexpr (kLarge) *product.ahead = ahead;
}

// Loads the sums into tiles, or sets them to zero, adds inputs as add_steps does, and stores the sums.
template <class Element, class Activation>
void add_inputs(const TileProduct<Element, Activation>& product, size_t first, size_t last, size_t step, bool add_to_c,
                TileShape& shape) {
  configure(product.rows, step * sizeof(Element), shape);
  const bool high = product.rows > kTileHeight;
  const size_t c_bytes = product.c_stride * sizeof(float);
  float* high_c = product.c + kTileHeight * product.c_stride;
  if (add_to_c) {
    LLM_TILE_LOAD(0, product.c, c_bytes);
    if (product.two_panels) LLM_TILE_LOAD(1, product.c + product.c_panel, c_bytes);
    if (high) LLM_TILE_LOAD(2, high_c, c_bytes);
    if (high && product.two_panels) LLM_TILE_LOAD(3, high_c + product.c_panel, c_bytes);
  } else {
    LLM_TILE_ZERO(0);
    LLM_TILE_ZERO(1);
    LLM_TILE_ZERO(2);
    LLM_TILE_ZERO(3);
  }
  if (high && product.two_panels && product.ahead != nullptr) {
    add_steps<true, true, true>(product, first, last, step);
  } else if (high && product.two_panels) {
    add_steps<true, true, false>(product, first, last, step);
  } else if (high) {
    add_steps<true, false, false>(product, first, last, step);
  } else if (product.two_panels) {
    add_steps<false, true, false>(product, first, last, step);
  } else {
    add_steps<false, false, false>(product, first, last, step);
  }
  LLM_TILE_STORE(0, product.c, c_bytes);
  if (product.two_panels) LLM_TILE_STORE(1, product.c + product.c_panel, c_bytes);
  if (high) LLM_TILE_STORE(2, high_c, c_bytes);
  if (high && product.two_panels) LLM_TILE_STORE(3, high_c + product.c_panel, c_bytes);
}

// For several segments with the inputs of a part of a step each, or of whole steps.
template <class Element, class Activation>
void multiply_by_tiles(const TileProduct<Element, Activation>& product, TileShape& shape) {
  const size_t whole = product.inputs / kStep<Element> * kStep<Element>;
  if (whole > 0) add_inputs(product, 0, whole, kStep<Element>, product.add_to_c, shape);
  if (whole < product.inputs || product.inputs == 0) {
    const size_t left = product.inputs == 0 ? kHalfStep : product.inputs - whole;
    add_inputs(product, whole, product.inputs, left, product.add_to_c || whole > 0, shape);
  }
}

}  // namespace llm::LLM_ISA
