// Products of weights in blocks (packed_blocks.h) and rows in the model dtype.
//
// weights  scale * (qvalue - zero) - minimum; the product and the difference are rounded to float32, then the value to
//          the model dtype
// results  those of a weight of such elements (tile.h): the same products, added in the same order
//
// A few panels and inputs at a time are dequantized into the caches, and multiplied like any weight.
#pragma once

#include "blocks.h"

namespace llm::LLM_ISA {

template <class Element>
struct RowsOfElements : Activations<Element> {
  using Packed = BlockByte;
};

// Most inputs that are dequantized together: four panels of bfloat16 fill 64 KB.
constexpr size_t kDequantizedInputs = 512;

// The values of input `input` of the four inputs of a line.
template <bool kMinima>
LLM_INLINE Floats dequantized(const CodeFactor& line, int input, Floats zero, const GroupNumbers& numbers) {
  Floats result;
  LLM_FOR_PARTS {
    const NativeUint qvalue = (NativeUint)line.part[i] >> (8 * input) & 0xff;
    result.part[i] = __builtin_convertvector((NativeInt)qvalue, NativeFloat);
  }
  result = (result - zero) * numbers.scale;
  return kMinima ? result - numbers.minimum : result;
}

// Writes sixteen pairs of elements.
LLM_INLINE void store_pairs(BFloat16* target, const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t kOrder[2 * kPanelWidth] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                   21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                   11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  _mm512_storeu_si512(target, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
#else
  LLM_FOR_PARTS {
    const NativeUint pairs = bfloat16_bits(first.part[i]) | bfloat16_bits(second.part[i]) << 16;
    __builtin_memcpy(static_cast<void*>(target + 2 * i * kNative), &pairs, sizeof(pairs));
  }
#endif
}

// Writes the four inputs of a line in the order of packed elements.
template <bool kMinima, class Element>
LLM_INLINE void dequantize_line(const CodeFactor& line, Floats zero, const GroupNumbers& numbers, Element* target) {
  for (int input = 0; input < static_cast<int>(kFourInputs); input += 2) {
    const Floats first = dequantized<kMinima>(line, input, zero, numbers);
    const Floats second = dequantized<kMinima>(line, input + 1, zero, numbers);
    Element* to = target + static_cast<size_t>(input) * kPanelWidth;
    if constexpr (Operand<Element>::kInputs == 1) {
      store(to, first);
      store(to + kPanelWidth, second);
    } else {
      store_pairs(to, first, second);
    }
  }
}

// Dequantizes `inputs` of a panel from input `first` on, both multiples of 32.
template <size_t kBits, bool kMinima, class Element>
void dequantize_panel(const BlockForm& form, const uint8_t* panel, size_t k, size_t first, size_t inputs,
                      Element* target) {
  const BlockLayout layout(form);
  const Floats zero = broadcast(static_cast<float>(form.zero));
  const size_t last = (first + inputs) / kBlockInputs;
  for (size_t block = first / kBlockInputs; block < last;) {
    const BlockChunk chunk(layout, panel, k, block / kChunkBlocks);
    const GroupReader reader(form, layout, chunk);
    size_t within = block % kChunkBlocks;
    for (; within < chunk.blocks && block < last; within++, block++) {
      const uint8_t* planes = chunk.planes + within * layout.plane_bytes;
      GroupNumbers numbers = reader.numbers(within * layout.block_groups);
#pragma GCC unroll 8
      for (size_t line = 0; line < kBlockLines; line++, target += kFourInputs * kPanelWidth) {
        if (line == kHalfLines && layout.block_groups == 2) numbers = reader.numbers(within * 2 + 1);
        dequantize_line<kMinima>(line_of<kBits>(planes, line), zero, numbers, target);
      }
    }
  }
}

template <class Element>
void dequantize_panel(const BlockForm& form, const uint8_t* panel, size_t k, size_t first, size_t inputs,
                      Element* target) {
  switch (form.bits) {
    case 4:
      if (form.has_minima) return dequantize_panel<4, true>(form, panel, k, first, inputs, target);
      return dequantize_panel<4, false>(form, panel, k, first, inputs, target);
    case 5:
      if (form.has_minima) return dequantize_panel<5, true>(form, panel, k, first, inputs, target);
      return dequantize_panel<5, false>(form, panel, k, first, inputs, target);
    case 6:
      return dequantize_panel<6, false>(form, panel, k, first, inputs, target);
    default:
      return dequantize_panel<8, false>(form, panel, k, first, inputs, target);
  }
}

template <class Element>
void sum_products(const LinearArgs& args, const RowsOfElements<Element>& x, size_t row, size_t rows,
                  const UnitPanels<BlockByte>& panels, float* sums) {
  if (x.inputs == 0) __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
  const size_t bytes = kTilePanels * kDequantizedInputs * kPanelWidth * sizeof(Element);
  auto* memory = static_cast<Element*>(scratch(Scratch::kPanel, bytes));
  for (size_t first = 0; first < panels.count; first += kTilePanels) {
    const size_t count = panels.count - first < kTilePanels ? panels.count - first : kTilePanels;
    for (size_t k = 0; k < x.inputs;) {
      const size_t to_pass = (k / x.pass + 1) * x.pass, to_end = k + kDequantizedInputs;
      const size_t limit = to_pass < to_end ? to_pass : to_end, end = limit < x.inputs ? limit : x.inputs;
      const Element* now[kTilePanels];
      for (size_t p = 0; p < count; p++) {
        const size_t at = args.qvalues->first_panel + panels.index[first + p];
        const BlockForm& form = args.qvalues->segment_of(at).form;
        Element* target = memory + p * kDequantizedInputs * kPanelWidth;
        dequantize_panel(form, reinterpret_cast<const uint8_t*>(panels.data[first + p]), args.k, k, end - k, target);
        now[p] = target;
      }
      Product<Element> product(rows, x.at(row, k), now, count, end - k, sums + first * rows * kPanelWidth);
      product.a_stride = x.layout.width;
      product.a_tile = x.layout.tile;
      product.add_to_c = k > 0;
      multiply(product);
      k = end;
    }
  }
}

inline void weight_only_blocks_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    const ActivationForm<Element> form(args.m, args.k);
    linear_with<Element>(args, RowsOfElements<Element>{prepare_activations<Element>(args, form)});
  });
}

}  // namespace llm::LLM_ISA
