// Attention under a mask. The kernels know rows that see all keys up to their own; a mask that says so is recognised
// and left to them, any other is computed here, one row after the other.
#pragma once

#include "paged_attention.h"

namespace llm {

// What is added to the scores of a row, `factor` times. Row t of `values` belongs to row t of the queries, its columns
// to the keys of that row's request. A tile [width, width] lies along the diagonal of every request instead: keys in
// squares before the diagonal are seen as they are, those behind it are hidden.
struct AttentionMask {
  const void* values = nullptr;  // null: every row sees all keys of its request
  DType dtype = DType::kNone;
  size_t width = 0;
  float factor = 1.0f;
  bool is_tile = false;
};

// Attention of the rows of a step to the keys of their requests, as `attention`, under a mask that has a column for
// each of them. Bits of a row depend on the row alone.
void attend_under(const AttentionMask& mask, const AttendArgs& args);

}  // namespace llm
