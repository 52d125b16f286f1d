// Products of weights in blocks (packed_blocks.h) and rows quantized to 8 bits, with a scale for each 32 inputs.
//
// rows     scale = largest magnitude of the 32 inputs / 127; qvalue = input * (127 / largest), as in quantized_rows.h
// sums     sum of (qvalue - zero) * qvalue of the row over the inputs of a group; exact in 32 bits, so in any order
// results  sum of (sum * scale - sum of the row's qvalues * minimum) * scale of the row over groups in ascending order
//
// Each product and each sum of results is rounded to float32, without fused multiply-adds. Every instruction set
// computes the same bits as tests/support/kernels/quantized_products.py.
#pragma once

#include "linear.h"
#include "packed_blocks.h"
#include "quantized_rows.h"

namespace llm::LLM_ISA {

// A byte of a packed panel.
struct BlockByte {
  uint8_t bits;
};

template <>
struct Operand<BlockByte> {
  using Activation = int8_t;
  static constexpr int32_t kOffset = 0;
  static constexpr size_t kMultiple = kBlockInputs;
#if defined(__AVX512VNNI__)
  static constexpr bool kQuick = true;
#else
  static constexpr bool kQuick = false;
#endif
};

constexpr size_t kHalfBlock = kBlockInputs / 2;
constexpr size_t kBlockLines = kBlockInputs / kFourInputs;
constexpr size_t kHalfLines = kBlockLines / 2;

// Rows as qvalues with a scale for each 32 inputs, [blocks][rows], and the sums of their qvalues.
struct QuantizedBlocks : Activations<BlockByte> {
  const float* scale;
  const int32_t* block_sums;  // [blocks][rows]
  const int32_t* half_sums;   // [2 * blocks][rows], of 16 inputs

