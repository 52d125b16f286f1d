// Weights in floating point, rounded to qvalues: what formats/quantized_tensor.py does in NumPy, bit by bit.
#pragma once

#include "dtype.h"

namespace llm {

// Rounds rows [n, k] to qvalues of 8 bits, -127 to 127, or of 4, 0 to 15 where 8 stands for 0, with a scale for each
// row and `group` of inputs, [n, k / group], that the largest of them asks for. False if an element is infinite or no
// number.
bool round_to_qvalues(const void* rows, DType dtype, size_t n, size_t k, size_t bits, size_t group, uint8_t* qvalues,
                      float* scale);

}  // namespace llm
