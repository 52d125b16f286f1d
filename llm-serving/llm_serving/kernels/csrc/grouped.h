// Products of rows with qvalues that have a scale for each column and group of inputs, read straight from memory.
//
// y = sum over groups, in ascending order, of a term computed from the sum over the group's inputs and the group's
// scale
//
// `Op` defines how qvalues are multiplied and terms are added:
// Activation                 type of the activations
// kInputs                    inputs of the sixteen columns of a panel that are adjacent
// kFactors                   factors they are multiplied as, one after the other
// kBits                      bits of a qvalue
// kIsExact                   whether sums are integers, whose order is free; then Sum add(Sum, Sum)
// Sum begin(row sum)         the sum of no inputs
// Zero zero_of(zero)         the form of the zero points of a panel's columns that load_panel uses
// Factor load_panel(qvalues, factor, Zero), load_activation(a, factor); Sum accumulate(a, panel, Sum)
// Floats finish(Sum, scale, before, zero, row sum)
// The bits of an element depend on its own row and column alone.
#pragma once

#include "linear.h"
#include "packed_qvalues.h"

namespace llm::LLM_ISA {

// Number of inputs in a step: Op::end_step(Sum) replaces each sum after each step; the last step of a group may be
// shorter. 0: there are no steps.
template <class Op>
constexpr size_t kStepInputs = 0;

// Largest number of rows of a tile, whose sums stay in registers.
template <class Op>
constexpr size_t kGroupedRows = kTileRows;

template <class Op>
struct GroupedProduct {
  size_t rows;
  const typename Op::Activation* a;  // first row and input
  size_t a_stride;                   // elements from a row to the next
  size_t inputs;                     // a multiple of Op::kInputs
  size_t group;                      // inputs with one scale; the last group may have fewer
  size_t count;                      // number of panels
  const uint8_t* qvalues[kMaxPanels];
  const float* scale[kMaxPanels];   // [groups][16]
  const uint8_t* zero[kMaxPanels];  // likewise; null: no zero points
  const int32_t* row_sums;          // [groups][row_sums_stride], sums of rows of `a` if Op uses them; may be null
  size_t row_sums_stride;
  float* totals;  // [count][rows][16]
  bool add_to_totals;
  size_t panel_bytes;  // bytes from a panel to the next
  size_t groups;       // groups of a whole panel
  size_t after;        // inputs of the panels behind these

  const uint8_t* zero_of(size_t panel, size_t of_group) const {
    return zero[panel] == nullptr ? nullptr : zero[panel] + of_group * kPanelWidth;
  }
  // Returns the sums of the rows from `row` on.
  const int32_t* row_sums_of(size_t row, size_t of_group) const {
    return row_sums == nullptr ? nullptr : row_sums + of_group * row_sums_stride + row;
  }

