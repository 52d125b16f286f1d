// W8A16 and W4A16: codes of 8 or 4 bits with a scale for each column and group of inputs, times rows as they are.
//
//   y = sum over groups, in ascending order, of scale * (sum over the group's inputs of x * (code - zero))
//
// Elements of every type hold code - zero exactly. They are widened a few panels and inputs at a time, into the first
// cache, and multiplied as any weight is, so that a group's sum has the order and the bits of such a product.
#pragma once

#include "linear.h"

namespace llm::LLM_ISA {

// A byte of codes, in the order of the elements they stand for: one of 8 bits, or two of 4: in a block of 64 codes, the
// low half of byte i is code i, the high half code i + 32.
struct WideCode {
  uint8_t bits;
};

constexpr size_t kBlockCodes = 64;
// Inputs that are widened at once: as bfloat16, four panels of them fill 16 KB or, where many rows use them, 128 KB, so
// that sums are put back and taken less often.
constexpr size_t widened_inputs(size_t rows) { return rows > (kTilePanels - 1) * kTileRows ? 1024 : 128; }

template <class Element>
struct WideRows : Activations<Element> {
  using Packed = WideCode;
};

// Panels are whole in memory, and their inputs filled up to blocks of any type.
inline const WideCode* whole_panel(const LinearArgs& args, size_t panel, size_t, WideCode*) {
  const size_t codes = kPanelWidth * Passes::padded(args.k, kWidenedMultiple);
  return static_cast<const WideCode*>(args.weight) + panel * codes * args.codes->bits / 8;
}

// Zeros of a panel's columns, as the elements of a block of 64 need them: those of columns, or those of pairs.
template <class Element>
struct BlockZeros {
  Floats low, high;  // of elements 0 to 15, and 16 to 31; then again

  explicit BlockZeros(const uint8_t* zero) {
    constexpr size_t kInputs = std::is_same<Element, BFloat16>::value ? 2 : 1;
    float values[2 * kLanes];
    for (size_t i = 0; i < 2 * kLanes; i++) values[i] = zero == nullptr ? 8.0f : zero[i / kInputs % kPanelWidth];
    low = load(values);
    high = load(values + kLanes);
  }
};

// Sixteen bytes as numbers.
template <class Byte>
LLM_INLINE Floats bytes_as_floats(const Byte* bytes) {
  Floats result;
  LLM_FOR_PARTS {
    Byte part[kNative];
    __builtin_memcpy(part, bytes + i * kNative, sizeof(part));
    NativeInt numbers;
    for (size_t j = 0; j < kNative; j++) numbers[j] = part[j];
    result.part[i] = __builtin_convertvector(numbers, NativeFloat);
  }
  return result;
}

#if defined(__AVX512F__)
template <>
LLM_INLINE Floats bytes_as_floats(const int8_t* bytes) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))}};
}

template <>
LLM_INLINE Floats bytes_as_floats(const uint8_t* bytes) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return {{_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))}};
}
#endif

// Two vectors of numbers that elements hold exactly.
template <class Element>
LLM_INLINE void store_exact(Element* target, Floats low, Floats high) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same<Element, BFloat16>::value) {
    _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high.part[0], low.part[0]));
    return;
  }
#endif
  store(target, low);
  store(target + kLanes, high);
}

template <class Element>
void widen_bytes(const WideCode* codes, size_t blocks, size_t ahead, Element* target) {
  const auto* from = reinterpret_cast<const int8_t*>(codes);
  for (size_t i = 0; i < blocks * kBlockCodes; i += 2 * kLanes) {
    if (i % kBlockCodes == 0) __builtin_prefetch(from + i + ahead);
    store_exact(target + i, bytes_as_floats(from + i), bytes_as_floats(from + i + kLanes));
  }
}

template <class Element>
void widen_halves(const WideCode* codes, size_t blocks, size_t ahead, const uint8_t* zero, Element* target) {
  const BlockZeros<Element> zeros(zero);
  for (size_t block = 0; block < blocks; block++, codes += kBlockCodes / 2, target += kBlockCodes) {
    __builtin_prefetch(codes + ahead);
    uint8_t low[kBlockCodes / 2], high[kBlockCodes / 2];
    for (size_t i = 0; i < kBlockCodes / 2; i++) {
      low[i] = codes[i].bits & 15;
      high[i] = codes[i].bits >> 4;
    }
    store_exact(target, bytes_as_floats(low) - zeros.low, bytes_as_floats(low + kLanes) - zeros.high);
    store_exact(target + kBlockCodes / 2, bytes_as_floats(high) - zeros.low,
                bytes_as_floats(high + kLanes) - zeros.high);
  }
}

