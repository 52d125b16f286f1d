// Products of rows and widened panels of blocks by AMX tiles.
//
// A tile could multiply 64 inputs, but a group has only 16 or 32. The sums of a group are stored, and vector
// instructions then scale them and add them to the totals, which takes longer than the products. Below kMinAmxRows,
// vector instructions that also multiply, and so store no sums, are faster (wide_tiles.h).
#pragma once

#include "amx.h"
#include "wide_panels.h"

namespace llm::LLM_ISA {

// Number of groups whose sums the tiles compute at a time. The tiles compute the sums of the next groups before vector
// instructions scale those of the current groups, so that the CPU overlaps the two. Alternating between tile and vector
// instructions every few instructions was slower.
constexpr size_t kGroupsTogether = 2;

// Multiplies up to 32 rows by one or two panels.
class BlockTiles {
 public:
  BlockTiles(const WidePanels& panels, const QuantizedBlocks& x, size_t row, size_t rows, size_t prefetched,
             TileShape& shape)
      : panels_(panels),
        x_(x),
        row_(row),
        rows_(rows),
        group_(panels.form.group),
        block_groups_(kBlockInputs / group_),
        groups_(panels.blocks * block_groups_),
        prefetched_(prefetched),
        low_(x.at(row, panels.first_block * kBlockInputs)),
        high_(low_ + x.layout.row_offset(kTileHeight)) {
    configure(rows, group_, shape);
  }

  // Adds the products with a panel, and the next one if `has_two`, to the totals. `panel_stride`: from the totals of a
  // panel to those of the next.
  void multiply(size_t panel, bool has_two, float* totals, size_t panel_stride) {
    alignas(64) Sums sums[2][kGroupsTogether];  // of the current groups, and of the next ones
    sum_groups(panel, has_two, 0, sums[0]);
    for (size_t group = 0, current = 0; group < groups_; group += kGroupsTogether, current = 1 - current) {
      sum_groups(panel, has_two, group + kGroupsTogether, sums[1 - current]);
      const size_t count = groups_ - group < kGroupsTogether ? groups_ - group : kGroupsTogether;
      for (size_t p = 0; p < (has_two ? 2 : 1); p++) {
        float* to = totals + p * panel_stride;
        if (panels_.form.has_minima) {
          add_groups<true>(count, panel + p, group, sums[current], p, to);
        } else {
          add_groups<false>(count, panel + p, group, sums[current], p, to);
        }
      }
    }
  }

 private:
  // The sums of a group for two panels.
  struct Sums {
    int32_t of_panel[2][kRowMultiple][kPanelWidth];
  };

  // Computes the sums of up to kGroupsTogether groups from `group` on, and of none behind the last one.
  void sum_groups(size_t panel, bool has_two, size_t group, Sums* sums) {
    for (size_t i = 0; i < kGroupsTogether && group + i < groups_; i++) sum_group(panel, has_two, group + i, sums[i]);
  }

  // Computes the sums of a group, and prefetches some of the packed bytes that are widened next.
  void sum_group(size_t panel, bool has_two, size_t group, Sums& result) {
    const size_t at = group / block_groups_ * kTileHeight * kBlockInputs + group % block_groups_ * group_;
    const size_t group_offset = group * group_ * kPanelWidth;
    for (size_t i = 0; i < panels_.group_lines && prefetched_ < panels_.next_bytes; i++, prefetched_ += kLineBytes) {
      __builtin_prefetch(panels_.next[panel] + prefetched_, 0, 2);
      if (has_two) __builtin_prefetch(panels_.next[panel + 1] + prefetched_, 0, 2);
    }
    LLM_TILE_ZERO(0);
    LLM_TILE_ZERO(1);
    LLM_TILE_ZERO(2);
    LLM_TILE_ZERO(3);
    LLM_TILE_LOAD(6, panels_.qvalues[panel] + group_offset, kLineBytes);
    LLM_TILE_LOAD(4, low_ + at, kBlockInputs);
    LLM_TILE_MULTIPLY_BLOCKS(0, 4, 6);
    if (has_two) {
      LLM_TILE_LOAD(7, panels_.qvalues[panel + 1] + group_offset, kLineBytes);
      LLM_TILE_MULTIPLY_BLOCKS(1, 4, 7);
    }
    if (rows_ > kTileHeight) {
      LLM_TILE_LOAD(5, high_ + at, kBlockInputs);
      LLM_TILE_MULTIPLY_BLOCKS(2, 5, 6);
      if (has_two) LLM_TILE_MULTIPLY_BLOCKS(3, 5, 7);
    }
    LLM_TILE_STORE(0, result.of_panel[0], kLineBytes);
    if (has_two) LLM_TILE_STORE(1, result.of_panel[1], kLineBytes);
    if (rows_ > kTileHeight) {
      LLM_TILE_STORE(2, result.of_panel[0][kTileHeight], kLineBytes);
      if (has_two) LLM_TILE_STORE(3, result.of_panel[1][kTileHeight], kLineBytes);
    }
  }

