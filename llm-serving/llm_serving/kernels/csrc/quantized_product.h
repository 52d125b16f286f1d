// Products of rows that are qvalues of 8 bits already with weights of such qvalues, as operators ask for them.
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

// y = (sums of products of qvalues * scale of the column) * scale of the row, each rounded to float32. A status as
// operators return it.
int multiply_qvalues(const Call& call, const QValuesProduct& product);

// y int32 [m, n] = x int8 [m, k] times the transpose of qvalues [n, k], exact: of a packed weight kept as W8A8, or of
// rows.
void sum_qvalues(const int8_t* x, size_t m, const Weight& weight, int32_t* y);
void sum_qvalues(const int8_t* x, size_t m, const uint8_t* rows, size_t n, size_t k, int32_t* y);

}  // namespace llm