  const int32_t* sums_of(size_t group) const { return group == kHalfBlock ? half_sums : block_sums; }
};

// The sum of the sixteen int8 numbers of half a block.
LLM_INLINE int32_t half_sum(const uint8_t* qvalues) {
#if defined(__SSE2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qvalues));
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * static_cast<int32_t>(kHalfBlock);
#else
  int32_t sum = 0;
  for (size_t i = 0; i < kHalfBlock; i++) sum += static_cast<int8_t>(qvalues[i]);
  return sum;
#endif
}

template <class Element>
QuantizedBlocks block_rows(const LinearArgs& args) {
  const ActivationForm<BlockByte> form(args.m, args.k);
  const size_t blocks = form.inputs / kBlockInputs, numbers = blocks * args.m;
  const size_t stride = args.x_layout.or_rows(args.m, args.k).width, bytes = form.bytes(args.m);
  auto* qvalues = static_cast<uint8_t*>(scratch(Scratch::kActivations, bytes + 1));
  auto* scale = static_cast<float*>(scratch(Scratch::kItems, 4 * numbers * sizeof(float) + 1));
  auto* block_sums = reinterpret_cast<int32_t*>(scale + numbers);
  int32_t* half_sums = block_sums + numbers;
  for_rows_of_x(args, [&](size_t row) {
    const Element* x = static_cast<const Element*>(args.x) + row * stride;
    for (size_t block = 0, k = 0; block < blocks; block++, k += kBlockInputs) {
      const size_t at = block * args.m + row;
      const Floats factor = broadcast(code_factor(largest_bits(x + k, kBlockInputs), &scale[at]));
      uint8_t* target = qvalues + form.layout.at(row, k);
      encode(x + k, kBlockInputs, factor, scale[at] == scale[at], 0, target);
      const int32_t first = half_sum(target), second = half_sum(target + kHalfBlock);
      half_sums[2 * block * args.m + row] = first;
      half_sums[(2 * block + 1) * args.m + row] = second;
      block_sums[at] = first + second;
    }
  });
  return {{form, qvalues}, scale, block_sums, half_sums};
}

inline const BlockByte* whole_panel(const LinearArgs& args, size_t panel, size_t, BlockByte*) {
  const size_t at = args.qvalues->first_panel + panel;
  const BlockSegment& segment = args.qvalues->segment_of(at);
  const size_t bytes = BlockLayout(segment.form).panel_bytes(args.k);
  return static_cast<const BlockByte*>(args.weight) + segment.offset + (at - segment.first_panel) * bytes;
}

// ---- Integers ------------------------------------------------------------------------------------------------------

// What is subtracted from qvalues of `kBits` bits, so that they are signed: AVX2 multiplies 8 bits faster then.
#if LLM_AVX2_ONLY && defined(LLM_BYTE_PAIRS)
template <size_t kBits>
constexpr int32_t kLineOffset = kBits == 8 ? kCodeOffset : 0;
#else
template <size_t kBits>
constexpr int32_t kLineOffset = 0;
#endif

// Shifts bits at position `from` of each byte to position `to`, and keeps those of `mask`.
LLM_INLINE NativeInt moved_bits(NativeInt bytes, int from, int to, int32_t mask) {
  const NativeUint bits = (NativeUint)bytes;
  return (NativeInt)(to >= from ? bits << (to - from) : bits >> (from - to)) & mask;
}

// Line `line` of a block of planes.
template <size_t kBits>
LLM_INLINE CodeFactor line_of(const uint8_t* planes, size_t line) {
  if constexpr (kBits == 8) return load_qvalues(planes + line * kLineBytes);
  CodeFactor result = load_qvalues(planes + low_plane(kBits, line) * kLineBytes);
  LLM_FOR_PARTS result.part[i] = moved_bits(result.part[i], line % 2 * 4, 0, 0x0f0f0f0f);
  if constexpr (kBits > 4) {
    constexpr size_t kHighBits = kBits - 4;
    const CodeFactor high = load_qvalues(planes + high_plane(kBits, line) * kLineBytes);
    const int from = static_cast<int>(line % lines_of_high_plane(kBits) * kHighBits);
    LLM_FOR_PARTS result.part[i] |= moved_bits(high.part[i], from, 4, kHighBits == 1 ? 0x10101010 : 0x30303030);
  }
  return result;
}

// The same, minus kLineOffset.
template <size_t kBits>
LLM_INLINE CodeFactor factors_of(const uint8_t* planes, size_t line) {
  const CodeFactor result = line_of<kBits>(planes, line);
  return kLineOffset<kBits> == 0 ? result : minus_offset(result);
}

// The number of bits for which add_line is compiled: 4 and 5 bits share a form, and without vpmaddubsw all do.
constexpr size_t product_bits([[maybe_unused]] size_t bits) {
#if defined(LLM_BYTE_PAIRS)
  return bits <= 5 ? 5 : bits;
#else
  return 8;
#endif
}

// Adds the products of line `line` of four with four qvalues of a row. vpmaddubsw adds two products in 16 bits, which
// are at most 2 * 127 * (2^bits - 1). As many of its results as 16 bits can hold are added in `halves`. Signed qvalues
// of 8 bits: their magnitudes are multiplied by the row's qvalues with their signs, so two products are at most
// 2 * 127 * 128.
template <size_t kBits>
LLM_INLINE void add_line([[maybe_unused]] size_t line, const CodeFactor& weights, const CodeFactor& four,
                         [[maybe_unused]] CodeFactor& halves, Floats& sum) {
#if defined(LLM_BYTE_PAIRS)
  if constexpr (kBits < 8 || kLineOffset<kBits> > 0) {
    constexpr size_t kLines = kBits <= 5 ? 4 : kBits == 6 ? 2 : 1;
    LLM_FOR_PARTS {
      NativeHalves product;
      if constexpr (kBits < 8) {
        product = multiply_bytes(weights.part[i], four.part[i]);
      } else {
#if LLM_AVX2_ONLY
        const __m256i bytes = (__m256i)weights.part[i];
        const __m256i qvalues = _mm256_sign_epi8((__m256i)four.part[i], bytes);
        product = multiply_bytes((NativeInt)_mm256_abs_epi8(bytes), (NativeInt)qvalues);
#endif
      }
      if (line % kLines > 0) product += (NativeHalves)halves.part[i];
      halves.part[i] = (NativeInt)product;
      if (line % kLines == kLines - 1) {
        sum.part[i] = (NativeFloat)((NativeInt)sum.part[i] + add_halves(product));
      }
    }
    return;
  }
#endif
  sum = add_fours<kBits == 8>(weights, four, sum);
}

// ---- Groups --------------------------------------------------------------------------------------------------------

// The scales and minima of a group of sixteen columns.
struct GroupNumbers {
  Floats scale, minimum;
};

// Reads the numbers of groups of a chunk, exactly.
template <bool kMinima>
struct GroupReader {
  const BlockLayout& layout;
  const uint8_t* records;
  const bool has_units;
  Floats scale_unit, minimum_unit;

