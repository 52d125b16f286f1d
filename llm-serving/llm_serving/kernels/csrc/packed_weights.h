// Weights [n, k] in the order in which products read them.
//
// Panels of 16 output features, each panel k-major: element (row, col) of panel p is feature 16 p + col, and
// float32, float16   [k][16]          one register of features for each input
// bfloat16           [k / 2][16][2]   pairs of inputs, for vdpbf16ps and the AMX tiles
// A last panel of fewer features has that many columns instead of 16, and an odd last input of bfloat16 is a row
// without pairs, so a packed weight has exactly the n * k elements of the original. Weights with fewer bits:
// packed_qvalues.h.
#pragma once

#include <vector>

#include "packed_blocks.h"
#include "packed_qvalues.h"

namespace llm {

// Packs n rows of k elements into `target`, which must not overlap them. Returns whether all elements are finite.
bool pack_rows(const void* const* rows, void* target, DType dtype, size_t n, size_t k);

// The same for the rows of a row-major matrix.
bool pack_weight(const void* source, void* target, DType dtype, size_t n, size_t k);

// Registers a tensor as packed: MindSpore passes the kernels a pointer and a shape only. If the kernels in use multiply
// in integers, bfloat16 elements become multiples of units (fixed_point.h), which other kernels cannot read.
void register_packed(void* data, DType dtype, size_t n, size_t k);
void release_packed(const void* data);

// Registers qvalues that `pack_qvalues` wrote to `data`, whose tensor is int8 [n, columns].
void register_qvalues(void* data, const QuantizedWeight& weight, size_t columns);

// Registers the segments that `pack_blocks` wrote to `data`, one after another. Its tensor is int8 [n, columns], and
// the rows that it multiplies are of type `dtype`; unless `weight_only`, products round them to 8 bits.
void register_blocks(void* data, DType dtype, bool weight_only, const std::vector<BlockRows>& segments, size_t columns);

// The registered properties of a tensor [n, k].
class PackedWeight {
 public:
  PackedWeight(const void* data, DType tensor, size_t n, size_t k);

  bool is_packed() const { return is_packed_; }
  // Inputs, which the shape of a tensor of qvalues does not show.
  size_t columns() const { return k_; }
  // Type of the rows it multiplies.
  DType dtype() const { return dtype_; }
  // Null for a weight with elements.
  const WeightQValues* qvalues() const { return qvalues_; }
  // Bytes of a feature, in whole panels.
  size_t row_bytes() const;

  // Reads feature `row` of a packed tensor as k contiguous elements.
  void unpack_row(size_t row, void* target) const;

 private:
  const void* const data_;
  DType dtype_;
  size_t n_, k_;
  bool is_packed_ = false;
  const WeightQValues* qvalues_ = nullptr;
};

}  // namespace llm
