// The matrices of adapters in a product: rows of x with an adapter get x * weight^T + B r, where r = A x, rounded to
// the element type (Hu et al. 2021).
//
// Both products are those of tile.h: the sum of an element of r begins with zero, and the products of B continue the
// sum of x * weight^T. So the bits of a row depend on the row and its adapter alone.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile.h"

namespace llm::LLM_ISA {

// Panels of A that are read together.
constexpr size_t kPanelsOfA = 8;
constexpr size_t kBytesOfAAhead = 1024;

inline size_t rank_of(const AdapterArgs& adapters, size_t slot, size_t part) {
  return static_cast<size_t>(adapters.ranks[slot * adapters.num_parts + part]);
}

// Elements from a row of r to the next. A row has `max_rank` elements for each part.
inline size_t stride_of_r(const AdapterArgs& adapters) { return adapters.num_parts * adapters.max_rank; }

// Computes the elements of r of one part for the rows of a span.
template <class Element>
void multiply_by_a(const LinearArgs& args, const AdapterSpan& span, size_t part) {
  using Activation = ActivationOf<Element>;
  const AdapterArgs& adapters = *args.adapters;
  const auto slot = static_cast<size_t>(span.slot);
  const size_t rank = rank_of(adapters, slot, part);
  if (rank == 0) return;
  const size_t inputs = TiledLayout::padded(args.k, Operand<Element>::kMultiple);
  const size_t height = TiledLayout::padded(args.k, kPanelWidth);  // inputs of a panel in memory
  const TiledLayout layout = args.x_layout.or_rows(args.m, args.k);
  auto* x = static_cast<Activation*>(scratch(Scratch::kPanel, span.count * inputs * sizeof(Activation) + 1));
  const uint32_t* rows = adapters.rows.order + span.first;
  for (size_t i = 0; i < span.count; i++) {
    Activation* target = x + i * inputs;
    layout.for_runs(rows[i], 0, args.k, [&](size_t first, size_t last, size_t at) {
      to_activations(static_cast<const Element*>(args.x) + at, last - first, target + first);
    });
    for (size_t k = args.k; k < inputs; k++) target[k] = Activation{};
  }
  const size_t of_slot = slot * adapters.num_parts + part;
  const auto* a = static_cast<const Element*>(adapters.a) + of_slot * adapters.max_rank * height;
  float sums[kPanelsOfA * kAdapterRows * kPanelWidth];
  for (size_t first = 0; first * kPanelWidth < rank; first += kPanelsOfA) {
    const size_t left = (rank + kPanelWidth - 1) / kPanelWidth - first;
    const size_t count = left < kPanelsOfA ? left : kPanelsOfA;
    const Element *panels[kPanelsOfA], *next[kPanelsOfA];
    for (size_t p = 0; p < count; p++) {
      panels[p] = a + (first + p) * height * kPanelWidth;
      next[p] = panels[p] + kBytesOfAAhead / sizeof(Element);
    }
    Product<Element> product(span.count, x, panels, count, inputs, sums);
    product.next = next;
    multiply(product);
    for (size_t i = 0; i < span.count; i++) {
      Activation* r = static_cast<Activation*>(adapters.r) + rows[i] * stride_of_r(adapters) + part * adapters.max_rank;
      for (size_t p = 0; p < count; p++) {
        Element rounded[kPanelWidth];
        store(rounded, load(sums + (p * span.count + i) * kPanelWidth));
        to_activations(rounded, kPanelWidth, r + (first + p) * kPanelWidth);
      }
    }
  }
}

// Computes r for all rows with an adapter.
template <class Element>
void multiply_by_a(const LinearArgs& args) {
  const AdapterArgs& adapters = *args.adapters;
  auto body = [&](size_t i) {
    multiply_by_a<Element>(args, adapters.rows.spans[i / adapters.num_parts], i % adapters.num_parts);
  };
  parallel_for(adapters.rows.num_spans * adapters.num_parts, body);
}

// Adds B r to the sums [count][rows][16] of a block of rows. `index`: the panels of the weight.
template <class Element>
void add_changes(const LinearArgs& args, size_t row, size_t rows, const size_t* index, size_t count, float* sums) {
  using Activation = ActivationOf<Element>;
  const AdapterArgs& adapters = *args.adapters;
  const size_t all_panels = (args.n + kPanelWidth - 1) / kPanelWidth;
  const size_t size = adapters.max_rank * kPanelWidth;  // of a panel
  const int32_t* slots = adapters.rows.slots + row;
  for (size_t first = 0; first < count;) {
    const auto part = static_cast<size_t>(adapters.parts[index[first]]);
    size_t last = first + 1;
    while (last < count && static_cast<size_t>(adapters.parts[index[last]]) == part) last++;
    for (size_t begin = 0, end = 0; begin < rows; begin = end) {
      for (end = begin + 1; end < rows && slots[end] == slots[begin]; end++) continue;
      if (slots[begin] < 0) continue;
      const auto slot = static_cast<size_t>(slots[begin]);
      const size_t rank = rank_of(adapters, slot, part);
      if (rank == 0) continue;
      const size_t next_slot = end < rows && slots[end] >= 0 ? static_cast<size_t>(slots[end]) : slot;
      const Element *panels[kMaxPanels], *next[kMaxPanels];
      for (size_t p = first; p < last; p++) {
        const auto* b = static_cast<const Element*>(adapters.b) + index[p] * size;
        panels[p - first] = b + slot * all_panels * size;
        next[p - first] = b + next_slot * all_panels * size;
      }
      const size_t inputs = TiledLayout::padded(rank, Operand<Element>::kMultiple);
      const auto* r = static_cast<const Activation*>(adapters.r) + (row + begin) * stride_of_r(adapters);
      Product<Element> product(end - begin, r + part * adapters.max_rank, panels, last - first, inputs,
                               sums + (first * rows + begin) * kPanelWidth);
      product.a_stride = stride_of_r(adapters);
      product.c_panel = rows * kPanelWidth;
      product.add_to_c = true;
      product.next = next_slot == slot ? nullptr : next;
      multiply(product);
    }
    first = last;
  }
}

}  // namespace llm::LLM_ISA