  // Advances the panels by a pass of inputs, and by its groups.
  void next_pass(size_t inputs_of_pass, size_t groups) {
    for (size_t p = 0; p < count; p++) {
      qvalues[p] += inputs_of_pass * kPanelWidth * Op::kBits / 8;
      scale[p] += groups * kPanelWidth;
      if (zero[p] != nullptr) zero[p] += groups * kPanelWidth;
    }
  }
};

// Inputs for which the distance between qvalues and their prefetches is constant.
constexpr size_t kPrefetchedInputs = 128;
constexpr size_t kGroupedBytesAhead = 2048;
// Groups between the scales in use and those that are prefetched: each is a cache line of a stream of its own.
constexpr size_t kScalesAhead = 2;

template <class Op, size_t kRows, size_t kPanels, bool kPrefetches>
void grouped_tile(const GroupedProduct<Op>& product, size_t row, size_t panel) {
  constexpr size_t kInputBytes = kPanelWidth * Op::kBits / 8;
  // Number of accumulators of an element, used in rotation if the order is free and there would be too few to hide
  // latency.
  constexpr size_t kRotary = Op::kIsExact && kRows * kPanels < kTilePanels ? Op::kFactors : 1;
  static_assert(kRotary <= 2, "two are added up in the end");
  static_assert(Op::kInputs * kInputBytes == 64, "a prefetch brings a line");
  const typename Op::Activation* a = product.a + row * product.a_stride;
  const uint8_t* qvalues[kPanels];
#pragma GCC unroll 8
  for (size_t p = 0; p < kPanels; p++) qvalues[p] = product.qvalues[panel + p];
  float* totals = product.totals + (panel * product.rows + row) * kPanelWidth;
  const size_t to_end = (product.inputs + product.after) * kInputBytes;
  const size_t groups_to_end = (product.inputs + product.after + product.group - 1) / product.group;
  for (size_t first = 0, group = 0; first < product.inputs; group++) {
    const size_t last = product.inputs - first < product.group ? product.inputs : first + product.group;
    const int32_t* row_sums = product.row_sums_of(row, group);
    typename Op::Zero zero[kPanels];
    typename Op::Sum sum[kRotary][kRows][kPanels] = {};
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) zero[p] = Op::zero_of(product.zero_of(panel + p, group));
    if constexpr (kPrefetches) {
      size_t ahead = group + kScalesAhead;
      if (ahead >= groups_to_end) ahead += (kPanels - 1) * product.groups;
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) __builtin_prefetch(product.scale[panel + p] + ahead * kPanelWidth);
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) sum[0][r][p] = Op::begin(row_sums + r);
    }
    while (first < last) {
      const size_t until = last - first < kPrefetchedInputs ? last : first + kPrefetchedInputs;
      // The next panels begin behind the end of these.
      size_t ahead = kGroupedBytesAhead;
      if (first * kInputBytes + ahead >= to_end) ahead += (kPanels - 1) * product.panel_bytes;
      for (; first < until; first += Op::kInputs) {
        if constexpr (kPrefetches) {
#pragma GCC unroll 8
          for (size_t p = 0; p < kPanels; p++) {
            __builtin_prefetch(qvalues[p] + first * kInputBytes + ahead, 0, 2);
          }
        }
#pragma GCC unroll 8
        for (size_t factor = 0; factor < Op::kFactors; factor++) {
          typename Op::Factor values[kPanels];
#pragma GCC unroll 8
          for (size_t p = 0; p < kPanels; p++) {
            values[p] = Op::load_panel(qvalues[p] + first * kInputBytes, factor, zero[p]);
          }
#pragma GCC unroll 8
          for (size_t r = 0; r < kRows; r++) {
            const typename Op::Factor x = Op::load_activation(a + r * product.a_stride + first, factor);
#pragma GCC unroll 8
            for (size_t p = 0; p < kPanels; p++) {
              typename Op::Sum& to = sum[factor % kRotary][r][p];
              to = Op::accumulate(x, values[p], to);
            }
          }
        }
        if constexpr (kStepInputs<Op> > 0) {
          const size_t behind = first + Op::kInputs;
          if (behind % kStepInputs<Op> == 0 || behind == last) {
#pragma GCC unroll 8
            for (size_t r = 0; r < kRows; r++) {
#pragma GCC unroll 8
              for (size_t p = 0; p < kPanels; p++) sum[0][r][p] = Op::end_step(sum[0][r][p]);
            }
          }
        }
      }
    }
    const bool adds = group > 0 || product.add_to_totals;
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      const Floats scale = load(product.scale[panel + p] + group * kPanelWidth);
      const uint8_t* zero_qvalues = product.zero_of(panel + p, group);
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; r++) {
        float* total = totals + (p * product.rows + r) * kPanelWidth;
        const Floats before = adds ? load(total) : zeros();
        if constexpr (kRotary > 1) sum[0][r][p] = Op::add(sum[0][r][p], sum[1][r][p]);
        store(total, Op::finish(sum[0][r][p], scale, before, zero_qvalues, row_sums + r));
      }
    }
  }
}

