// Quantization of floating-point weights, equal to formats/quantized_tensor.py bit by bit.
#pragma once

#include "dtype.h"

namespace llm {

// Rounds rows [n, k] to qvalues of 8 bits, -127 to 127, or of 4 bits, 0 to 15 with a zero point of 8, with a scale for
// each row and `group` of inputs, [n, k / group]. With `rotates`, rows are first rotated (rotation.h) and divided by
// the block size, so that their products with rotated activations equal the products without rotation. Returns false if
// an element is infinite or NaN.
bool round_to_qvalues(const void* rows, DType dtype, size_t n, size_t k, size_t bits, size_t group, bool rotates,
                      uint8_t* qvalues, float* scale);

}  // namespace llm
