// Layout of rows that a product reads part by part.
#pragma once

#include "dtype.h"

namespace llm {

// Rows of an AMX tile, and bytes of each.
constexpr size_t kTileHeight = 16;
constexpr size_t kTileBytes = 64;

// A multiple of every pass width except that of all columns.
constexpr size_t kMaxPassWidth = 1024;

// Rows in the order in which a product reads them: `width` columns of every row, then the next columns of every row.
// With all columns as the width, this is row-major. With `tile` above 0, 16 rows x `tile` columns within a pass are
// contiguous, followed by the next tile of the same rows; partial tiles take the memory of whole ones. {}: row-major.
struct TiledLayout {
  size_t rows = 0;
  size_t width = 0;
  size_t tile = 0;

  LLM_INLINE TiledLayout or_rows(size_t count, size_t columns) const {
    return width > 0 ? *this : TiledLayout{count, columns};
  }

  // Offset of a row within a pass.
  LLM_INLINE size_t row_offset(size_t row) const {
    if (tile == 0) return row * width;
    return row / kTileHeight * kTileHeight * padded(width, tile) + row % kTileHeight * tile;
  }
  LLM_INLINE size_t column_offset(size_t column) const {
    return tile > 0 ? column / tile * tile * kTileHeight + column % tile : column;
  }

  // Offset of an element.
  LLM_INLINE size_t at(size_t row, size_t column) const {
    const size_t pass = row_offset(tile > 0 ? padded(rows, kTileHeight) : rows);
    return column / width * pass + row_offset(row) + column_offset(column % width);
  }

  // Calls body(first, last, at) for contiguous runs of the columns from `first` to `last` of a row, where `at` is the
  // offset of a run.
  template <class Body>
  LLM_INLINE void for_runs(size_t row, size_t first, size_t last, Body body) const {
    if (first >= last) return;
    size_t column = first % width;
    for (size_t begin = at(row, first) - column_offset(column); first < last;) {
      const size_t in_tile = tile > 0 ? tile - column % tile : width;
      const size_t left = width - column < last - first ? width - column : last - first;
      const size_t count = left < in_tile ? left : in_tile;
      body(first, first + count, begin + column_offset(column));
      first += count;
      column += count;
      if (column == width) {
        column = 0;
        begin = at(row, first);
      }
    }
  }

  // Elements that the largest layout takes.
  LLM_INLINE static size_t max_elements(size_t count, size_t columns) {
    return padded(count, kTileHeight) * padded(columns, kMaxPassWidth);
  }

  LLM_INLINE static size_t padded(size_t count, size_t multiple) {
    return (count + multiple - 1) / multiple * multiple;
  }
};

}  // namespace llm
