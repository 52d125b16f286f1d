// Products of weights in blocks (packed_blocks.h) and rows quantized to 8 bits, with a scale for each 32 inputs.
//
// rows     scale = largest magnitude of the 32 inputs / 127; qvalue = input * (127 / largest), as in quantized_rows.h
// sums     sum of ((qvalue of the weight - zero) * qvalue of the row) over the inputs of a group; exact in 32 bits, so
// in
//          any order
// row sum  sum of the row's qvalues over the inputs of the group
// results  for each group in ascending order, add (sum * scale) * scale of the row; with minima, then subtract
//          minimum * (row sum * scale of the row)
//
// Products and sums in parentheses that are not integers are rounded to float32. The addition and the subtraction are
// fused with their multiplications, so each rounds the total once. Every instruction set except `plain` computes these
// bits. `plain` has no fused multiply-adds: it also rounds each product before it adds it.
// tests/support/kernels/quantized_products.py computes both.
#pragma once

#include "quantized_blocks.h"
#include "wide_tiles.h"
#if defined(LLM_AMX)
#include "amx_blocks.h"
#endif

namespace llm::LLM_ISA {

// ---- Few rows: qvalues are widened in registers ---------------------------------------------------------------------

// Rows whose sums and totals stay in registers beside a widened line.
constexpr size_t kRegisterRows = kNative == kLanes ? 8 : 4;

template <size_t kBits, bool kHasMinima, size_t kRows>
void block_panel(const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x, size_t row,
                 float* totals) {
  constexpr size_t kChains = kRows <= 2 ? 2 : 1;  // sums of a group added up in turns, to hide latency
  const BlockLayout layout(form);
  const size_t rows = x.layout.rows;
  const bool is_half = form.group == kHalfBlock;
  const int32_t* begins = kHasMinima ? nullptr : x.begins_of(form) + row;
  const float* negative_scaled_sums = x.sums_of(form.group).negative_scaled + row;
  const float* row_scales = x.scale + row;
  const int8_t* a[kRows];
  Floats total[kRows];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) {
    a[r] = x.at(row + r, 0);
    total[r] = zeros();
  }
  const size_t block_lines = layout.lines_of_block();
  for (size_t index = 0; index * kChunkInputs < k; index++) {
    const BlockChunk chunk(layout, panel, k, index);
    const GroupReader reader(form, layout, chunk);
    const uint8_t* planes = chunk.planes;
    size_t group = 0;
    const uint8_t* ahead = chunk.planes + kBytesAheadOfBlocks;
    for (size_t block = 0; block < chunk.blocks; block++, planes += layout.plane_bytes, row_scales += rows) {
      Floats sums[kChains][kRows];
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; half++) {
        if (half == 0 || is_half) {
#pragma GCC unroll 8
          for (size_t r = 0; r < kRows; r++) {
            sums[0][r] = broadcast_sum(kHasMinima ? 0 : begins[r]);
            if constexpr (kChains > 1) sums[1][r] = broadcast_sum(0);
          }
        }
        CodeFactor halves[kRows];
#pragma GCC unroll 4
        for (size_t i = 0; i < kHalfLines; i++) {
          const size_t line = half * kHalfLines + i;
          // One prefetch for each line: several at once delay the loads of this block.
          if (line < block_lines) __builtin_prefetch(ahead + line * kLineBytes, 0, 2);
          const CodeFactor values = factors_of<kBits>(planes, line);
#pragma GCC unroll 8
          for (size_t r = 0; r < kRows; r++) {
            const CodeFactor four = broadcast_qvalues(a[r] + line * kFourInputs);
            add_line<kBits>(i, values, four, halves[r], sums[i % kChains][r]);
          }
        }
        if (half == 1 || is_half) {
          const GroupNumbers numbers = reader.numbers(group++);
#pragma GCC unroll 8
          for (size_t r = 0; r < kRows; r++) {
            if constexpr (kChains > 1) sums[0][r] = add_sums(sums[0][r], sums[1][r]);
            total[r] = add_group<kHasMinima>(total[r], sums[0][r], numbers, row_scales[r], negative_scaled_sums[r]);
          }
          if (!kHasMinima) begins += rows;
          negative_scaled_sums += rows;
        }
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; r++) a[r] += kBlockInputs;
      // An 8-bit block with its scales fills more cache lines than kBlockLines.
      for (size_t i = kBlockLines; i < block_lines; i++) __builtin_prefetch(ahead + i * kLineBytes, 0, 2);
      ahead += block_lines * kLineBytes;
    }
  }
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) store(totals + r * kPanelWidth, total[r]);
}

// block_panel for `height` rows, of at most kRows.
template <size_t kBits, bool kHasMinima, size_t kRows = kRegisterRows>
void block_tile(size_t height, const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x,
                size_t row, float* totals) {
  if constexpr (kRows > 1) {
    if (height < kRows) return block_tile<kBits, kHasMinima, kRows - 1>(height, form, k, panel, x, row, totals);
  }
  block_panel<kBits, kHasMinima, kRows>(form, k, panel, x, row, totals);
}

template <size_t kBits, bool kHasMinima>
void block_panel_rows(const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x, size_t row,
                      size_t rows, float* totals) {
  const size_t tiles = (rows + kRegisterRows - 1) / kRegisterRows;
  for (size_t i = 0; i < tiles; i++) {
    const size_t height = (rows + tiles - i - 1) / (tiles - i);
    block_tile<kBits, kHasMinima>(height, form, k, panel, x, row, totals);
    row += height;
    rows -= height;
    totals += height * kPanelWidth;
  }
}

