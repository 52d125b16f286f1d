#include "packed_weights.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace llm {
namespace {

// WeightUnits::unit is this much larger than the unit.
constexpr float kUnitOfOne = 0x1p-14f;

struct Packed {
  DType dtype;
  size_t n, k;
  std::vector<float> column_units;  // none where the weight is kept as it is
  WeightUnits units;
};

std::shared_mutex registry_mutex;

std::unordered_map<const void*, std::unique_ptr<Packed>>& registry() {
  static auto* const instance = new std::unordered_map<const void*, std::unique_ptr<Packed>>;
  return *instance;
}

// Position of input k of a feature inside its panel of `width` columns.
size_t position(size_t k, size_t column, size_t inputs, size_t width, bool pairs) {
  if (!pairs || (k + 1 == inputs && inputs % 2 == 1)) return k * width + column;
  return (k / 2 * width + column) * 2 + k % 2;
}

// Transposes rows of `k` units into columns: units of one input, or of a pair of them.
template <class Unit>
void transpose(const void* source, size_t source_stride, void* target, size_t width, size_t k) {
  for (size_t i = 0; i < k; i++) {
    for (size_t column = 0; column < width; column++) {
      std::memcpy(static_cast<char*>(target) + (i * width + column) * sizeof(Unit),
                  static_cast<const char*>(source) + column * source_stride + i * sizeof(Unit), sizeof(Unit));
    }
  }
}

template <class Element>
void pack_panel(const Element* source, Element* target, size_t width, size_t k, bool pairs) {
  if (!pairs) return transpose<Element>(source, k * sizeof(Element), target, width, k);
  transpose<uint32_t>(source, k * sizeof(Element), target, width, k / 2);
  const size_t paired = k / 2 * 2;
  transpose<Element>(source + paired, k * sizeof(Element), target + paired * width, width, k - paired);
}

template <class Element>
void pack_panels(const void* source, void* target, size_t n, size_t k, bool pairs) {
  auto body = [&](size_t panel) {
    const size_t first = panel * kPanelWidth;
    pack_panel(static_cast<const Element*>(source) + first * k, static_cast<Element*>(target) + first * k,
               std::min(kPanelWidth, n - first), k, pairs);
  };
  parallel_for((n + kPanelWidth - 1) / kPanelWidth, body);
}

template <class Element>
void unpack(const void* packed, void* target, size_t n, size_t k, size_t row, bool pairs) {
  const size_t first = row / kPanelWidth * kPanelWidth;
  const Element* panel = static_cast<const Element*>(packed) + first * k;
  const size_t width = std::min(kPanelWidth, n - first);
  for (size_t i = 0; i < k; i++) {
    static_cast<Element*>(target)[i] = panel[position(i, row - first, k, width, pairs)];
  }
}

}  // namespace

void pack_weight(const void* source, void* target, DType dtype, size_t n, size_t k) {
  if (dtype == DType::kFloat32) {
    pack_panels<uint32_t>(source, target, n, k, false);
  } else {
    pack_panels<uint16_t>(source, target, n, k, dtype == DType::kBFloat16);
  }
}

void register_packed(void* data, DType dtype, size_t n, size_t k) {
  auto packed = std::make_unique<Packed>();
  packed->dtype = dtype;
  packed->n = n;
  packed->k = k;
  const auto to_fixed_point = kernels().to_fixed_point;
  if (to_fixed_point != nullptr && dtype == DType::kBFloat16) {
    std::vector<float> units((n + kPanelWidth - 1) / kPanelWidth * kPanelWidth);
    if (to_fixed_point(data, n, k, units.data(), &packed->units.activation_norm)) {
      packed->column_units = std::move(units);
      packed->units.unit = packed->column_units.data();
    }
  }
  const std::unique_lock<std::shared_mutex> lock(registry_mutex);
  registry()[data] = std::move(packed);
}

void release_packed(const void* data) {
  const std::unique_lock<std::shared_mutex> lock(registry_mutex);
  registry().erase(data);
}

PackedWeight::PackedWeight(const void* data, DType dtype, size_t n, size_t k)
    : data_(data), dtype_(dtype), n_(n), k_(k) {
  const std::shared_lock<std::shared_mutex> lock(registry_mutex);
  const auto found = registry().find(data);
  if (found == registry().end()) return;
  const Packed& packed = *found->second;
  is_packed_ = packed.dtype == dtype && packed.n == n && packed.k == k;
  if (is_packed_ && !packed.column_units.empty()) units_ = &packed.units;
}

void PackedWeight::unpack_row(size_t row, void* target) const {
  if (dtype_ == DType::kFloat32) return unpack<uint32_t>(data_, target, n_, k_, row, false);
  unpack<uint16_t>(data_, target, n_, k_, row, dtype_ == DType::kBFloat16);
  if (units_ == nullptr) return;
  // A product of a power of two and of an integer that eight bits could tell: nothing is lost.
  const float unit = units_->unit[row] * kUnitOfOne;
  for (size_t i = 0; i < k_; i++) {
    int16_t multiple;
    std::memcpy(&multiple, static_cast<char*>(target) + i * sizeof(multiple), sizeof(multiple));
    const float value = static_cast<float>(multiple) * unit;
    std::memcpy(static_cast<char*>(target) + i * sizeof(multiple), reinterpret_cast<const char*>(&value) + 2, 2);
  }
}

}  // namespace llm
