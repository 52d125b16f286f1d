// Weights of 8 or 4 bits in the order in which products read them: panels as in packed_weights.h, all of them whole,
// padded with qvalues of zero or, for 4 bits, of 8.
//
// W8A8, W4A8  [k / 4][16][4]: groups of four inputs, for vpdpbusd
// widened     the order of elements; 8-bit qvalues plus 128
// Panels consist of blocks of 64 bytes: bytes or, for widened qvalues, 16-bit words. Each word holds as many qvalues as
// fit, one from every part of the block, the first part in the lowest bits. A shift of all words moves the next
// elements of a block to the lowest bits.
#pragma once

#include "kernels.h"

namespace llm {

// Row-major qvalues [n, k] of the numbers (qvalue - zero) * scale, where each row has a scale for each `group` of
// inputs.
struct QuantizedWeight {
  WeightFormat format;
  DType dtype;  // type of the rows it multiplies
  size_t bits;  // 8, signed, or 4: 0 to 15; a qvalue is a byte in either case
  const uint8_t* qvalues;
  const float* scale;   // [n, groups]
  const uint8_t* zero;  // [n, groups], 4 bits only; null: 8 for 4 bits, 0 for 8 bits
  size_t n, k, group;
  bool rotated = false;  // rows were rotated (rotation.h) before they were rounded, and divided by their block

  size_t groups() const { return k == 0 ? 1 : (k + group - 1) / group; }
};

// Most inputs of weights that are multiplied in integers: sums of products of 8-bit numbers fit 32 bits.
constexpr size_t kMaxQuantizedInputs = 65536;

// Whether products of the format support such qvalues: W8A8 one group of 8 bits, W4A8 4 bits, both others one group or
// groups of 32, 64, 128, .. inputs.
bool can_pack(const QuantizedWeight& weight);
// Bytes of a panel of the format.
LLM_SHARED size_t panel_bytes(WeightFormat format, size_t bits, size_t k);
// Writes all panels.
void pack_qvalues(const QuantizedWeight& weight, void* target);
// Reads the qvalues of a row of a packed 8-bit weight.
void read_qvalues(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, int8_t* target);
// Reads one row of a packed weight as k numbers.
void decode_row(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, float* target);

}  // namespace llm
