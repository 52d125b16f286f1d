// Weights of 8 or 4 bits in the order the products read them: panels as of packed_weights.h, all of them whole, filled
// up with qvalues of zero or, of 4 bits, with 8.
//
//   W8A8, W4A8  [k / 4][16][4]: fours of inputs, as vpdpbusd wants them
//   widened     the order of elements; of 8 bits, code + 128
// Panels consist of blocks of 64 bytes: bytes or, of qvalues that are widened, 16-bit words, each of which holds the
// qvalues of as many elements as it has room for, one of every part of the block, the first part in the lowest bits. A
// shift of all words brings the next elements of a block to the place of those before.
#pragma once

#include "kernels.h"

namespace llm {

// Row-major qvalues [n, k] and what makes numbers of them: (code - zero) * scale, where each row has a scale for each
// `group` of inputs.
struct QuantizedWeight {
  WeightFormat format;
  DType dtype;  // of the rows it multiplies
  size_t bits;  // 8, signed, or 4: 0 to 15; a code is a byte all the same
  const uint8_t* qvalues;
  const float* scale;   // [n, groups]
  const uint8_t* zero;  // [n, groups], of 4 bits; null: 8 of 4 bits, 0 of 8 bits
  size_t n, k, group;

  size_t groups() const { return k == 0 ? 1 : (k + group - 1) / group; }
};

// Inputs of weights that are multiplied in integers, at most: no sum of products of 8-bit numbers leaves 32 bits.
constexpr size_t kMaxQuantizedInputs = 65536;

// Whether products of the format take such qvalues: W8A8 one group of 8 bits, W4A8 4 bits, both others groups of 32,
// 64, 128, .. inputs or one.
bool can_pack(const QuantizedWeight& weight);
// Bytes of a panel of the format.
size_t panel_bytes(WeightFormat format, size_t bits, size_t k);
// Writes all panels.
void pack_qvalues(const QuantizedWeight& weight, void* target);
// Reads the qvalues of a row of a packed weight of 8 bits back.
void read_qvalues(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, int8_t* target);
// Reads one row of a packed weight back as k numbers.
void decode_row(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, float* target);

}  // namespace llm