inline void multiply_in_registers(const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x,
                                  size_t row, size_t rows, float* totals) {
  with_bits(form.bits, [&](auto tag) {
    constexpr size_t kBits = decltype(tag)::value;
    if constexpr (kBits <= kMostBitsWithMinima) {
      if (form.has_minima) return block_panel_rows<kBits, true>(form, k, panel, x, row, rows, totals);
    }
    block_panel_rows<kBits, false>(form, k, panel, x, row, rows, totals);
  });
}

// ---- Many rows: qvalues are widened in memory, then multiplied by vector instructions or by AMX tiles ---------------

// Multiplies rows by `count` panels of one form, pass by pass.
inline void multiply_widened(const BlockForm& form, size_t k, const uint8_t* const* panel, size_t count,
                             const QuantizedBlocks& x, size_t row, size_t rows, float* totals) {
  const BlockLayout layout(form);
  const bool uses_amx = x.layout.tile > 0;  // see block_rows
  const size_t blocks = k / kBlockInputs, pass = x.pass / kBlockInputs < blocks ? x.pass / kBlockInputs : blocks;
  const size_t numbers_bytes = pass * layout.block_groups * sizeof(GroupNumbers);
  const size_t panel_bytes = numbers_bytes + pass * kBlockInputs * kPanelWidth;
  auto* memory = static_cast<uint8_t*>(scratch(Scratch::kPanel, count * panel_bytes));
  __builtin_memset(totals, 0, count * rows * kPanelWidth * sizeof(float));
  for (size_t first = 0; first < blocks; first += pass) {
    WidePanels panels = {};
    panels.form = form;
    panels.first_block = first;
    panels.blocks = blocks - first < pass ? blocks - first : pass;
    // The next pass of these panels, or the first pass of the panels behind them.
    const bool is_last = first + panels.blocks == blocks;
    const size_t next_blocks = is_last ? pass : blocks - first - panels.blocks;
    const size_t next_chunks = ((next_blocks < pass ? next_blocks : pass) + kChunkBlocks - 1) / kChunkBlocks;
    panels.next_bytes = next_chunks * layout.chunk_bytes;
    const size_t rows_together = uses_amx ? kRowMultiple : kTileRows;
    const size_t tiles = (rows + rows_together - 1) / rows_together;
    const size_t iterations = tiles * panels.blocks * layout.block_groups;
    panels.group_lines = (panels.next_bytes / kLineBytes + iterations - 1) / iterations;
    for (size_t p = 0; p < count; p++) {
      auto* numbers = reinterpret_cast<GroupNumbers*>(memory + p * panel_bytes);
      uint8_t* qvalues = memory + p * panel_bytes + numbers_bytes;
      panels.qvalues[p] = qvalues;
      const size_t next_chunk = (first + panels.blocks) / kChunkBlocks;
      panels.next[p] = panel[p] + (is_last ? count * layout.panel_bytes(k) : next_chunk * layout.chunk_bytes);
      panels.numbers[p] = numbers;
      for (size_t block = first; block < first + panels.blocks; block += kChunkBlocks) {
        const BlockChunk chunk(layout, panel[p], k, block / kChunkBlocks);
        widen_chunk(form, layout, chunk, qvalues, numbers);
        qvalues += chunk.blocks * kBlockInputs * kPanelWidth;
        numbers += chunk.blocks * layout.block_groups;
      }
    }
#if defined(LLM_AMX)
    if (uses_amx) {
      multiply_amx_tiles(panels, count, x, row, rows, totals);
      continue;
    }
#endif
    if (form.has_minima) {
      multiply_wide_tiles<product_bits(kMostBitsWithMinima), true>(panels, count, x, row, rows, totals);
    } else if (form.bits == 8) {
      multiply_wide_tiles<8, false>(panels, count, x, row, rows, totals);
    } else if (form.bits == 6) {
      multiply_wide_tiles<product_bits(6), false>(panels, count, x, row, rows, totals);
    } else {
      multiply_wide_tiles<product_bits(5), false>(panels, count, x, row, rows, totals);
    }
  }
}

inline void sum_products(const LinearArgs& args, const QuantizedBlocks& x, size_t row, size_t rows,
                         const UnitPanels<BlockByte>& panels, float* sums) {
  if (args.k == 0) {
    __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
    return;
  }
  auto form_of = [&](size_t p) -> const BlockForm& { return block_form(args, panels.index[p]); };
  const bool is_wide = spreads_prefetches<BlockByte>(args.m);
  for (size_t p = 0; p < panels.count;) {
    const BlockForm& form = form_of(p);
    float* totals = sums + p * rows * kPanelWidth;
    if (!is_wide) {
      const auto* panel = reinterpret_cast<const uint8_t*>(panels.data[p++]);
      multiply_in_registers(form, args.k, panel, x, row, rows, totals);
      continue;
    }
    const uint8_t* together[kTilePanels];
    size_t count = 0;
    while (count < kTilePanels && p + count < panels.count && form_of(p + count) == form) {
      together[count] = reinterpret_cast<const uint8_t*>(panels.data[p + count]);
      count++;
    }
    multiply_widened(form, args.k, together, count, x, row, rows, totals);
    p += count;
  }
}

inline void blocks_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    linear_with<Element>(args, block_rows<Element>(args));
  });
}

}  // namespace llm::LLM_ISA
