// Weights [n, k] in the order the products read them.
//
// Panels of 16 output features, each panel k-major: element (row, col) of panel p is feature 16 p + col, and
//   float32, float16   [k][16]          one register of features for each input
//   bfloat16           [k / 2][16][2]   pairs of inputs, as vdpbf16ps and the AMX tiles want them
// A last panel of fewer features has that many columns in place of 16, and an odd last input of bfloat16 a row without
// pairs, so a packed weight takes exactly the n * k elements of the original.
#pragma once

#include "dtype.h"

namespace llm {

// Packs `source` (row-major) into `target`, which must not overlap it.
void pack_weight(const void* source, void* target, DType dtype, size_t n, size_t k);

// Reads feature `row` of a packed weight back as k contiguous elements.
void unpack_row(const void* packed, void* target, DType dtype, size_t n, size_t k, size_t row);

// Which tensors are packed: MindSpore hands the kernels a pointer and a shape only.
void register_packed(const void* data, DType dtype, size_t n, size_t k);
void release_packed(const void* data);
bool is_packed(const void* data, DType dtype, size_t n, size_t k);

}  // namespace llm