  LLM_INLINE GroupReader(const BlockLayout& layout, const BlockChunk& chunk)
      : layout(layout), records(chunk.records), has_units(layout.unit_bytes > 0) {
    const auto* units = reinterpret_cast<const Float16*>(chunk.units);
    scale_unit = has_units ? load(units) : zeros();
    minimum_unit = kMinima && has_units ? load(units + kPanelWidth) : zeros();
  }

  LLM_INLINE GroupNumbers numbers(size_t group) const {
    const uint8_t* record = records + group * layout.record_bytes;
    const auto* halves = reinterpret_cast<const Float16*>(record);
    if (!has_units) return {load(halves), kMinima ? load(halves + kPanelWidth) : zeros()};
    const Floats scale = load(reinterpret_cast<const int8_t*>(record)) * scale_unit;
    return {scale, kMinima ? load(record + kPanelWidth) * minimum_unit : zeros()};
  }
};

// What a group adds to the total of a row, before the scale of the row.
template <bool kMinima>
LLM_INLINE Floats group_value(const Floats& sums, const GroupNumbers& numbers, Floats row_sum) {
  const Floats value = to_numbers(sums) * numbers.scale;
  return kMinima ? value - row_sum * numbers.minimum : value;
}

// ---- Few rows: qvalues are widened in registers ---------------------------------------------------------------------

constexpr size_t kRegisterRows = 4;  // rows whose sums and totals stay in registers beside a widened line

template <size_t kBits, bool kMinima, size_t kRows>
void block_panel(const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x, size_t row,
                 float* totals) {
  constexpr size_t kChains = kRows <= 2 ? 2 : 1;  // sums of a group added up in turns, to hide latency
  const BlockLayout layout(form);
  const size_t rows = x.layout.rows;
  const bool is_half = form.group == kHalfBlock;
  const int32_t zero = kMinima ? 0 : kLineOffset<kBits> - static_cast<int32_t>(form.zero);
  const int32_t* row_sums = x.sums_of(form.group) + row;
  const float* row_scales = x.scale + row;
  const int8_t* a[kRows];
  Floats total[kRows];
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; r++) {
    a[r] = x.at(row + r, 0);
    total[r] = zeros();
  }
  // The lines of a chunk that each of its blocks prefetches, rounded up.
  const size_t block_lines = (layout.chunk_bytes / kLineBytes + kChunkBlocks - 1) / kChunkBlocks;
  for (size_t index = 0; index * kChunkInputs < k; index++) {
    const BlockChunk chunk(layout, panel, k, index);
    const GroupReader<kMinima> reader(layout, chunk);
    const uint8_t* planes = chunk.planes;
    size_t group = 0;
    const uint8_t* ahead = chunk.planes + kBytesAheadOfStream;
    for (size_t block = 0; block < chunk.blocks; block++, planes += layout.plane_bytes, row_scales += rows) {
      for (size_t i = 0; i < block_lines; i++, ahead += kLineBytes) __builtin_prefetch(ahead, 0, 2);
      Floats sums[kChains][kRows];
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; half++) {
        if (half == 0 || is_half) {
#pragma GCC unroll 4
          for (size_t r = 0; r < kRows; r++) {
            sums[0][r] = broadcast_sum(zero * row_sums[r]);
            if constexpr (kChains > 1) sums[1][r] = broadcast_sum(0);
          }
        }
        CodeFactor halves[kRows];
#pragma GCC unroll 4
        for (size_t i = 0; i < kHalfLines; i++) {
          const size_t line = half * kHalfLines + i;
          const CodeFactor values = factors_of<kBits>(planes, line);
#pragma GCC unroll 4
          for (size_t r = 0; r < kRows; r++) {
            const CodeFactor four = broadcast_qvalues(a[r] + line * kFourInputs);
            add_line<kBits>(i, values, four, halves[r], sums[i % kChains][r]);
          }
        }
        if (half == 1 || is_half) {
          const GroupNumbers numbers = reader.numbers(group++);
#pragma GCC unroll 4
          for (size_t r = 0; r < kRows; r++) {
            const Floats row_sum = broadcast(kMinima ? static_cast<float>(row_sums[r]) : 0.0f);
            if constexpr (kChains > 1) sums[0][r] = add_sums(sums[0][r], sums[1][r]);
            const Floats value = group_value<kMinima>(sums[0][r], numbers, row_sum);
            total[r] = total[r] + value * broadcast(row_scales[r]);
          }
          row_sums += rows;
        }
      }
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; r++) a[r] += kBlockInputs;
    }
  }
