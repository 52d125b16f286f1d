// How rows lie that a product reads part by part.
#pragma once

#include "dtype.h"

namespace llm {

// Of an AMX tile of 16-bit numbers.
constexpr size_t kTileHeight = 16;
constexpr size_t kTileWidth = 32;

// A multiple of every width of passes but that of all columns.
constexpr size_t kMostPassWidth = 1024;

// Rows in the order in which a product reads them: `width` columns of every row, then the next columns of every row.
// With all columns as the width, rows as usual. `tiles`: within a pass, 16 rows x 32 columns each lie together, and
// those of the same rows behind one another; tiles that are not full take the memory of whole ones. {}: rows as usual.
struct Passes {
  size_t rows = 0;
  size_t width = 0;
  bool tiles = false;

  LLM_INLINE Passes or_rows(size_t count, size_t columns) const { return width > 0 ? *this : Passes{count, columns}; }

  // Within a pass.
  LLM_INLINE size_t row_offset(size_t row) const {
    if (!tiles) return row * width;
    return row / kTileHeight * kTileHeight * padded(width, kTileWidth) + row % kTileHeight * kTileWidth;
  }
  LLM_INLINE size_t column_offset(size_t column) const {
    return tiles ? column / kTileWidth * kTileWidth * kTileHeight + column % kTileWidth : column;
  }

  // Where an element lies.
  LLM_INLINE size_t at(size_t row, size_t column) const {
    const size_t pass = row_offset(tiles ? padded(rows, kTileHeight) : rows);
    return column / width * pass + row_offset(row) + column_offset(column % width);
  }

  // Calls body(first, last, at) for runs of the columns from `first` to `last` of a row, each of which begins at `at`.
  template <class Body>
  LLM_INLINE void for_runs(size_t row, size_t first, size_t last, Body body) const {
    if (first >= last) return;
    size_t column = first % width;
    for (size_t begin = at(row, first) - column_offset(column); first < last;) {
      const size_t in_tile = tiles ? kTileWidth - column % kTileWidth : width;
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

  // No order of rows takes more elements.
  LLM_INLINE static size_t most_elements(size_t count, size_t columns) {
    return padded(count, kTileHeight) * padded(columns, kMostPassWidth);
  }

  LLM_INLINE static size_t padded(size_t count, size_t multiple) {
    return (count + multiple - 1) / multiple * multiple;
  }
};

}  // namespace llm
