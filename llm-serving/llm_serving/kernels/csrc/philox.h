// Random numbers from a counter, as worker/sampling_reference.py defines them.
#pragma once

#include <cstdint>

namespace llm {

// One number in [0, 1) with 53 random bits for each (seed, position).
double philox_uniform(uint64_t seed, uint32_t position);

}  // namespace llm