  // Adds `count` groups to the totals of the rows and one panel.
  template <bool kHasMinima>
  void add_groups(size_t count, size_t panel, size_t group, const Sums* sums, size_t p, float* totals) {
    if (count == kGroupsTogether) return add_groups<kHasMinima, kGroupsTogether>(panel, group, sums, p, totals);
    for (size_t i = 0; i < count; i++) add_groups<kHasMinima, 1>(panel, group + i, sums + i, p, totals);
  }

  template <bool kHasMinima, size_t kCount>
  LLM_INLINE void add_groups(size_t panel, size_t group, const Sums* sums, size_t p, float* totals) {
    GroupNumbers numbers[kCount];
    const float *scales[kCount], *negative_scaled_sums[kCount];
    [[maybe_unused]] const int32_t* begins[kCount];
#pragma GCC unroll 8
    for (size_t i = 0; i < kCount; i++) {
      numbers[i] = panels_.numbers[panel][group + i];
      scales[i] = x_.scale + (panels_.first_block + (group + i) / block_groups_) * x_.layout.rows + row_;
      const size_t at = panels_.first_block * block_groups_ + group + i;
      negative_scaled_sums[i] = x_.sums_of(group_).negative_scaled + at * x_.layout.rows + row_;
      if constexpr (!kHasMinima) begins[i] = x_.begins_of(panels_.form) + at * x_.layout.rows + row_;
    }
    for (size_t r = 0; r < rows_; r++) {
      Floats total = load(totals + r * kPanelWidth);
#pragma GCC unroll 8
      for (size_t i = 0; i < kCount; i++) {
        Floats found = load(reinterpret_cast<const float*>(sums[i].of_panel[p][r]));
        if constexpr (!kHasMinima) found = add_sums(found, broadcast_sum(begins[i][r]));
        total = add_group<kHasMinima>(total, found, numbers[i], scales[i][r], negative_scaled_sums[i][r]);
      }
      store(totals + r * kPanelWidth, total);
    }
  }

  const WidePanels& panels_;
  const QuantizedBlocks& x_;
  const size_t row_, rows_, group_, block_groups_, groups_;
  size_t prefetched_;
  const int8_t *low_, *high_;
};

// Multiplies rows by widened panels.
inline void multiply_amx_tiles(const WidePanels& panels, size_t count, const QuantizedBlocks& x, size_t row,
                               size_t rows, float* totals) {
  TileShape shape;
  const size_t panel_stride = rows * kPanelWidth, groups = panels.blocks * kBlockInputs / panels.form.group;
  for (size_t r = 0; r < rows; r += kRowMultiple) {
    const size_t height = rows - r < kRowMultiple ? rows - r : kRowMultiple;
    const size_t prefetched = r / kRowMultiple * groups * panels.group_lines * kLineBytes;
    for (size_t panel = 0; panel < count; panel += 2) {
      BlockTiles tiles(panels, x, row + r, height, prefetched, shape);
      tiles.multiply(panel, panel + 1 < count, totals + panel * panel_stride + r * kPanelWidth, panel_stride);
    }
  }
  LLM_TILE_RELEASE();
}

}  // namespace llm::LLM_ISA
