#include "packed_weights.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
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

// Rows are read and panels written a cache line at a time.
constexpr size_t kLineBytes = 64;

// Returns whether an element is infinite or NaN: all bits of its exponent are set.
template <class Element>
bool has_non_finite(const void* elements, size_t bytes, Element exponent) {
  Element largest = 0;
  for (size_t at = 0; at < bytes; at += sizeof(Element)) {
    Element element;
    std::memcpy(&element, static_cast<const char*>(elements) + at, sizeof(Element));
    largest = std::max(largest, static_cast<Element>(element & std::numeric_limits<Element>::max()));
  }
  return largest >= exponent;
}

// Copies bytes past the caches, because a line of memory that is written whole need not be read first.
void stream(const void* columns, char* target, size_t bytes) {
  const auto* source = static_cast<const char*>(columns);
  size_t done = 0;
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(target) % sizeof(__m128i) == 0) {
    for (; done + sizeof(__m128i) <= bytes; done += sizeof(__m128i)) {
      const __m128i vector = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done));
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + done), vector);
    }
  }
#endif
  std::memcpy(target + done, source + done, bytes - done);
}

// Transposes units [first, first + count) of `width` rows into columns: units of one input, or of a pair of them. Reads
// a line of each row before it writes, because rows whose distance is a power of two share few lines of the cache.
// Returns whether all elements are finite.
template <class Unit, class Element>
bool transpose(const char* const* rows, size_t width, size_t first, size_t count, char* target, Element exponent) {
  constexpr size_t kUnits = kLineBytes / sizeof(Unit);
  Unit lines[kPanelWidth][kUnits], columns[kUnits * kPanelWidth];
  bool finite = true;
  for (size_t at = first; at < first + count; at += kUnits) {
    const size_t units = std::min(kUnits, first + count - at), bytes = units * width * sizeof(Unit);
    if (width == kPanelWidth && units == kUnits) {  // sizes that the compiler knows
      for (size_t row = 0; row < kPanelWidth; row++) std::memcpy(lines[row], rows[row] + at * sizeof(Unit), kLineBytes);
      for (size_t unit = 0; unit < kUnits; unit++) {
        for (size_t row = 0; row < kPanelWidth; row++) columns[unit * kPanelWidth + row] = lines[row][unit];
      }
    } else {
      for (size_t row = 0; row < width; row++) {
        std::memcpy(lines[row], rows[row] + at * sizeof(Unit), units * sizeof(Unit));
        for (size_t unit = 0; unit < units; unit++) columns[unit * width + row] = lines[row][unit];
      }
    }
    finite = !has_non_finite(columns, bytes, exponent) && finite;
    stream(columns, target, bytes);
    target += bytes;
  }
  return finite;
}

// Packs one panel. Returns whether its elements are finite.
template <class Element>
bool pack_panel(const char* const* rows, char* target, size_t width, size_t k, bool pairs, Element exponent) {
  const size_t paired = pairs ? k / 2 * 2 : 0;
  char* rest = target + paired * width * sizeof(Element);
  const bool finite = transpose<uint32_t>(rows, width, 0, paired / 2, target, exponent);
  return transpose<Element>(rows, width, paired, k - paired, rest, exponent) && finite;
}

template <class Element>
bool pack_panels(const void* const* rows, void* target, size_t n, size_t k, bool pairs, Element exponent) {
  std::atomic<bool> finite{true};
  auto body = [&](size_t panel) {
    const size_t first = panel * kPanelWidth;
    const auto* of_panel = reinterpret_cast<const char* const*>(rows) + first;
    char* packed = static_cast<char*>(target) + first * k * sizeof(Element);
    if (!pack_panel(of_panel, packed, std::min(kPanelWidth, n - first), k, pairs, exponent)) finite = false;
#if defined(__SSE2__)
    _mm_sfence();  // other threads see what this one streamed
#endif
  };
  parallel_for((n + kPanelWidth - 1) / kPanelWidth, body);
  return finite;
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

bool pack_rows(const void* const* rows, void* target, DType dtype, size_t n, size_t k) {
  if (dtype == DType::kFloat32) return pack_panels<int32_t>(rows, target, n, k, false, 0x7F800000);
  if (dtype == DType::kFloat16) return pack_panels<int16_t>(rows, target, n, k, false, 0x7C00);
  return pack_panels<int16_t>(rows, target, n, k, true, 0x7F80);
}

bool pack_weight(const void* source, void* target, DType dtype, size_t n, size_t k) {
  std::vector<const void*> rows(n);
  const size_t bytes = k * element_size(dtype, nullptr);
  for (size_t row = 0; row < n; row++) rows[row] = static_cast<const char*>(source) + row * bytes;
  return pack_rows(rows.data(), target, dtype, n, k);
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

void register_blocks(void* data, DType dtype, bool weight_only, const std::vector<BlockRows>& segments,
                     size_t columns) {
  auto packed = std::make_unique<Packed>();
  packed->tensor = DType::kInt8;
  packed->dtype = dtype;
  packed->columns = columns;
  packed->has_qvalues = true;
  packed->qvalues.format = WeightFormat::kBlocks;
  packed->qvalues.weight_only = weight_only;
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