#pragma GCC unroll 4
  for (size_t r = 0; r < kRows; r++) store(totals + r * kPanelWidth, total[r]);
}

template <size_t kBits, bool kMinima>
void block_panel_rows(const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x, size_t row,
                      size_t rows, float* totals) {
  const size_t tiles = (rows + kRegisterRows - 1) / kRegisterRows;
  for (size_t i = 0; i < tiles; i++) {
    const size_t height = (rows + tiles - i - 1) / (tiles - i);
    switch (height) {
      case 1:
        block_panel<kBits, kMinima, 1>(form, k, panel, x, row, totals);
        break;
      case 2:
        block_panel<kBits, kMinima, 2>(form, k, panel, x, row, totals);
        break;
      case 3:
        block_panel<kBits, kMinima, 3>(form, k, panel, x, row, totals);
        break;
      default:
        block_panel<kBits, kMinima, 4>(form, k, panel, x, row, totals);
    }
    row += height;
    rows -= height;
    totals += height * kPanelWidth;
  }
}

inline void multiply_in_registers(const BlockForm& form, size_t k, const uint8_t* panel, const QuantizedBlocks& x,
                                  size_t row, size_t rows, float* totals) {
  switch (form.bits) {
    case 4:
      if (form.has_minima) return block_panel_rows<4, true>(form, k, panel, x, row, rows, totals);
      return block_panel_rows<4, false>(form, k, panel, x, row, rows, totals);
    case 5:
      if (form.has_minima) return block_panel_rows<5, true>(form, k, panel, x, row, rows, totals);
      return block_panel_rows<5, false>(form, k, panel, x, row, rows, totals);
    case 6:
      return block_panel_rows<6, false>(form, k, panel, x, row, rows, totals);
    default:
      return block_panel_rows<8, false>(form, k, panel, x, row, rows, totals);
  }
}

// ---- Many rows: qvalues of a few panels are widened in memory -------------------------------------------------------

template <size_t kBits>
void widen_planes(const uint8_t* planes, size_t blocks, uint8_t* target) {
  for (size_t block = 0; block < blocks; block++, planes += kBits * kLineBytes) {
#pragma GCC unroll 8
    for (size_t line = 0; line < kBlockLines; line++, target += kLineBytes) {
      const CodeFactor values = factors_of<kBits>(planes, line);
      __builtin_memcpy(target, &values, sizeof(values));
    }
  }
}

