#include "packed_blocks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "thread_pool.h"

namespace llm {
namespace {

constexpr size_t kFours = kBlockInputs / kFourInputs;  // lines of a block whose qvalues have a byte each

// Writes the planes of a block from its eight lines of bytes.
void pack_planes(const uint8_t* lines, size_t bits, uint8_t* target) {
  if (bits == 8) {
    std::memcpy(target, lines, kFours * kLineBytes);
    return;
  }
  std::memset(target, 0, bits * kLineBytes);
  for (size_t line = 0; line < kFours; line++) {
    for (size_t i = 0; i < kLineBytes; i++) {
      const uint8_t qvalue = lines[line * kLineBytes + i];
      target[low_plane(bits, line) * kLineBytes + i] |= static_cast<uint8_t>((qvalue & 15) << line % 2 * 4);
      if (bits == 4) continue;
      const size_t shift = line % lines_of_high_plane(bits) * (bits - 4);
      target[high_plane(bits, line) * kLineBytes + i] |= static_cast<uint8_t>(qvalue >> 4 << shift);
    }
  }
}

// The qvalue of byte `i` of a line.
uint8_t qvalue_at(const uint8_t* planes, size_t bits, size_t line, size_t i) {
  if (bits == 8) return planes[line * kLineBytes + i];
  const auto low = static_cast<uint8_t>(planes[low_plane(bits, line) * kLineBytes + i] >> line % 2 * 4 & 15);
  if (bits == 4) return low;
  const size_t shift = line % lines_of_high_plane(bits) * (bits - 4);
  const unsigned high = planes[high_plane(bits, line) * kLineBytes + i] >> shift & ((1u << (bits - 4)) - 1);
  return static_cast<uint8_t>(low | high << 4);
}

void pack_panel(const BlockRows& rows, size_t panel, uint8_t* target) {
  const BlockForm& form = rows.form;
  const BlockLayout layout(form);
  const size_t first = panel * kPanelWidth, count = std::min(kPanelWidth, rows.n - first);
  const size_t groups = rows.k / form.group;
  std::memset(target, 0, layout.panel_bytes(rows.k));
  // Writes `bytes` of element `index` of the panel's rows of an array [n, columns].
  auto copy = [&](const void* source, size_t columns, size_t index, size_t bytes, uint8_t* to) {
    for (size_t row = 0; source != nullptr && row < count; row++) {
      std::memcpy(to + row * bytes, static_cast<const char*>(source) + ((first + row) * columns + index) * bytes,
                  bytes);
    }
  };
  for (size_t k = 0; k < rows.k; k += kChunkInputs) {
    const BlockChunk chunk(layout, target, rows.k, k / kChunkInputs);
    auto writable = [&](const uint8_t* part) { return target + (part - target); };
    for (size_t block = 0; block < chunk.blocks; block++) {
      uint8_t lines[kFours * kLineBytes];
      std::memset(lines, form.zero, sizeof(lines));
      for (size_t row = 0; row < count; row++) {
        const uint8_t* qvalues = rows.qvalues + (first + row) * rows.k + k + block * kBlockInputs;
        for (size_t i = 0; i < kBlockInputs; i++) {
          lines[i / kFourInputs * kLineBytes + row * kFourInputs + i % kFourInputs] = qvalues[i];
        }
      }
      pack_planes(lines, form.bits, writable(chunk.planes + block * layout.plane_bytes));
    }
    for (size_t group = 0; group < chunk.blocks * layout.block_groups; group++) {
      uint8_t* record = writable(chunk.records + group * layout.record_bytes);
      const size_t index = k / form.group + group;
      copy(rows.scales, groups, index, layout.number_bytes, record);
      copy(rows.minima, groups, index, layout.number_bytes, record + kPanelWidth * layout.number_bytes);
    }
    copy(rows.units, rows.k / kChunkInputs, k / kChunkInputs, 2, writable(chunk.units));
    copy(rows.minima_units, rows.k / kChunkInputs, k / kChunkInputs, 2, writable(chunk.units + kPanelWidth * 2));
  }
}

float half_at(const uint8_t* source) {
  float result;
  widen(source, 1, DType::kFloat16, &result);
  return result;
}

}  // namespace

bool can_pack(const BlockRows& rows) {
  const BlockForm& form = rows.form;
  const bool has_bits = form.bits == 4 || form.bits == 5 || form.bits == 6 || form.bits == 8;
  if (!has_bits || (form.group != 16 && form.group != 32) || rows.k > kMaxBlockInputs) return false;
  if (form.has_units != (rows.units != nullptr) || form.has_minima != (rows.minima != nullptr)) return false;
  if ((form.has_units && form.has_minima) != (rows.minima_units != nullptr)) return false;
  if (form.has_minima && (form.zero != 0 || form.bits > kMostBitsWithMinima)) return false;
  if ((form.zero & (form.zero - 1)) != 0) return false;  // neither 0 nor a power of two
  return rows.k % (form.has_units ? kChunkInputs : kBlockInputs) == 0;
}

size_t packed_bytes(const BlockRows& rows) {
  return (rows.n + kPanelWidth - 1) / kPanelWidth * BlockLayout(rows.form).panel_bytes(rows.k);
}

void pack_blocks(const BlockRows& rows, void* target) {
  const size_t bytes = BlockLayout(rows.form).panel_bytes(rows.k);
  auto body = [&](size_t panel) { pack_panel(rows, panel, static_cast<uint8_t*>(target) + panel * bytes); };
  parallel_for((rows.n + kPanelWidth - 1) / kPanelWidth, body);
}

void decode_block_row(const WeightQValues& qvalues, const void* packed, size_t k, size_t row, float* target) {
  const size_t panel = qvalues.first_panel + row / kPanelWidth, column = row % kPanelWidth;
  const BlockSegment& segment = qvalues.segment_of(panel);
  const BlockForm& form = segment.form;
  const BlockLayout layout(form);
  const auto* from =
      static_cast<const uint8_t*>(packed) + segment.offset + (panel - segment.first_panel) * layout.panel_bytes(k);
  for (size_t i = 0; i < k; i++) {
    const BlockChunk chunk(layout, from, k, i / kChunkInputs);
    const size_t within = i % kChunkInputs, at = i % kBlockInputs;
    const uint8_t* planes = chunk.planes + within / kBlockInputs * layout.plane_bytes;
    const uint8_t qvalue = qvalue_at(planes, form.bits, at / kFourInputs, column * kFourInputs + at % kFourInputs);
    const uint8_t* record = chunk.records + within / form.group * layout.record_bytes + column * layout.number_bytes;
    const uint8_t* minimum_record = record + kPanelWidth * layout.number_bytes;
    const uint8_t* unit = chunk.units + column * 2;
    float scale, minimum = 0.0f;
    if (form.has_units) {
      scale = half_at(unit) * static_cast<float>(static_cast<int8_t>(*record));
      if (form.has_minima) minimum = half_at(unit + kPanelWidth * 2) * static_cast<float>(*minimum_record);
    } else {
      scale = half_at(record);
      if (form.has_minima) minimum = half_at(minimum_record);
    }
    const float value = static_cast<float>(static_cast<int>(qvalue) - form.zero) * scale;
    target[i] = form.has_minima ? value - minimum : value;
  }
}

}  // namespace llm