#if defined(__AVX512BW__)
// By a table of the bfloat16 from -15 to 15.
template <>
inline void widen_halves(const WideCode* codes, size_t blocks, size_t ahead, const uint8_t* zero, BFloat16* target) {
  alignas(64) uint16_t numbers[32], offsets[32];
  for (size_t i = 0; i < 32; i++) {
    const float number = static_cast<float>(i) - 15.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &number, sizeof(bits));
    numbers[i] = static_cast<uint16_t>(bits >> 16);
    offsets[i] = static_cast<uint16_t>(15 - (zero == nullptr ? 8 : zero[i / 2]));
  }
  const __m512i table = _mm512_load_si512(numbers), offset = _mm512_load_si512(offsets);
  for (size_t block = 0; block < blocks; block++, codes += kBlockCodes / 2, target += kBlockCodes) {
    __builtin_prefetch(codes + ahead);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m512i both = _mm512_cvtepu8_epi16(bytes);
    const __m512i low = _mm512_add_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), offset);
    const __m512i high = _mm512_add_epi16(_mm512_srli_epi16(both, 4), offset);
    _mm512_storeu_si512(target, _mm512_permutexvar_epi16(low, table));
    _mm512_storeu_si512(target + kBlockCodes / 2, _mm512_permutexvar_epi16(high, table));
  }
}
#endif

// `inputs` of a panel from input `k` on, within one group; `zero` of the panel's columns, or null.
template <class Element>
void widen_panel(const WeightCodes& codes, const WideCode* panel, size_t k, size_t inputs, const uint8_t* zero,
                 Element* target) {
  const size_t blocks = (inputs * kPanelWidth + kBlockCodes - 1) / kBlockCodes;
  const WideCode* from = panel + k * kPanelWidth * codes.bits / 8;
  // The same panel's next inputs are wanted after those of the other panels.
  const size_t ahead = blocks * kBlockCodes * codes.bits / 8;
  if (codes.bits == 8) return widen_bytes(from, blocks, ahead, target);
  widen_halves(from, blocks, ahead, zero, target);
}

// Up to four panels of a unit.
template <class Element>
void sum_widened(const LinearArgs& args, const WideRows<Element>& x, size_t row, size_t rows,
                 const UnitPanels<WideCode>& panels, size_t first, float* totals) {
  const WeightCodes& codes = *args.codes;
  const size_t count = panels.count - first < kTilePanels ? panels.count - first : kTilePanels;
  const bool is_whole = codes.group >= args.k;
  const size_t group_inputs = is_whole ? x.inputs : codes.group;
  const size_t at_once = widened_inputs(rows);
  const size_t panel_elements = at_once * kPanelWidth;
  const size_t sums = count * rows * kPanelWidth;
  const size_t widened_bytes = count * panel_elements * sizeof(Element);
  auto* memory = static_cast<char*>(scratch(Scratch::kPanel, widened_bytes + sums * sizeof(float)));
  auto* widened = reinterpret_cast<Element*>(memory);
  // The sums of a group that is alone are the totals.
  float* partial = is_whole ? totals : reinterpret_cast<float*>(memory + widened_bytes);
  const Element* now[kTilePanels];
  for (size_t p = 0; p < count; p++) now[p] = widened + p * panel_elements;
  if (x.inputs == 0) __builtin_memset(totals, 0, sums * sizeof(float));
  auto least = [](size_t a, size_t b) { return a < b ? a : b; };
  for (size_t k = 0; k < x.inputs;) {
    const size_t group = k / group_inputs;
    const size_t group_end = least((group + 1) * group_inputs, x.inputs);
    const size_t end = least(least(k + at_once, group_end), (k / x.pass + 1) * x.pass);
    for (size_t p = 0; p < count; p++) {
      const size_t at = group * codes.stride + panels.index[first + p] * kPanelWidth;
      const uint8_t* zero = codes.zero == nullptr ? nullptr : codes.zero + at;
      widen_panel(codes, panels.data[first + p], k, end - k, zero, widened + p * panel_elements);
    }
    Product<Element> product(rows, x.at(row, k), now, count, end - k, partial);
    product.a_stride = x.passes.width;
    product.a_in_tiles = x.passes.tiles;
    product.add_to_c = k > group * group_inputs;
    multiply(product);
    if (end == group_end) {
      for (size_t p = 0; p < count; p++) {
        const Floats scale = load(codes.scale + group * codes.stride + panels.index[first + p] * kPanelWidth);
        for (size_t r = 0; r < rows; r++) {
          const size_t at = (p * rows + r) * kPanelWidth;
          const Floats before = group == 0 ? zeros() : load(totals + at);
          store(totals + at, multiply_add(load(partial + at), scale, before));
        }
      }
    }
    k = end;
  }
}

template <class Element>
void sum_products(const LinearArgs& args, const WideRows<Element>& x, size_t row, size_t rows,
                  const UnitPanels<WideCode>& panels, float* sums) {
  for (size_t first = 0; first < panels.count; first += kTilePanels) {
    sum_widened(args, x, row, rows, panels, first, sums + first * rows * kPanelWidth);
  }
}

inline void widened_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    linear_with<Element>(args, WideRows<Element>{prepare_activations<Element>(args)});
  });
}

}  // namespace llm::LLM_ISA
