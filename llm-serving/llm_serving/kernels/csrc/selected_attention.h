// Attention to latent keys of which each row reads some only (DeepSeek-V3.2, 2025).
#pragma once

#include <cstdint>

#include "paged_attention.h"

namespace llm {

// The keys that rows read: `top_k` positions, ascending, `stride` elements from a row to the next. A row at a position
// below `top_k` reads all keys up to its own, whatever its positions say. A position behind the row's own means its
// own.
struct SelectedKeys {
  const int32_t* positions;
  size_t stride, top_k;
};

// Computes `args`, whose keys are latent and stored, without window, cap, slopes and sinks, and whose result has rows.
// Rows that read all keys are computed as by `attend`. For another row, its keys are copied one after another into a
// cache of its own, so its result depends on itself alone.
void attend_to_selected(const AttendArgs& args, const SelectedKeys& selected);

}  // namespace llm
