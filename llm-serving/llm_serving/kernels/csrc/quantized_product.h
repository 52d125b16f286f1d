// Operators that multiply rows of 8-bit qvalues by weights of 8-bit qvalues.
#pragma once

#include "call.h"
#include "kernels.h"
#include "parts.h"

namespace llm {

// Parameters of a call: x int8 [m, k], weight int8 [n, k], packed or not, and y [m, n].
struct QValuesProduct {
  int x, weight, y;
  int scale = -1;      // [n] of floats; -1: 1
  int row_scale = -1;  // [m] of float32; -1: 1
};

// y = (sums of products of qvalues * scale of the column) * scale of the row, each rounded to float32. Returns a status
// as operators do.
int multiply_qvalues(const Call& call, const QValuesProduct& product);

// y int32 [m, n] = x int8 [m, k] times the transpose of qvalues [n, k], exact; the weight is packed as W8A8 or
// row-major.
void sum_qvalues(const int8_t* x, size_t m, const Weight& weight, int32_t* y);
void sum_qvalues(const int8_t* x, size_t m, const uint8_t* rows, size_t n, size_t k, int32_t* y);

}  // namespace llm
