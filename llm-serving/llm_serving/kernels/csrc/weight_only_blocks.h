// Products of weights in blocks (packed_blocks.h) and rows in the model dtype.
//
// weights  scale * (qvalue - zero) - minimum, rounded to float32, then to the model dtype. With a minimum, the product
//          is exact in float32, so a fused multiply-add gives the same bits as two operations.
// results  those of a weight of such elements (tile.h): the same products, added in the same order
//
// With one or two rows, products of bfloat16 dequantize panels in registers. Otherwise, a few panels and inputs at a
// time are dequantized into the caches, and multiplied like any weight.
#pragma once

#include "blocks.h"
#include "pair_products.h"

namespace llm::LLM_ISA {

template <class Element>
struct RowsOfElements : Activations<Element> {
  using Packed = BlockByte;
};

// Most inputs that are dequantized together: four panels of bfloat16 fill 64 KB.
constexpr size_t kDequantizedInputs = 512;

// The scales of a group of sixteen columns, and the minima with the opposite sign. Without minima this is -0, because
// adding -0 changes no number.
struct GroupTerms {
  Floats scale, negative_minimum;

  LLM_INLINE GroupTerms(const BlockForm& form, const GroupNumbers& numbers)
      : scale(numbers.scale), negative_minimum(broadcast(-0.0f)) {
    if (form.has_minima) negative_minimum = negative_minimum - numbers.minimum;
  }

  LLM_INLINE Floats value(Floats number) const { return multiply_add(number, scale, negative_minimum); }
};

#if defined(__AVX512F__)
// Sixteen pairs of numbers, rounded to bfloat16.
LLM_INLINE __m512i rounded_pairs(const Floats& first, const Floats& second) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t kOrder[2 * kPanelWidth] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                   21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                   11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.part[0], (__m512)first.part[0]);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
#else
  return (__m512i)(bfloat16_bits(first.part[0]) | bfloat16_bits(second.part[0]) << 16);
#endif
}
#endif

LLM_INLINE void store_pairs(BFloat16* target, const Floats& first, const Floats& second) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(target, rounded_pairs(first, second));
#else
  LLM_FOR_PARTS {
    const NativeUint pairs = bfloat16_bits(first.part[i]) | bfloat16_bits(second.part[i]) << 16;
    __builtin_memcpy(static_cast<void*>(target + 2 * i * kNative), &pairs, sizeof(pairs));
  }
#endif
}

// Writes two inputs in the order of packed elements.
template <class Element>
LLM_INLINE void store_inputs(Element* target, const Floats& first, const Floats& second) {
  if constexpr (Operand<Element>::kInputs == 1) {
    store(target, first);
    store(target + kPanelWidth, second);
  } else {
    store_pairs(target, first, second);
  }
}

// Calls use(first, second) with the numbers of inputs 0 and 1 of line `line` of a block, then with those of inputs 2
// and 3.
template <size_t kBits, class Use>
LLM_INLINE void for_pairs_of_line(const uint8_t* planes, size_t line, float zero, const GroupTerms& terms, Use use) {
  constexpr bool kIsByte = kBits > 4;  // a byte of a plane has the 4-bit qvalues of two lines
  CodeFactor lanes = kIsByte ? line_of<kBits>(planes, line) : load_qvalues(planes + low_plane(4, line) * kLineBytes);
#pragma GCC unroll 2
  for (size_t pair = 0; pair < 2; pair++) {
    Floats first, second;
    if (kIsByte) {
      first = numbers_of<0, 0xff>(lanes, zero), second = numbers_of<8, 0xff>(lanes, zero);
    } else if (line % 2 == 0) {
      first = numbers_of<0, 0xf>(lanes, zero), second = numbers_of<8, 0xf>(lanes, zero);
    } else {
      first = numbers_of<4, 0xf>(lanes, zero), second = numbers_of<12, 0xf>(lanes, zero);
    }
    use(terms.value(first), terms.value(second));
    lanes = high_halves(lanes);
  }
}

// Calls use(first, second) with the numbers of each pair of inputs of a panel, from input `first` on, and end_block()
// after each 32 inputs. `first` and `inputs` are multiples of 32.
template <size_t kBits, class Use, class EndBlock>
LLM_INLINE void for_pairs_of_panel(const BlockForm& form, const uint8_t* panel, size_t k, size_t first, size_t inputs,
                                   Use use, EndBlock end_block) {
  const BlockLayout layout(form);
  const auto zero = static_cast<float>(form.zero);
  const size_t block_lines = layout.lines_of_block();
  const size_t last = (first + inputs) / kBlockInputs;
  for (size_t block = first / kBlockInputs; block < last;) {
    const BlockChunk chunk(layout, panel, k, block / kChunkBlocks);
    const GroupReader reader(form, layout, chunk);
    size_t within = block % kChunkBlocks;
    const uint8_t* ahead = chunk.planes + within * block_lines * kLineBytes + kBytesAheadOfBlocks;
    for (; within < chunk.blocks && block < last; within++, block++) {
      const uint8_t* planes = chunk.planes + within * layout.plane_bytes;
      GroupTerms terms(form, reader.numbers(within * layout.block_groups));
      for (size_t i = 0; i < block_lines; i++, ahead += kLineBytes) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 8
      for (size_t line = 0; line < kBlockLines; line++) {
        if (line == kHalfLines && layout.block_groups == 2) terms = {form, reader.numbers(within * 2 + 1)};
        for_pairs_of_line<kBits>(planes, line, zero, terms, use);
      }
      end_block();
    }
  }
}

