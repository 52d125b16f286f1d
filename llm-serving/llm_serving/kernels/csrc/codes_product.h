// Products of rows that are codes of 8 bits already with weights of such codes, as operators ask for them.
#pragma once

#include "call.h"
#include "kernels.h"

namespace llm {

// Parameters of a call: x int8 [m, k], weight int8 [n, k], packed or not, and y [m, n].
struct CodesProduct {
  int x, weight, y;
  int scale = -1;      // [n] of floats; -1: 1
  int row_scale = -1;  // [m] of float32; -1: 1
};

// y = (sums of products of codes * scale of the column) * scale of the row, each rounded to float32. A status as
// operators return it.
int multiply_codes(const Call& call, const CodesProduct& product);

}  // namespace llm
