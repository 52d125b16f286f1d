// Weights [n, k] in the order the products read them.
//
// Panels of 16 output features, each panel k-major: element (row, col) of panel p is feature 16 p + col, and
//   float32, float16   [k][16]          one register of features for each input
//   bfloat16           [k / 2][16][2]   pairs of inputs, as vdpbf16ps and the AMX tiles want them
// A last panel of fewer features has that many columns in place of 16, and an odd last input of bfloat16 a row without
// pairs, so a packed weight takes exactly the n * k elements of the original.
#pragma once

#include "kernels.h"

namespace llm {

// Packs `source` (row-major) into `target`, which must not overlap it.
void pack_weight(const void* source, void* target, DType dtype, size_t n, size_t k);

// Remembers that a tensor is packed: MindSpore hands the kernels a pointer and a shape only. Where the kernels in use
// multiply in integers, bfloat16 elements become multiples of units (fixed_point.h), which other kernels cannot read.
void register_packed(void* data, DType dtype, size_t n, size_t k);
void release_packed(const void* data);

// What is known of a tensor [n, k].
class PackedWeight {
 public:
  PackedWeight(const void* data, DType dtype, size_t n, size_t k);

  bool is_packed() const { return is_packed_; }
  // Of a weight that is kept as multiples, otherwise null.
  const WeightUnits* units() const { return units_; }

  // Reads feature `row` of a packed tensor back as k contiguous elements.
  void unpack_row(size_t row, void* target) const;

 private:
  const void* const data_;
  const DType dtype_;
  const size_t n_, k_;
  bool is_packed_ = false;
  const WeightUnits* units_ = nullptr;
};

}  // namespace llm