template <class Op, size_t kPanels, bool kPrefetches>
void grouped_tile_of(size_t height, const GroupedProduct<Op>& product, size_t row, size_t panel) {
  switch (height) {
    case 1:
      return grouped_tile<Op, 1, kPanels, kPrefetches>(product, row, panel);
    case 2:
      return grouped_tile<Op, 2, kPanels, kPrefetches>(product, row, panel);
    default:
      break;
  }
  if constexpr (kGroupedRows<Op> > 2) {
    switch (height) {
      case 3:
        return grouped_tile<Op, 3, kPanels, kPrefetches>(product, row, panel);
      case 4:
        return grouped_tile<Op, 4, kPanels, kPrefetches>(product, row, panel);
      case 5:
        return grouped_tile<Op, 5, kPanels, kPrefetches>(product, row, panel);
      case 6:
        return grouped_tile<Op, 6, kPanels, kPrefetches>(product, row, panel);
      default:
        return;
    }
  }
}

// Multiplies all rows by a few panels, in tiles of nearly equal height; the first tile prefetches what comes next.
template <class Op, size_t kPanels>
void grouped_rows(const GroupedProduct<Op>& product, size_t panel) {
  const size_t tiles = (product.rows + kGroupedRows<Op> - 1) / kGroupedRows<Op>;
  for (size_t i = 0, row = 0; i < tiles; i++) {
    const size_t height = (product.rows - row + tiles - i - 1) / (tiles - i);
    if (i == 0) {
      grouped_tile_of<Op, kPanels, true>(height, product, row, panel);
    } else {
      grouped_tile_of<Op, kPanels, false>(height, product, row, panel);
    }
    row += height;
  }
}

// Multiplies few rows with exact sums by one panel after the other: see is_stream in linear.h.
template <class Op>
void multiply_grouped(const GroupedProduct<Op>& product) {
  const size_t at_once = Op::kIsExact && product.rows <= kTileRows ? 1 : kTilePanels;
  for (size_t panel = 0; panel < product.count; panel += at_once) {
    const size_t left = product.count - panel;
    const size_t panels = left < at_once ? left : at_once;
#if defined(__AVX512F__)
    if (panels == 2) grouped_rows<Op, 2>(product, panel);
    if (panels == 3) grouped_rows<Op, 3>(product, panel);
    if (panels == 4) grouped_rows<Op, 4>(product, panel);
#endif
    if (panels == 1) grouped_rows<Op, 1>(product, panel);
  }
}

// Returns the inputs of a group of a product with `inputs`, including padding if it is the only group.
inline size_t inputs_of_group(const WeightQValues& qvalues, size_t inputs) {
  return qvalues.groups == 1 ? inputs : qvalues.group;
}

// What is the same in all passes over the panels of a unit of work.
template <class Op, class Packed>
GroupedProduct<Op> grouped_product(const LinearArgs& args, const UnitPanels<Packed>& panels, size_t rows,
                                   float* totals) {
  const WeightQValues& qvalues = *args.qvalues;
  GroupedProduct<Op> product = {};
  product.rows = rows;
  product.group = inputs_of_group(qvalues, panels.inputs);
  product.count = panels.count;
  product.totals = totals;
  product.groups = qvalues.groups;
  product.panel_bytes = panel_bytes(qvalues.format, qvalues.bits, args.k);
  for (size_t p = 0; p < panels.count; p++) {
    const size_t at = panels.index[p] * qvalues.groups * kPanelWidth;
    product.qvalues[p] = reinterpret_cast<const uint8_t*>(panels.data[p]);
    product.scale[p] = qvalues.scale + at;
    product.zero[p] = qvalues.zero == nullptr ? nullptr : qvalues.zero + at;
  }
  return product;
}

}  // namespace llm::LLM_ISA
