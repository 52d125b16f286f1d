// Low-rank changes of a product: y = base + B (A x), with the matrices of the adapter of each row (Hu et al. 2021).
//
// The rows of one adapter are computed four at a time, so that its matrices are read once for four rows. A sum over the
// columns of x runs in four partial sums of every fourth element, then (first + second) + (third + fourth); a sum over
// the rank runs in order. So the bits of a row depend on the row and its adapter alone.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace llm::LLM_ISA {

// Columns of x that are widened at a time.
constexpr size_t kLoraColumns = 256;
// Columns of y of a work item.
constexpr size_t kLoraOutputs = 512;

// Computes sixteen elements of A x for `count` rows. `panel` is [k, 16].
template <class Element, size_t kRows>
void shrink_rows(const LoraArgs& args, const uint32_t* rows, size_t count, const Element* panel, float* const* shrunk) {
  Floats sums[kRows][4];
  for (size_t i = 0; i < kRows; i++) {
    for (size_t j = 0; j < 4; j++) sums[i][j] = zeros();
  }
  float x[kRows][kLoraColumns] = {};
  for (size_t first = 0; first < args.k; first += kLoraColumns) {
    const size_t columns = args.k - first < kLoraColumns ? args.k - first : kLoraColumns;
    for (size_t i = 0; i < count; i++) {
      const Element* source = static_cast<const Element*>(args.x) + rows[i] * args.x_stride + first;
      for (size_t c = 0; c < columns; c += kLanes) store(x[i] + c, load_first(source + c, columns - c));
    }
    const Element* a = panel + first * kLanes;
    auto add = [&](size_t column, size_t j) {
      const Floats weights = load(a + column * kLanes);
      for (size_t i = 0; i < kRows; i++) sums[i][j] = multiply_add(weights, broadcast(x[i][column]), sums[i][j]);
    };
    size_t column = 0;
    for (; column + 4 <= columns; column += 4) {
      for (size_t j = 0; j < 4; j++) add(column + j, j);
    }
    for (size_t j = 0; column + j < columns; j++) add(column + j, j);
  }
  for (size_t i = 0; i < count; i++) store(shrunk[i], (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]));
}

// Adds B times `shrunk` to columns [first, first + width) of `count` rows. `b` is [rank, b_stride].
template <class Element, size_t kRows>
void expand_rows(const LoraArgs& args, const uint32_t* rows, size_t count, const Element* b, size_t rank,
                 const float* const* shrunk, size_t first, size_t width) {
  constexpr size_t kBlocks = 4;
  for (size_t at = first; at < first + width; at += kBlocks * kLanes) {
    const size_t left = first + width - at;
    const size_t blocks = left >= kBlocks * kLanes ? kBlocks : (left + kLanes - 1) / kLanes;
    Floats sums[kRows][kBlocks];
    for (size_t i = 0; i < kRows; i++) {
      for (size_t j = 0; j < kBlocks; j++) sums[i][j] = zeros();
    }
    for (size_t r = 0; r < rank; r++) {
      for (size_t j = 0; j < blocks; j++) {
        const Floats weights = load(b + r * args.b_stride + at + j * kLanes);
        for (size_t i = 0; i < kRows; i++) sums[i][j] = multiply_add(weights, broadcast(shrunk[i][r]), sums[i][j]);
      }
    }
    for (size_t i = 0; i < count; i++) {
      const Element* base = static_cast<const Element*>(args.base) + rows[i] * args.base_stride + at;
      Element* y = static_cast<Element*>(args.y) + rows[i] * args.y_stride + at;
      for (size_t j = 0; j < blocks; j++) {
        const size_t rest = left - j * kLanes;
        store_first(y + j * kLanes, load_first(base + j * kLanes, rest) + sums[i][j], rest);
      }
    }
  }
}

template <class Element>
void lora_rows(const LoraArgs& args) {
  const size_t panels = args.max_rank / kLanes;
  // Calls body<kRows>(rows, count, slot, rank) for the rows of a work item.
  auto with_rows = [&](size_t item, auto body) {
    const LoraItem& each = args.items[item];
    const auto slot = static_cast<size_t>(each.slot);
    const size_t rank = static_cast<size_t>(args.ranks[slot]);
    const uint32_t* rows = args.rows + each.first;
    each.count == 1 ? body(rows, std::integral_constant<size_t, 1>{}, each.count, slot, rank)
                    : body(rows, std::integral_constant<size_t, kLoraRows>{}, each.count, slot, rank);
  };
  auto shrink = [&](size_t i) {
    const size_t panel = i % panels;
    with_rows(i / panels, [&](const uint32_t* rows, auto size, size_t count, size_t slot, size_t rank) {
      if (panel * kLanes >= rank) return;
      float* shrunk[kLoraRows];
      for (size_t r = 0; r < kLoraRows; r++) {
        shrunk[r] = args.shrunk + rows[r < count ? r : 0] * args.max_rank + panel * kLanes;
      }
      const Element* a = static_cast<const Element*>(args.a) + (slot * panels + panel) * args.k * kLanes;
      shrink_rows<Element, decltype(size)::value>(args, rows, count, a, shrunk);
    });
  };
  parallel_for(args.num_items * panels, shrink);
  const size_t parts = (args.n + kLoraOutputs - 1) / kLoraOutputs;
  auto expand = [&](size_t i) {
    const size_t first = i % parts * kLoraOutputs;
    const size_t width = args.n - first < kLoraOutputs ? args.n - first : kLoraOutputs;
    with_rows(i / parts, [&](const uint32_t* rows, auto size, size_t count, size_t slot, size_t rank) {
      const float* shrunk[kLoraRows];
      for (size_t r = 0; r < kLoraRows; r++) shrunk[r] = args.shrunk + rows[r < count ? r : 0] * args.max_rank;
      const Element* b = static_cast<const Element*>(args.b) + slot * args.max_rank * args.b_stride;
      expand_rows<Element, decltype(size)::value>(args, rows, count, b, rank, shrunk, first, width);
    });
  };
  parallel_for(args.num_items * parts, expand);
}

inline void lora(const LoraArgs& args) {
  with_element(args.dtype, [&](auto tag) { lora_rows<typename decltype(tag)::Element>(args); });
}

}  // namespace llm::LLM_ISA
