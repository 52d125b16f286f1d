// Penalties, bias and allowed tokens of one row of logits, as worker/sampling_reference.py defines them.
#pragma once

#include <cstddef>

#include "dtype.h"
#include "sample_args.h"

namespace llm {

// Whether any parameter may change the logits of a row.
LLM_SHARED bool is_adjusted(const SampleArgs& args, size_t row);

// Writes the row's adjusted logits to `values` [V]; `counts` [V] is scratch memory.
LLM_SHARED void adjust_logits(const SampleArgs& args, size_t row, float* values, int32_t* counts);

}  // namespace llm
