// Random numbers from a counter, as worker/sampling_reference.py defines them.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace llm {

// One number in [0, 1) with 53 random bits for each (seed, position).
LLM_SHARED double philox_uniform(uint64_t seed, uint32_t position);

}  // namespace llm
