// Products of rows and widened panels of blocks in vector registers.
#pragma once

#include "wide_panels.h"

namespace llm::LLM_ISA {

// Panels that a tile multiplies together: the totals and sums of a tile stay in registers.
#if defined(__AVX512F__)
constexpr size_t kWidePanels = 2;
#else
constexpr size_t kWidePanels = 1;
#endif

// Multiplies a few rows by the `kPanels` panels that begin at `panel`, and adds the products to the totals. `kBits`: as
// product_bits returns it.
template <size_t kBits, bool kHasMinima, size_t kRows, size_t kPanels>
void wide_tile(const WidePanels& panels, size_t panel, const QuantizedBlocks& x, size_t row, float* totals,
               size_t panel_stride, size_t prefetched) {
  const size_t rows = x.layout.rows, stride = x.layout.width;
  const bool is_half = panels.form.group == kHalfBlock;
  const size_t group_bytes = (is_half ? kHalfLines : kBlockLines) * kLineBytes;
  const size_t first_sum = panels.first_block * (is_half ? 2 : 1) * rows + row;
  const int32_t* begins = kHasMinima ? nullptr : x.begins_of(panels.form) + first_sum;
  const float* negative_scaled_sums = x.sums_of(panels.form.group).negative_scaled + first_sum;
  const float* row_scales = x.scale + panels.first_block * rows + row;
  const int8_t* a = x.at(row, panels.first_block * kBlockInputs);
  const uint8_t* qvalues[kPanels];
  const GroupNumbers* numbers[kPanels];
  Floats total[kRows][kPanels];
#pragma GCC unroll 8
  for (size_t p = 0; p < kPanels; p++) {
    qvalues[p] = panels.qvalues[panel + p];
    numbers[p] = panels.numbers[panel + p];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) total[r][p] = load(totals + p * panel_stride + r * kPanelWidth);
  }
  const uint8_t* const end = qvalues[0] + panels.blocks * kBlockLines * kLineBytes;
  for (bool is_first_half = true; qvalues[0] < end; is_first_half = !is_first_half) {
    for (size_t i = 0; i < panels.group_lines && prefetched < panels.next_bytes; i++, prefetched += kLineBytes) {
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) __builtin_prefetch(panels.next[panel + p] + prefetched, 0, 2);
    }
    Floats sums[kRows][kPanels];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) {
      const Floats begin = broadcast_sum(kHasMinima ? 0 : begins[r]);
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) sums[r][p] = begin;
    }
    for (const uint8_t* until = qvalues[0] + group_bytes; qvalues[0] < until;) {
      CodeFactor halves[kRows][kPanels];
#pragma GCC unroll 4
      for (size_t line = 0; line < kHalfLines; line++, a += kFourInputs) {
        CodeFactor values[kPanels];
#pragma GCC unroll 8
        for (size_t p = 0; p < kPanels; p++) {
          values[p] = load_qvalues(qvalues[p]);
          qvalues[p] += kLineBytes;
        }
#pragma GCC unroll 8
        for (size_t r = 0; r < kRows; r++) {
          const CodeFactor four = broadcast_qvalues(a + r * stride);
#pragma GCC unroll 8
          for (size_t p = 0; p < kPanels; p++) add_line<kBits>(line, values[p], four, halves[r][p], sums[r][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      // A load for each vector, as in load_qvalues: g++ copies the struct through memory.
      const auto* of_group = reinterpret_cast<const float*>(numbers[p]++);
      const GroupNumbers group = {load(of_group), load(of_group + kPanelWidth)};
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; r++) {
        total[r][p] = add_group<kHasMinima>(total[r][p], sums[r][p], group, row_scales[r], negative_scaled_sums[r]);
      }
    }
    if (!kHasMinima) begins += rows;
    negative_scaled_sums += rows;
    if (!is_half || !is_first_half) row_scales += rows;
  }
#pragma GCC unroll 8
  for (size_t p = 0; p < kPanels; p++) {
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) store(totals + p * panel_stride + r * kPanelWidth, total[r][p]);
  }
}

template <size_t kBits, bool kHasMinima, size_t kPanels>
void wide_tile_of(size_t height, const WidePanels& panels, size_t panel, const QuantizedBlocks& x, size_t row,
                  float* totals, size_t panel_stride, size_t prefetched) {
  switch (height) {
    case 1:
      return wide_tile<kBits, kHasMinima, 1, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 2:
      return wide_tile<kBits, kHasMinima, 2, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 3:
      return wide_tile<kBits, kHasMinima, 3, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 4:
      return wide_tile<kBits, kHasMinima, 4, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 5:
      return wide_tile<kBits, kHasMinima, 5, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 6:
      return wide_tile<kBits, kHasMinima, 6, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    default:
      return;
  }
}

// Multiplies rows by widened panels, in tiles of nearly equal height.
template <size_t kBits, bool kHasMinima>
void multiply_wide_tiles(const WidePanels& panels, size_t count, const QuantizedBlocks& x, size_t row, size_t rows,
                         float* totals) {
  const size_t tiles = (rows + kTileRows - 1) / kTileRows, panel_stride = rows * kPanelWidth;
  const size_t groups = panels.blocks * kBlockInputs / panels.form.group;
  for (size_t i = 0, r = 0; i < tiles; i++) {
    const size_t height = (rows - r + tiles - i - 1) / (tiles - i);
    const size_t prefetched = i * groups * panels.group_lines * kLineBytes;
    size_t panel = 0;
    for (; panel + kWidePanels <= count; panel += kWidePanels) {
      float* to = totals + panel * panel_stride + r * kPanelWidth;
      wide_tile_of<kBits, kHasMinima, kWidePanels>(height, panels, panel, x, row + r, to, panel_stride, prefetched);
    }
    if (panel < count) {
      float* to = totals + panel * panel_stride + r * kPanelWidth;
      wide_tile_of<kBits, kHasMinima, 1>(height, panels, panel, x, row + r, to, panel_stride, prefetched);
    }
    r += height;
  }
}

}  // namespace llm::LLM_ISA
