// Weights of 8 or 4 bits in the order the products read them: panels as of packed_weights.h, all of them whole, filled
// up with codes of zero.
//
//   W8A8     [k / 4][16][4]    fours of inputs, as vpdpbusd wants them
//   widened  the order of elements; of 4 bits, a block of 64 codes is 32 bytes: code i and code i + 32 in byte i
#pragma once

#include "kernels.h"

namespace llm {

// Row-major codes [n, k] and what makes numbers of them: (code - zero) * scale, where each row has a scale for each
// `group` of inputs.
struct CodedWeight {
  WeightFormat format;
  DType dtype;  // of the rows it multiplies
  size_t bits;  // 8, signed, or 4: 0 to 15; a code is a byte all the same
  const uint8_t* codes;
  const float* scale;   // [n, groups]
  const uint8_t* zero;  // [n, groups], of 4 bits; null: 8 of 4 bits, 0 of 8 bits
  size_t n, k, group;

  size_t groups() const { return k == 0 ? 1 : (k + group - 1) / group; }
};

// Inputs of a W8A8 weight, at most: no sum of products of 8-bit numbers leaves 32 bits.
constexpr size_t kMostCodedInputs = 65536;

// Whether products of the format take such codes: W8A8 one group of 8 bits, widened any of 32, 64, 128, .. inputs.
bool can_pack(const CodedWeight& weight);
// Bytes of a panel of the format.
size_t panel_bytes(WeightFormat format, size_t bits, size_t k);
// Writes all panels.
void pack_codes(const CodedWeight& weight, void* target);
// Reads one row of a packed weight back as k numbers.
void decode_row(const WeightCodes& codes, DType dtype, const void* packed, size_t k, size_t row, float* target);

}  // namespace llm
