// Rows quantized to 8 bits with a scale for each 32 inputs, and the integers, scales and minima of weights in blocks
// (packed_blocks.h). blocks.h multiplies the two and defines the order of additions.
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

// Products of at least this many rows use AMX tiles, for which rows are stored in a tiled layout (tiled_layout.h). With
// fewer rows, vector instructions are faster, measured on an Intel Xeon. Without AMX, no product has this number.
#if defined(LLM_AMX)
constexpr size_t kMinAmxRows = 25;
#else
constexpr size_t kMinAmxRows = SIZE_MAX;
#endif

// Most rows that are multiplied by qvalues widened in registers; more rows share qvalues widened in memory. Measured on
// Zen 4: with AVX-512, 24 rows take 0.92 to 0.97 times as long as with qvalues in memory and 8 rows 0.56 to 0.79 times;
// with AVX2, more than 8 rows of Q6_K take longer.
constexpr size_t kMostRegisterRows = kNative == kLanes ? 24 : 8;
template <>
constexpr bool spreads_prefetches<BlockByte>(size_t rows) {
  return rows > kMostRegisterRows;
}

// Unused bytes behind each row that is multiplied in registers: rows a multiple of 4 KB apart would share few sets of a
// cache.
constexpr size_t kRowGap = 64;

constexpr size_t kHalfBlock = kBlockInputs / 2;
constexpr size_t kBlockLines = kBlockInputs / kFourInputs;
constexpr size_t kHalfLines = kBlockLines / 2;

// What is subtracted from qvalues of `kBits` bits, so that they are signed: AVX2 multiplies 8 bits faster then.
#if LLM_AVX2_ONLY && defined(LLM_BYTE_PAIRS)
template <size_t kBits>
constexpr int32_t kLineOffset = kBits == 8 ? kCodeOffset : 0;
#else
template <size_t kBits>
constexpr int32_t kLineOffset = 0;
#endif

// The number that the sum of a group begins with, divided by the sum of the row's qvalues over the group. It corrects
// sums for kLineOffset and, without minima, for the zero point.
LLM_INLINE int32_t begin_factor(const BlockForm& form) {
  return (form.bits == 8 ? kLineOffset<8> : 0) - static_cast<int32_t>(form.zero);
}

// Distinct zero points, which are 0 or powers of two (can_pack).
constexpr size_t kMaxZeros = 9;

// What products need of the sums of a row's qvalues over each group of inputs. All arrays are [groups][rows].
struct GroupSums {
  float* negative_scaled;  // -(row sum * scale of the row), for forms with minima
  // For each begin_factor of the forms without minima: what the sums of groups begin with.
  size_t num_factors = 0;
  int32_t factor[kMaxZeros];
  int32_t* begins[kMaxZeros];

  LLM_INLINE void set(size_t at, int32_t sum, float scale) const {
    negative_scaled[at] = static_cast<float>(-sum) * scale;
    for (size_t i = 0; i < num_factors; i++) begins[i][at] = factor[i] * sum;
  }

  size_t index_of(const BlockForm& form) const {
    size_t i = 0;
    while (i < num_factors && factor[i] != begin_factor(form)) i++;
    return i;
  }
};

// Rows as qvalues with a scale for each 32 inputs.
struct QuantizedBlocks : Activations<BlockByte> {
  const float* scale;               // [blocks][rows]
  GroupSums block_sums, half_sums;  // over groups of 32 and of 16 inputs