// Dequantizes `inputs` of a panel from input `first` on, both multiples of 32.
template <size_t kBits, class Element>
void dequantize_panel(const BlockForm& form, const uint8_t* panel, size_t k, size_t first, size_t inputs,
                      Element* target) {
  auto write = [&](const Floats& a, const Floats& b) LLM_INLINE_LAMBDA {
    store_inputs(target, a, b);
    target += 2 * kPanelWidth;
  };
  for_pairs_of_panel<kBits>(form, panel, k, first, inputs, write, [] {});
}

#if defined(LLM_PAIR_PRODUCTS)
// Up to this number of rows, panels are dequantized in registers. On an Intel Xeon with AMX, a buffer is about as fast
// for more rows.
constexpr size_t kRegisterPairRows = 2;

// Multiplies a few rows by a panel, which is dequantized in registers.
template <size_t kBits, size_t kRows>
void multiply_pairs(const BlockForm& form, size_t k, const uint8_t* panel, const BFloat16* a, size_t a_stride,
                    float* totals) {
  PairProduct::Sum sums[kRows];
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) sums[r] = PairProduct::begin(nullptr);
  auto multiply_pair = [&](const Floats& first, const Floats& second) LLM_INLINE_LAMBDA {
    const PairProduct::Factor factor = PairProduct::of_pairs(rounded_pairs(first, second));
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) {
      sums[r] = PairProduct::accumulate(broadcast_pair(a + r * a_stride), factor, sums[r]);
    }
    a += 2;
  };
  auto end_step = [&]() LLM_INLINE_LAMBDA {
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; r++) sums[r] = PairProduct::end_step(sums[r]);
  };
  for_pairs_of_panel<kBits>(form, panel, k, 0, k, multiply_pair, end_step);
#pragma GCC unroll 8
  for (size_t r = 0; r < kRows; r++) store(totals + r * kPanelWidth, PairProduct::total(sums[r]));
}
#endif

template <class Element>
constexpr bool dequantizes_in_registers([[maybe_unused]] size_t rows) {
#if defined(LLM_PAIR_PRODUCTS)
  return std::is_same<Element, BFloat16>::value && rows <= kRegisterPairRows;
#else
  return false;
#endif
}

template <class Element>
void sum_products(const LinearArgs& args, const RowsOfElements<Element>& x, size_t row, size_t rows,
                  const UnitPanels<BlockByte>& panels, float* sums) {
  if (x.inputs == 0) __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
  auto form_of = [&](size_t p) -> const BlockForm& { return block_form(args, panels.index[p]); };
  auto bytes_of = [&](size_t p) { return reinterpret_cast<const uint8_t*>(panels.data[p]); };
#if defined(LLM_PAIR_PRODUCTS)
  if constexpr (std::is_same<Element, BFloat16>::value) {
    if (dequantizes_in_registers<Element>(args.m)) {
      for (size_t p = 0; p < panels.count; p++) {
        with_bits(form_of(p).bits, [&](auto bits) {
          constexpr size_t kBits = decltype(bits)::value;
          auto multiply = rows == 1 ? multiply_pairs<kBits, 1> : multiply_pairs<kBits, kRegisterPairRows>;
          multiply(form_of(p), args.k, bytes_of(p), x.at(row, 0), x.layout.width, sums + p * rows * kPanelWidth);
        });
      }
      return;
    }
  }
#endif
  const size_t bytes = kTilePanels * kDequantizedInputs * kPanelWidth * sizeof(Element);
  auto* memory = static_cast<Element*>(scratch(Scratch::kPanel, bytes));
  const bool stays = rows * x.inputs * sizeof(*x.data) <= kCachedRowBytes;
  // All panels of the unit are multiplied by the inputs of a pass, which stay in the second-level cache, before the
  // next pass begins.
  for (size_t k = 0; k < x.inputs;) {
    const size_t to_pass = (k / x.pass + 1) * x.pass, to_end = k + kDequantizedInputs;
    const size_t limit = to_pass < to_end ? to_pass : to_end, end = limit < x.inputs ? limit : x.inputs;
    for (size_t first = 0; first < panels.count; first += kTilePanels) {
      const size_t count = panels.count - first < kTilePanels ? panels.count - first : kTilePanels;
      const Element* now[kTilePanels];
      for (size_t p = 0; p < count; p++) {
        Element* target = memory + p * kDequantizedInputs * kPanelWidth;
        with_bits(form_of(first + p).bits, [&](auto bits) {
          constexpr size_t kBits = decltype(bits)::value;
          dequantize_panel<kBits>(form_of(first + p), bytes_of(first + p), args.k, k, end - k, target);
        });
        now[p] = target;
      }
      Product<Element> product(rows, x.at(row, k), now, count, end - k, sums + first * rows * kPanelWidth);
      product.a_stride = x.layout.width;
      product.a_tile = x.layout.tile;
      product.add_to_c = k > 0;
      // Each product prefetches its share of the rows of the next pass.
      const size_t share = first * rows * (end - k) / panels.count;
      if (!stays) product.a_next = x.at(row, end < x.inputs ? end : 0) + share;
      multiply(product);
    }
    k = end;
  }
}

inline void weight_only_blocks_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    ActivationForm<Element> form(args.m, args.k);
    if (dequantizes_in_registers<Element>(args.m)) {
      form.pass = form.layout.width = args.k;
      form.layout.tile = 0;  // rows are read one by one, not by AMX tiles
    }
    linear_with<Element>(args, RowsOfElements<Element>{prepare_activations<Element>(args, form)});
  });
}

}  // namespace llm::LLM_ISA