inline void widen_chunk(const BlockForm& form, const BlockLayout& layout, const BlockChunk& chunk, uint8_t* qvalues,
                        GroupNumbers* numbers) {
  switch (form.bits) {
    case 4:
      widen_planes<4>(chunk.planes, chunk.blocks, qvalues);
      break;
    case 5:
      widen_planes<5>(chunk.planes, chunk.blocks, qvalues);
      break;
    case 6:
      widen_planes<6>(chunk.planes, chunk.blocks, qvalues);
      break;
    default:
      widen_planes<8>(chunk.planes, chunk.blocks, qvalues);
  }
  const size_t groups = chunk.blocks * layout.block_groups;
  if (form.has_minima) {
    const GroupReader<true> reader(layout, chunk);
    for (size_t group = 0; group < groups; group++) numbers[group] = reader.numbers(group);
  } else {
    const GroupReader<false> reader(layout, chunk);
    for (size_t group = 0; group < groups; group++) numbers[group] = reader.numbers(group);
  }
}

// Panels that a tile multiplies together: the totals and sums of a tile stay in registers.
#if defined(__AVX512F__)
constexpr size_t kWidePanels = 2;
#else
constexpr size_t kWidePanels = 1;
#endif

// Panels of one form, whose qvalues are widened for the inputs of one pass.
struct WidePanels {
  const uint8_t* qvalues[kTilePanels];
  const GroupNumbers* numbers[kTilePanels];  // of each group
  BlockForm form;
  size_t first_block, blocks;
  // The packed bytes that are widened next. For each group, a tile prefetches the next `group_lines` lines of each
  // panel, so that memory is read while tiles are multiplied.
  const uint8_t* next[kTilePanels];
  size_t next_bytes, group_lines;
};

// Multiplies a few rows by the `kPanels` panels that begin at `panel`, and adds the products to the totals. `kBits`: as
// product_bits returns it.
template <bool kMinima, size_t kBits, size_t kRows, size_t kPanels>
void wide_tile(const WidePanels& panels, size_t panel, const QuantizedBlocks& x, size_t row, float* totals,
               size_t panel_stride, size_t prefetched) {
  const size_t rows = x.layout.rows, stride = x.layout.width;
  const bool is_half = panels.form.group == kHalfBlock;
  const size_t group_bytes = (is_half ? kHalfLines : kBlockLines) * kLineBytes;
  const int32_t* row_sums = x.sums_of(panels.form.group) + panels.first_block * (is_half ? 2 : 1) * rows + row;
  const float* row_scales = x.scale + panels.first_block * rows + row;
  const int8_t* a = x.at(row, panels.first_block * kBlockInputs);
  const int32_t zero = kMinima ? 0 : kLineOffset<kBits> - static_cast<int32_t>(panels.form.zero);
  const uint8_t* qvalues[kPanels];
  const GroupNumbers* numbers[kPanels];
  Floats total[kRows][kPanels];
#pragma GCC unroll 8
  for (size_t p = 0; p < kPanels; p++) {
    qvalues[p] = panels.qvalues[panel + p];
    numbers[p] = panels.numbers[panel + p];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) total[r][p] = load(totals + p * panel_stride + r * kPanelWidth);
  }
  const uint8_t* const end = qvalues[0] + panels.blocks * kBlockLines * kLineBytes;
  for (bool is_first_half = true; qvalues[0] < end; is_first_half = !is_first_half) {
    for (size_t i = 0; i < panels.group_lines && prefetched < panels.next_bytes; i++, prefetched += kLineBytes) {
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) __builtin_prefetch(panels.next[panel + p] + prefetched, 0, 2);
    }
    Floats sums[kRows][kPanels];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) {
      const Floats begin = broadcast_sum(zero * row_sums[r]);
#pragma GCC unroll 8
      for (size_t p = 0; p < kPanels; p++) sums[r][p] = begin;
    }
    for (const uint8_t* until = qvalues[0] + group_bytes; qvalues[0] < until;) {
      CodeFactor halves[kRows][kPanels];
#pragma GCC unroll 4
      for (size_t line = 0; line < kHalfLines; line++, a += kFourInputs) {
        CodeFactor values[kPanels];
#pragma GCC unroll 8
        for (size_t p = 0; p < kPanels; p++) {
          values[p] = load_qvalues(qvalues[p]);
          qvalues[p] += kLineBytes;
        }
#pragma GCC unroll 8
        for (size_t r = 0; r < kRows; r++) {
          const CodeFactor four = broadcast_qvalues(a + r * stride);
#pragma GCC unroll 8
          for (size_t p = 0; p < kPanels; p++) add_line<kBits>(line, values[p], four, halves[r][p], sums[r][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      // A load for each vector, as in load_qvalues: g++ copies the struct through memory.
      const auto* of_group = reinterpret_cast<const float*>(numbers[p]++);
      const GroupNumbers group = {load(of_group), kMinima ? load(of_group + kPanelWidth) : zeros()};
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; r++) {
        const Floats row_sum = kMinima ? to_numbers(broadcast_sum(row_sums[r])) : zeros();
        total[r][p] = total[r][p] + group_value<kMinima>(sums[r][p], group, row_sum) * broadcast(row_scales[r]);
      }
    }
    row_sums += rows;
    if (!is_half || !is_first_half) row_scales += rows;
  }
#pragma GCC unroll 8
  for (size_t p = 0; p < kPanels; p++) {
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) store(totals + p * panel_stride + r * kPanelWidth, total[r][p]);
  }
}

