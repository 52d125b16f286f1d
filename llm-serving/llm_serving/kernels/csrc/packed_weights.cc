#include "packed_weights.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace llm {
namespace {

// WeightQValues::scale of multiples is this much larger than the unit.
constexpr float kUnitOfOne = 0x1p-14f;

struct Packed {
  DType tensor;       // as MindSpore knows it
  DType dtype;        // of the rows it multiplies
  size_t n, columns;  // likewise
  size_t k;           // inputs
  bool has_qvalues = false;
  std::vector<float> scale;
  std::vector<int32_t> sums;
  std::vector<uint8_t> zero;
  std::vector<BlockSegment> segments;
  WeightQValues qvalues;
};

std::shared_mutex registry_mutex;

std::unordered_map<const void*, std::unique_ptr<Packed>>& registry() {
  static auto* const instance = new std::unordered_map<const void*, std::unique_ptr<Packed>>;
  return *instance;
}

size_t whole_panels(size_t n) { return TiledLayout::padded(n, kPanelWidth); }

void remember(void* data, std::unique_ptr<Packed> packed) {
  packed->qvalues.scale = packed->scale.data();
  packed->qvalues.sums = packed->sums.empty() ? nullptr : packed->sums.data();
  packed->qvalues.zero = packed->zero.empty() ? nullptr : packed->zero.data();
  packed->qvalues.segments = packed->segments.data();
  packed->qvalues.num_segments = packed->segments.size();
  const std::unique_lock<std::shared_mutex> lock(registry_mutex);
  registry()[data] = std::move(packed);
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
  packed->tensor = packed->dtype = dtype;
  packed->n = n;
  packed->columns = packed->k = k;
  const auto to_fixed_point = kernels().to_fixed_point;
  if (to_fixed_point != nullptr && dtype == DType::kBFloat16) {
    packed->scale.resize(whole_panels(n));
    packed->qvalues.format = WeightFormat::kFixedPoint;
    packed->has_qvalues = to_fixed_point(data, n, k, packed->scale.data(), &packed->qvalues.activation_norm);
  }
  remember(data, std::move(packed));
}

void release_packed(const void* data) {
  const std::unique_lock<std::shared_mutex> lock(registry_mutex);
  registry().erase(data);
}

void register_qvalues(void* data, const QuantizedWeight& weight, size_t columns) {
  auto packed = std::make_unique<Packed>();
  packed->tensor = DType::kInt8;
  packed->dtype = weight.dtype;
  packed->n = weight.n;
  packed->columns = columns;
  packed->k = weight.k;
  packed->has_qvalues = true;
  const size_t stride = whole_panels(weight.n), groups = weight.groups();
  packed->qvalues.format = weight.format;
  packed->qvalues.bits = weight.bits;
  packed->qvalues.group = std::max(weight.group, size_t{1});
  packed->qvalues.groups = groups;
  packed->qvalues.rotated = weight.rotated;
  packed->scale.resize(groups * stride);
  packed->zero.resize(weight.zero == nullptr ? 0 : groups * stride, 8);
  if (weight.format == WeightFormat::kW8A8) packed->sums.resize(stride);
  for (size_t row = 0; row < weight.n; row++) {
    for (size_t group = 0; group < groups; group++) {
      const size_t at = packed->qvalues.number_at(row / kPanelWidth, group) + row % kPanelWidth;
      packed->scale[at] = weight.scale[row * groups + group];
      if (weight.zero != nullptr) packed->zero[at] = weight.zero[row * groups + group];
    }
    if (packed->sums.empty()) continue;
    const auto* qvalues = reinterpret_cast<const int8_t*>(weight.qvalues) + row * weight.k;
    packed->sums[row] = std::accumulate(qvalues, qvalues + weight.k, int32_t{0});
  }
  remember(data, std::move(packed));
}

void register_blocks(void* data, DType dtype, const std::vector<BlockRows>& segments, size_t columns) {
  auto packed = std::make_unique<Packed>();
  packed->tensor = DType::kInt8;
  packed->dtype = dtype;
  packed->columns = columns;
  packed->has_qvalues = true;
  packed->qvalues.format = WeightFormat::kBlocks;
  size_t panels = 0, offset = 0;
  packed->n = 0;
  packed->k = segments.empty() ? 0 : segments.front().k;
  for (const BlockRows& rows : segments) {
    const bool continues = !packed->segments.empty() && packed->segments.back().form == rows.form;
    if (!continues) packed->segments.push_back({panels, offset, rows.form});
    panels += whole_panels(rows.n) / kPanelWidth;
    offset += packed_bytes(rows);
    packed->n += rows.n;
  }
  packed->qvalues.panel_bytes = panels == 0 ? 0 : offset / panels;
  remember(data, std::move(packed));
}

PackedWeight::PackedWeight(const void* data, DType tensor, size_t n, size_t k)
    : data_(data), dtype_(tensor), n_(n), k_(k) {
  const std::shared_lock<std::shared_mutex> lock(registry_mutex);
  const auto found = registry().find(data);
  if (found == registry().end()) return;
  const Packed& packed = *found->second;
  is_packed_ = packed.tensor == tensor && packed.n == n && packed.columns == k;
  if (!is_packed_) return;
  dtype_ = packed.dtype;
  k_ = packed.k;
  if (packed.has_qvalues) qvalues_ = &packed.qvalues;
}

size_t PackedWeight::row_bytes() const {
  if (!is_quantized(qvalues_)) return k_ * element_size(dtype_, nullptr);
  if (qvalues_->format == WeightFormat::kBlocks) return 0;  // panels differ: see WeightQValues::first_panel
  return panel_bytes(qvalues_->format, qvalues_->bits, k_) / kPanelWidth;
}

void PackedWeight::unpack_row(size_t row, void* target) const {
  if (is_quantized(qvalues_)) {
    std::vector<float> values(k_);
    if (qvalues_->format == WeightFormat::kBlocks) {
      decode_block_row(*qvalues_, data_, k_, row, values.data());
    } else {
      decode_row(*qvalues_, dtype_, data_, k_, row, values.data());
    }
    return kernels().round({values.data(), nullptr, target, dtype_, 1, k_, 0, k_, 1.0f});
  }
  if (dtype_ == DType::kFloat32) return unpack<uint32_t>(data_, target, n_, k_, row, false);
  unpack<uint16_t>(data_, target, n_, k_, row, dtype_ == DType::kBFloat16);
  if (qvalues_ == nullptr) return;
  // A product of a power of two and of an integer that eight bits could tell: nothing is lost.
  const float unit = qvalues_->scale[row] * kUnitOfOne;
  for (size_t i = 0; i < k_; i++) {
    int16_t multiple;
    std::memcpy(&multiple, static_cast<char*>(target) + i * sizeof(multiple), sizeof(multiple));
    const float value = static_cast<float>(multiple) * unit;
    std::memcpy(static_cast<char*>(target) + i * sizeof(multiple), reinterpret_cast<const char*>(&value) + 2, 2);
  }
}

}  // namespace llm
