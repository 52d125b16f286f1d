#include "packed_qvalues.h"

#include <algorithm>
#include <cstring>

#include "thread_pool.h"

namespace llm {
namespace {

constexpr size_t kBlockBytes = 64;

bool is_a8(WeightFormat format) { return format == WeightFormat::kW8A8 || format == WeightFormat::kW4A8; }

size_t inputs_of(WeightFormat format, size_t k) {
  return TiledLayout::padded(k, format == WeightFormat::kW8A8 ? kFourInputs : kGroupMultiple);
}

// Codes of 8 bits are kept without sign where they are widened.
uint8_t flipped_bits(WeightFormat format, size_t bits) {
  return format == WeightFormat::kWeightOnly && bits == 8 ? 0x80 : 0;
}

// Codes of `kTogether` inputs lie together, and so do those that share a unit of so many bytes.
template <size_t kBitsOfCode, size_t kTogether, size_t kUnit>
struct Order {
  static constexpr size_t kBits = kBitsOfCode;
  static constexpr size_t kQValues = kBlockBytes * 8 / kBits;  // of a block
  static constexpr size_t kUnits = kBlockBytes / kUnit;

  // Of an input among the qvalues of its panel.
  static constexpr size_t index(size_t k, size_t column) {
    return (k / kTogether * kPanelWidth + column) * kTogether + k % kTogether;
  }

  static uint8_t code_at(const uint8_t* panel, size_t index) {
    const size_t within = index % kQValues, bit = within / kUnits * kBits;
    const uint8_t byte = panel[index / kQValues * kBlockBytes + within % kUnits * kUnit + bit / 8];
    return static_cast<uint8_t>(byte >> bit % 8 & ((1u << kBits) - 1));
  }

  // `qvalues` by their index.
  static void pack_block(const uint8_t* qvalues, uint8_t* target) {
    for (size_t i = 0; i < kUnits; i++) {
      unsigned unit = 0;
      for (size_t part = 0; part * kUnits < kQValues; part++)
        unit |= unsigned{qvalues[part * kUnits + i]} << part * kBits;
      std::memcpy(target + i * kUnit, &unit, kUnit);
    }
  }
};

template <class Body>
void with_order(WeightFormat format, size_t bits, DType dtype, Body body) {
  if (is_a8(format) && bits == 8) return body(Order<8, kFourInputs, 1>{});
  if (is_a8(format)) return body(Order<4, kFourInputs, 1>{});
  if (dtype == DType::kBFloat16 && bits == 8) return body(Order<8, 2, 2>{});
  if (dtype == DType::kBFloat16) return body(Order<4, 2, 2>{});
  if (bits == 8) return body(Order<8, 1, 2>{});
  body(Order<4, 1, 2>{});
}

template <class Order>
void pack_panel(const QuantizedWeight& weight, size_t panel, uint8_t* target, Order order) {
  const size_t first = panel * kPanelWidth, count = kPanelWidth * inputs_of(weight.format, weight.k);
  const uint8_t flipped = flipped_bits(weight.format, weight.bits);
  auto* tiled = static_cast<uint8_t*>(scratch(Scratch::kPanel, count + 1));
  std::memset(tiled, weight.bits == 4 ? 8 : flipped, count);
  for (size_t column = 0; column < kPanelWidth && first + column < weight.n; column++) {
    const uint8_t* qvalues = weight.qvalues + (first + column) * weight.k;
    for (size_t k = 0; k < weight.k; k++) tiled[order.index(k, column)] = qvalues[k] ^ flipped;
  }
  for (size_t at = 0; at < count; at += order.kQValues, target += kBlockBytes) order.pack_block(tiled + at, target);
}

}  // namespace

bool can_pack(const QuantizedWeight& weight) {
  if (weight.format == WeightFormat::kW8A8) {
    return weight.bits == 8 && weight.groups() == 1 && weight.k <= kMaxQuantizedInputs;
  }
  if (weight.format == WeightFormat::kW4A8 && (weight.bits != 4 || weight.k > kMaxQuantizedInputs)) return false;
  const bool is_grouped = weight.groups() > 1;
  return !is_grouped || (weight.group >= kGroupMultiple && (weight.group & (weight.group - 1)) == 0);
}

size_t panel_bytes(WeightFormat format, size_t bits, size_t k) { return kPanelWidth * inputs_of(format, k) * bits / 8; }

void pack_qvalues(const QuantizedWeight& weight, void* target) {
  const size_t bytes = panel_bytes(weight.format, weight.bits, weight.k);
  with_order(weight.format, weight.bits, weight.dtype, [&](auto order) {
    auto body = [&](size_t panel) { pack_panel(weight, panel, static_cast<uint8_t*>(target) + panel * bytes, order); };
    parallel_for((weight.n + kPanelWidth - 1) / kPanelWidth, body);
  });
}

namespace {

// Calls body(input, code) for the qvalues of a row, those of 8 bits with their sign.
template <class Body>
void for_qvalues(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, Body body) {
  const size_t bytes = panel_bytes(qvalues.format, qvalues.bits, k);
  const uint8_t flipped = flipped_bits(qvalues.format, qvalues.bits);
  const auto* panel = static_cast<const uint8_t*>(packed) + row / kPanelWidth * bytes;
  with_order(qvalues.format, qvalues.bits, dtype, [&](auto order) {
    for (size_t i = 0; i < k; i++) {
      const auto code = static_cast<uint8_t>(order.code_at(panel, order.index(i, row % kPanelWidth)) ^ flipped);
      body(i, qvalues.bits == 8 ? static_cast<int8_t>(code) : code);
    }
  });
}

}  // namespace

void read_qvalues(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, int8_t* target) {
  for_qvalues(qvalues, dtype, packed, k, row, [&](size_t i, int code) { target[i] = static_cast<int8_t>(code); });
}

void decode_row(const WeightQValues& qvalues, DType dtype, const void* packed, size_t k, size_t row, float* target) {
  for_qvalues(qvalues, dtype, packed, k, row, [&](size_t i, int code) {
    const size_t at = qvalues.number_at(row / kPanelWidth, i / qvalues.group) + row % kPanelWidth;
    const int zero = qvalues.bits == 8 ? 0 : qvalues.zero == nullptr ? 8 : qvalues.zero[at];
    target[i] = static_cast<float>(code - zero) * qvalues.scale[at];
  });
  if (qvalues.rotated) kernels().rotate(target, k);
}

}  // namespace llm
