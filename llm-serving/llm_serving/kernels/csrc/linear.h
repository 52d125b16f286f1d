// y = x * weight^T with packed weights: a unit of work is a few panels and all rows.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile.h"

namespace llm::LLM_ISA {

// Panels of one unit of work; a multiple of kTilePanels.
constexpr size_t kUnitPanels = 4;
// Inputs of one pass over the rows: the panels of a pass (32 KB of bfloat16) stay in the first-level cache.
constexpr size_t kPassInputs = 256;

// Rows whose sums (256 bytes each) stay in the second-level cache.
constexpr size_t kBlockRows = 512;
// Distance of the prefetches in a panel; 1-2 KB hides the latency of memory.
constexpr size_t kBytesAhead = 1024;

// Activations as rows of `stride` elements, `stride` a multiple of Operand::kMultiple with zeros as padding.
template <class Element>
struct Activations {
  const ActivationOf<Element>* data;
  size_t stride;
};

template <class Element>
Activations<Element> prepare_activations(const LinearArgs& args) {
  using Activation = ActivationOf<Element>;
  constexpr bool kSameType = sizeof(Activation) == sizeof(Element);
  constexpr size_t kMultiple = Operand<Element>::kMultiple;
  const size_t stride = (args.k + kMultiple - 1) / kMultiple * kMultiple;
  if (kSameType && stride == args.k) return {static_cast<const Activation*>(args.x), stride};
  auto* rows = static_cast<Activation*>(scratch(Scratch::kActivations, args.m * stride * sizeof(Activation)));
  auto convert = [&](size_t row) {
    to_activations(static_cast<const Element*>(args.x) + row * args.k, args.k, rows + row * stride);
    for (size_t k = args.k; k < stride; k++) rows[row * stride + k] = Activation{};
  };
  if (args.m * args.k < 65536) {
    for (size_t row = 0; row < args.m; row++) convert(row);
  } else {
    parallel_for(args.m, convert);
  }
  return {rows, stride};
}

// A panel of 16 columns and `stride` inputs, padded with zeros where the packed one is smaller.
template <class Element>
const Element* whole_panel(const LinearArgs& args, size_t panel, size_t stride, Element* padded) {
  const size_t first = panel * kPanelWidth;
  const size_t width = args.n - first < kPanelWidth ? args.n - first : kPanelWidth;
  const Element* packed = static_cast<const Element*>(args.weight) + first * args.k;
  if (width == kPanelWidth && stride == args.k) return packed;
  constexpr size_t kInputs = Operand<Element>::kInputs;
  __builtin_memset(static_cast<void*>(padded), 0, stride * kPanelWidth * sizeof(Element));
  const size_t paired = args.k / kInputs * kInputs;
  for (size_t k = 0; k < paired; k += kInputs) {
    __builtin_memcpy(static_cast<void*>(padded + k * kPanelWidth), packed + k * width,
                     width * kInputs * sizeof(Element));
  }
  if (paired < args.k) {
    for (size_t column = 0; column < width; column++) {
      padded[paired * kPanelWidth + column * kInputs] = packed[paired * width + column];
    }
  }
  return padded;
}

template <class Element, class Result>
void write_rows(const float* sums, size_t sums_stride, size_t rows, size_t columns, Result* y, size_t y_stride) {
  for (size_t row = 0; row < rows; row++) {
    for (size_t i = 0; i < columns; i += kLanes) {
      store_first(y + row * y_stride + i, load(sums + row * sums_stride + i), columns - i);
    }
  }
}

// Sums of a block of rows with a few whole panels, in passes over the inputs.
template <class Element>
void sum_products(size_t rows, const ActivationOf<Element>* x, size_t stride, const Element* const* panels,
                  size_t count, float* sums) {
  constexpr size_t kColumns = kUnitPanels * kPanelWidth;
  if (stride == 0) __builtin_memset(sums, 0, rows * kColumns * sizeof(float));
  const size_t pass = rows <= kTileRows ? stride : kPassInputs;
  for (size_t k = 0; k < stride; k += pass) {
    const size_t inputs = stride - k < pass ? stride - k : pass;
    const Element* now[kUnitPanels];
    const Element* ahead[kUnitPanels];
    for (size_t p = 0; p < count; p++) {
      now[p] = panels[p] + k * kPanelWidth;
      ahead[p] = now[p] + kBytesAhead / sizeof(Element);
    }
    multiply<Element>({rows, x + k, stride, now, count, 1, inputs, sums, kColumns, k > 0, ahead});
  }
}

template <class Element, class Result>
void linear_unit(const LinearArgs& args, Activations<Element> x, size_t unit) {
  constexpr size_t kColumns = kUnitPanels * kPanelWidth;
  const size_t first = unit * kUnitPanels;
  const size_t num_panels = (args.n + kPanelWidth - 1) / kPanelWidth - first;
  const size_t count = num_panels < kUnitPanels ? num_panels : kUnitPanels;
  auto* padded = static_cast<Element*>(scratch(Scratch::kPanel, kColumns * x.stride * sizeof(Element)));
  const Element* panels[kUnitPanels];
  for (size_t p = 0; p < count; p++) {
    panels[p] = whole_panel(args, first + p, x.stride, padded + p * kPanelWidth * x.stride);
  }
  const size_t column = first * kPanelWidth;
  const size_t columns = args.n - column < kColumns ? args.n - column : kColumns;
  for (size_t row = 0; row < args.m; row += kBlockRows) {
    const size_t rows = args.m - row < kBlockRows ? args.m - row : kBlockRows;
    auto* sums = static_cast<float*>(scratch(Scratch::kTile, rows * kColumns * sizeof(float)));
    sum_products<Element>(rows, x.data + row * x.stride, x.stride, panels, count, sums);
    write_rows<Element>(sums, kColumns, rows, columns, static_cast<Result*>(args.y) + row * args.n + column, args.n);
  }
}

template <class Element, class Result>
void linear_into(const LinearArgs& args) {
  const Activations<Element> x = prepare_activations<Element>(args);
  auto unit = [&](size_t i) { linear_unit<Element, Result>(args, x, i); };
  parallel_for((args.n + kUnitPanels * kPanelWidth - 1) / (kUnitPanels * kPanelWidth), unit);
}

inline void linear(const LinearArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    if (args.y_dtype == DType::kFloat32) {
      linear_into<Element, float>(args);
    } else {
      linear_into<Element, Element>(args);
    }
  });
}

}  // namespace llm::LLM_ISA