template <bool kMinima, size_t kBits, size_t kPanels>
void wide_tile_of(size_t height, const WidePanels& panels, size_t panel, const QuantizedBlocks& x, size_t row,
                  float* totals, size_t panel_stride, size_t prefetched) {
  switch (height) {
    case 1:
      return wide_tile<kMinima, kBits, 1, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 2:
      return wide_tile<kMinima, kBits, 2, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 3:
      return wide_tile<kMinima, kBits, 3, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 4:
      return wide_tile<kMinima, kBits, 4, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 5:
      return wide_tile<kMinima, kBits, 5, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    case 6:
      return wide_tile<kMinima, kBits, 6, kPanels>(panels, panel, x, row, totals, panel_stride, prefetched);
    default:
      return;
  }
}

// Multiplies rows by widened panels, in tiles of nearly equal height.
template <bool kMinima, size_t kBits>
void multiply_tiles(const WidePanels& panels, size_t count, const QuantizedBlocks& x, size_t row, size_t rows,
                    float* totals) {
  const size_t tiles = (rows + kTileRows - 1) / kTileRows, panel_stride = rows * kPanelWidth;
  const size_t groups = panels.blocks * kBlockInputs / panels.form.group;
  for (size_t i = 0, r = 0; i < tiles; i++) {
    const size_t height = (rows - r + tiles - i - 1) / (tiles - i);
    const size_t prefetched = i * groups * panels.group_lines * kLineBytes;
    size_t panel = 0;
    for (; panel + kWidePanels <= count; panel += kWidePanels) {
      float* to = totals + panel * panel_stride + r * kPanelWidth;
      wide_tile_of<kMinima, kBits, kWidePanels>(height, panels, panel, x, row + r, to, panel_stride, prefetched);
    }
    if (panel < count) {
      float* to = totals + panel * panel_stride + r * kPanelWidth;
      wide_tile_of<kMinima, kBits, 1>(height, panels, panel, x, row + r, to, panel_stride, prefetched);
    }
    r += height;
  }
}