  const GroupSums& sums_of(size_t group) const { return group == kHalfBlock ? half_sums : block_sums; }
  // For forms without minima.
  const int32_t* begins_of(const BlockForm& form) const {
    const GroupSums& sums = sums_of(form.group);
    return sums.begins[sums.index_of(form)];
  }
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
  ActivationForm<BlockByte> form(args.m, args.k);
  if (args.m >= kMinAmxRows) form.layout.tile = kBlockInputs;  // 16 rows x 32 inputs are contiguous
  if (!spreads_prefetches<BlockByte>(args.m)) form.layout.width += kRowGap;
  const size_t blocks = form.inputs / kBlockInputs, numbers = blocks * args.m;
  const size_t stride = args.x_layout.or_rows(args.m, args.k).width, bytes = form.bytes(args.m);
  GroupSums block_sums, half_sums;
  for (size_t i = 0; i < args.qvalues->num_segments; i++) {
    const BlockForm& segment = args.qvalues->segments[i].form;
    if (segment.has_minima || block_sums.index_of(segment) < block_sums.num_factors) continue;
    block_sums.factor[block_sums.num_factors++] = begin_factor(segment);
  }
  half_sums = block_sums;
  auto* qvalues = static_cast<uint8_t*>(scratch(Scratch::kActivations, bytes + 1));
  const size_t arrays = 1 + 3 * (1 + block_sums.num_factors);
  auto* scale = static_cast<float*>(scratch(Scratch::kItems, arrays * numbers * sizeof(float) + 1));
  block_sums.negative_scaled = scale + numbers;
  half_sums.negative_scaled = scale + 2 * numbers;
  for (size_t i = 0; i < block_sums.num_factors; i++) {
    block_sums.begins[i] = reinterpret_cast<int32_t*>(scale) + (4 + 3 * i) * numbers;
    half_sums.begins[i] = block_sums.begins[i] + numbers;
  }
  for_rows_of_x(args, [&](size_t row) {
    const Element* x = static_cast<const Element*>(args.x) + row * stride;
    for (size_t block = 0, k = 0; block < blocks; block++, k += kBlockInputs) {
      const size_t at = block * args.m + row;
      const Floats factor = broadcast(code_factor(largest_bits(x + k, kBlockInputs), &scale[at]));
      uint8_t* target = qvalues + form.layout.at(row, k);
      encode(x + k, kBlockInputs, factor, scale[at] == scale[at], 0, target);
      const int32_t first = half_sum(target), second = half_sum(target + kHalfBlock);
      half_sums.set(2 * block * args.m + row, first, scale[at]);
      half_sums.set((2 * block + 1) * args.m + row, second, scale[at]);
      block_sums.set(at, first + second, scale[at]);
    }
  });
  return {{form, qvalues}, scale, block_sums, half_sums};
}

// The form of a panel of the weight.
LLM_INLINE const BlockForm& block_form(const LinearArgs& args, size_t panel) {
  return args.qvalues->segment_of(args.qvalues->first_panel + panel).form;
}

inline const BlockByte* whole_panel(const LinearArgs& args, size_t panel, size_t, BlockByte*) {
  const size_t at = args.qvalues->first_panel + panel;
  const BlockSegment& segment = args.qvalues->segment_of(at);
  const size_t bytes = BlockLayout(segment.form).panel_bytes(args.k);
  return static_cast<const BlockByte*>(args.weight) + segment.offset + (at - segment.first_panel) * bytes;
}

// Calls body(std::integral_constant<size_t, bits>()), where `bits` of a form are 4, 5, 6 or 8.
template <class Body>
void with_bits(size_t bits, Body body) {
  switch (bits) {
    case 4:
      return body(std::integral_constant<size_t, 4>());
    case 5:
      return body(std::integral_constant<size_t, 5>());
    case 6:
      return body(std::integral_constant<size_t, 6>());
    default:
      return body(std::integral_constant<size_t, 8>());
  }
}

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

// The scales of a group of sixteen columns, and its minima, which are 0 if the form has none:
// value = scale * (qvalue - zero) - minimum.
struct GroupNumbers {
  Floats scale, minimum;
};

// Reads the numbers of groups of a chunk. All are exact in float32.
struct GroupReader {
  const BlockLayout& layout;
  const BlockForm& form;
  const uint8_t* records;
  Floats scale_unit, minimum_unit;

  LLM_INLINE GroupReader(const BlockForm& form, const BlockLayout& layout, const BlockChunk& chunk)
      : layout(layout), form(form), records(chunk.records) {
    const auto* units = reinterpret_cast<const Float16*>(chunk.units);
    scale_unit = form.has_units ? load(units) : zeros();
    minimum_unit = form.has_minima && form.has_units ? load(units + kPanelWidth) : zeros();
  }

  LLM_INLINE GroupNumbers numbers(size_t group) const {
    const uint8_t* record = records + group * layout.record_bytes;
    const auto* halves = reinterpret_cast<const Float16*>(record);
    const Floats scale = form.has_units ? load(reinterpret_cast<const int8_t*>(record)) * scale_unit : load(halves);
    if (!form.has_minima) return {scale, zeros()};
    return {scale, form.has_units ? load(record + kPanelWidth) * minimum_unit : load(halves + kPanelWidth)};
  }
};

// Adds a group to the total of a row. `negative_scaled_sum`: of GroupSums, for this group and row.
template <bool kHasMinima>
LLM_INLINE Floats add_group(const Floats& total, const Floats& sums, const GroupNumbers& numbers, float row_scale,
                            [[maybe_unused]] float negative_scaled_sum) {
  const Floats with_sum = multiply_add(to_numbers(sums) * numbers.scale, broadcast(row_scale), total);
  if constexpr (!kHasMinima) return with_sum;
  return multiply_add(numbers.minimum, broadcast(negative_scaled_sum), with_sum);
}

}  // namespace llm::LLM_ISA
