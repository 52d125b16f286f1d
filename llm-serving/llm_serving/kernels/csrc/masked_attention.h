// Attention with a mask. The kernels compute rows that see all keys up to their own; a mask that says so is recognised
// and left to them. Any other mask is computed here, one row after the other.
#pragma once

#include "paged_attention.h"

namespace llm {

// Values that are added to the scores of a row, times `factor`. Row t of `values` belongs to query row t, its columns
// to the keys of that row's request. A tile [width, width] instead is applied along the diagonal of every request: keys
// in squares before the diagonal are visible, those behind it are hidden.
struct AttentionMask {
  const void* values = nullptr;  // null: every row sees all keys of its request
  DType dtype = DType::kNone;
  size_t width = 0;
  float factor = 1.0f;
  bool is_tile = false;
};

// Computes the attention of the rows of a step to the keys of their requests, like `attention`, with a mask. The bits
// of a row depend on the row alone.
void attend_under(const AttentionMask& mask, const AttendArgs& args);

}  // namespace llm
