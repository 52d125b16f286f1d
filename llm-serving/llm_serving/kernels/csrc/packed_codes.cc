#include "packed_codes.h"

#include <algorithm>
#include <cstring>

#include "thread_pool.h"

namespace llm {
namespace {

constexpr size_t kBlockCodes = 64;

size_t inputs_of(WeightFormat format, size_t k) {
  return Passes::padded(k, format == WeightFormat::kW8A8 ? kFourInputs : kWidenedMultiple);
}

// Where the code of an input stands among those of its panel.
size_t place_of(WeightFormat format, DType dtype, size_t k, size_t column) {
  const size_t together = format == WeightFormat::kW8A8 ? kFourInputs : dtype == DType::kBFloat16 ? 2 : 1;
  return (k / together * kPanelWidth + column) * together + k % together;
}

uint8_t code_at(const uint8_t* panel, size_t bits, size_t place) {
  if (bits == 8) return panel[place];
  const size_t within = place % kBlockCodes, half = kBlockCodes / 2;
  const uint8_t both = panel[place / kBlockCodes * half + within % half];
  return within < half ? both & 15 : both >> 4;
}

void put_code(uint8_t* panel, size_t bits, size_t place, uint8_t code) {
  if (bits == 8) {
    panel[place] = code;
    return;
  }
  const size_t within = place % kBlockCodes, half = kBlockCodes / 2;
  uint8_t& both = panel[place / kBlockCodes * half + within % half];
  both = static_cast<uint8_t>(within < half ? (both & 0xf0) | code : (both & 0x0f) | code << 4);
}

void pack_panel(const CodedWeight& weight, size_t panel, uint8_t* target) {
  const size_t first = panel * kPanelWidth, inputs = inputs_of(weight.format, weight.k);
  std::memset(target, 0, panel_bytes(weight.format, weight.bits, weight.k));
  for (size_t column = 0; column < kPanelWidth; column++) {
    const size_t row = first + column;
    for (size_t k = 0; k < inputs; k++) {
      const bool is_there = row < weight.n && k < weight.k;
      const size_t group = weight.k == 0 ? 0 : std::min(k, weight.k - 1) / weight.group;
      const uint8_t zero = weight.bits == 8                            ? 0
                           : weight.zero == nullptr || row >= weight.n ? 8
                                                                       : weight.zero[row * weight.groups() + group];
      put_code(target, weight.bits, place_of(weight.format, weight.dtype, k, column),
               is_there ? weight.codes[row * weight.k + k] : zero);
    }
  }
}

}  // namespace

bool can_pack(const CodedWeight& weight) {
  if (weight.format == WeightFormat::kW8A8) {
    return weight.bits == 8 && weight.groups() == 1 && weight.k <= kMostCodedInputs;
  }
  const bool is_grouped = weight.groups() > 1;
  return !is_grouped || (weight.group >= kWidenedMultiple && (weight.group & (weight.group - 1)) == 0);
}

size_t panel_bytes(WeightFormat format, size_t bits, size_t k) { return kPanelWidth * inputs_of(format, k) * bits / 8; }

void pack_codes(const CodedWeight& weight, void* target) {
  auto body = [&](size_t panel) {
    pack_panel(weight, panel,
               static_cast<uint8_t*>(target) + panel * panel_bytes(weight.format, weight.bits, weight.k));
  };
  parallel_for((weight.n + kPanelWidth - 1) / kPanelWidth, body);
}

void decode_row(const WeightCodes& codes, DType dtype, const void* packed, size_t k, size_t row, float* target) {
  const size_t bytes = panel_bytes(codes.format, codes.bits, k);
  const auto* panel = static_cast<const uint8_t*>(packed) + row / kPanelWidth * bytes;
  for (size_t i = 0; i < k; i++) {
    const uint8_t code = code_at(panel, codes.bits, place_of(codes.format, dtype, i, row % kPanelWidth));
    const size_t at = i / codes.group * codes.stride + row;
    const int zero = codes.bits == 8 ? 0 : codes.zero == nullptr ? 8 : codes.zero[at];
    const int number = codes.bits == 8 ? static_cast<int8_t>(code) : code - zero;
    target[i] = static_cast<float>(number) * codes.scale[at];
  }
}

}  // namespace llm