// Multiplies rows by `count` panels of one form, pass by pass.
inline void multiply_widened(const BlockForm& form, size_t k, const uint8_t* const* panel, size_t count,
                             const QuantizedBlocks& x, size_t row, size_t rows, float* totals) {
  const BlockLayout layout(form);
  const size_t blocks = k / kBlockInputs, pass = x.pass / kBlockInputs < blocks ? x.pass / kBlockInputs : blocks;
  const size_t numbers_bytes = pass * layout.block_groups * sizeof(GroupNumbers);
  const size_t panel_bytes = numbers_bytes + pass * kBlockInputs * kPanelWidth;
  auto* memory = static_cast<uint8_t*>(scratch(Scratch::kPanel, count * panel_bytes));
  __builtin_memset(totals, 0, count * rows * kPanelWidth * sizeof(float));
  for (size_t first = 0; first < blocks; first += pass) {
    WidePanels panels = {};
    panels.form = form;
    panels.first_block = first;
    panels.blocks = blocks - first < pass ? blocks - first : pass;
    // The next pass of these panels, or the first pass of the panels behind them.
    const bool is_last = first + panels.blocks == blocks;
    const size_t next_blocks = is_last ? pass : blocks - first - panels.blocks;
    const size_t next_chunks = ((next_blocks < pass ? next_blocks : pass) + kChunkBlocks - 1) / kChunkBlocks;
    panels.next_bytes = next_chunks * layout.chunk_bytes;
    const size_t tiles = (rows + kTileRows - 1) / kTileRows;
    const size_t iterations = tiles * panels.blocks * layout.block_groups;
    panels.group_lines = (panels.next_bytes / kLineBytes + iterations - 1) / iterations;
    for (size_t p = 0; p < count; p++) {
      auto* numbers = reinterpret_cast<GroupNumbers*>(memory + p * panel_bytes);
      uint8_t* qvalues = memory + p * panel_bytes + numbers_bytes;
      panels.qvalues[p] = qvalues;
      const size_t next_chunk = (first + panels.blocks) / kChunkBlocks;
      panels.next[p] = panel[p] + (is_last ? count * layout.panel_bytes(k) : next_chunk * layout.chunk_bytes);
      panels.numbers[p] = numbers;
      for (size_t block = first; block < first + panels.blocks; block += kChunkBlocks) {
        const BlockChunk chunk(layout, panel[p], k, block / kChunkBlocks);
        widen_chunk(form, layout, chunk, qvalues, numbers);
        qvalues += chunk.blocks * kBlockInputs * kPanelWidth;
        numbers += chunk.blocks * layout.block_groups;
      }
    }
    if (form.has_minima) {
      multiply_tiles<true, product_bits(5)>(panels, count, x, row, rows, totals);
    } else if (form.bits == 8) {
      multiply_tiles<false, 8>(panels, count, x, row, rows, totals);
    } else if (form.bits == 6) {
      multiply_tiles<false, product_bits(6)>(panels, count, x, row, rows, totals);
    } else {
      multiply_tiles<false, product_bits(5)>(panels, count, x, row, rows, totals);
    }
  }
}

inline void sum_products(const LinearArgs& args, const QuantizedBlocks& x, size_t row, size_t rows,
                         const UnitPanels<BlockByte>& panels, float* sums) {
  if (args.k == 0) {
    __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
    return;
  }
  auto form_of = [&](size_t p) -> const BlockForm& {
    return args.qvalues->segment_of(args.qvalues->first_panel + panels.index[p]).form;
  };
  const bool is_wide = args.m > kTileRows;  // then a row may have several passes
  for (size_t p = 0; p < panels.count;) {
    const BlockForm& form = form_of(p);
    float* totals = sums + p * rows * kPanelWidth;
    if (!is_wide) {
      const auto* panel = reinterpret_cast<const uint8_t*>(panels.data[p++]);
      multiply_in_registers(form, args.k, panel, x, row, rows, totals);
      continue;
    }
    const uint8_t* together[kTilePanels];
    size_t count = 0;
    while (count < kTilePanels && p + count < panels.count && form_of(p + count) == form) {
      together[count] = reinterpret_cast<const uint8_t*>(panels.data[p + count]);
      count++;
    }
    multiply_widened(form, args.k, together, count, x, row, rows, totals);
    p += count;
  }
}

inline void blocks_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    linear_with<Element>(args, block_rows<Element>(args));
  });
}

}  // namespace llm::LLM_ISA
