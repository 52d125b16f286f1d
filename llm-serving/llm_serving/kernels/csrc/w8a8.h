// W8A8: weights of 8 bits with a scale for each column, times rows that are brought to 8 bits with a scale each.
//
//   rows     coded_rows.h
//   sums     of products of codes, in 32 bits: exact, so their order is free
//   results  (sum * scale of the column) * scale of the row, each rounded to float32
// The bits of a row are those of kernels/w8a8.py on every instruction set.
//
// vpdpbusd takes one of its operands without sign: activations are kept as code + 128, and 128 times the sum of a
// column's codes is taken off the result. It adds in 32 bits without saturating, unlike vpmaddubsw in 16; elsewhere
// codes are widened to 16 bits first.
#pragma once

#include "coded_rows.h"

namespace llm::LLM_ISA {

// Of a weight.
struct Code8 {
  int8_t value;
};

// What codes of activations are moved by to lose their sign.
constexpr int32_t kCodeOffset = 128;

#if defined(__AVX512VNNI__)
// Sums are 32-bit integers in all but name: gcc 12 puts some of 24 vectors of integers on the stack.
template <>
struct Operand<Code8> {
  using Activation = uint8_t;
  static constexpr int32_t kOffset = kCodeOffset;
  using Factor = __m512i;
  using Sum = __m512;
  static constexpr size_t kInputs = 4;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = kInputs;
  static constexpr bool kQuick = true;

  static LLM_INLINE Factor load_panel(const Code8* panel, size_t) { return _mm512_loadu_si512(panel); }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t) {
    int32_t four;
    __builtin_memcpy(&four, a, sizeof(four));
    return _mm512_set1_epi32(four);
  }

  static LLM_INLINE Sum accumulate(Factor a, Factor b, Sum sum) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }

  static LLM_INLINE Sum begin(const float* c, bool add_to_c) {
    return add_to_c ? _mm512_loadu_ps(c) : _mm512_setzero_ps();
  }

  static LLM_INLINE void end(Sum sum, float* c, bool, const float*) { _mm512_storeu_ps(c, sum); }
};
#else
// Codes in 16 bits: of the even inputs, then of the odd ones.
template <>
struct Operand<Code8> {
  struct Factor {
    NativeHalves part[kParts];
  };
  struct Sum {
    NativeInt part[kParts];
  };
  using Activation = uint8_t;
  static constexpr int32_t kOffset = kCodeOffset;
  static constexpr size_t kInputs = 4;
  static constexpr size_t kFactors = 2;
  static constexpr size_t kMultiple = kInputs;
  static constexpr bool kQuick = false;

  static LLM_INLINE Factor load_panel(const Code8* panel, size_t factor) {
    Factor result;
    LLM_FOR_PARTS {
      NativeHalves codes;
      __builtin_memcpy(&codes, panel + kInputs * i * kNative, sizeof(codes));
      result.part[i] = factor == 0 ? codes << 8 >> 8 : codes >> 8;
    }
    return result;
  }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t factor) {
    uint32_t four;
    __builtin_memcpy(&four, a, sizeof(four));
    const NativeUint pair = NativeUint{} + (four >> (8 * factor) & 0x00ff00ff);
    Factor result;
    LLM_FOR_PARTS result.part[i] = (NativeHalves)pair;
    return result;
  }

  static LLM_INLINE Sum accumulate(const Factor& a, const Factor& b, Sum sum) {
    LLM_FOR_PARTS sum.part[i] += multiply_pairs(a.part[i], b.part[i]);
    return sum;
  }

  static LLM_INLINE Sum begin(const float* c, bool add_to_c) {
    Sum sum = {};
    if (add_to_c) __builtin_memcpy(&sum, c, sizeof(sum));
    return sum;
  }

  static LLM_INLINE void end(const Sum& sum, float* c, bool, const float*) { __builtin_memcpy(c, &sum, sizeof(sum)); }
};
#endif

// ---- Products ------------------------------------------------------------------------------------------------------

// Panels of codes are whole in memory.
inline const Code8* whole_panel(const LinearArgs& args, size_t panel, size_t inputs, Code8*) {
  return static_cast<const Code8*>(args.weight) + panel * kPanelWidth * inputs;
}

inline void sum_products(const LinearArgs& args, const CodedRows<Code8>& x, size_t row, size_t rows,
                         const UnitPanels<Code8>& panels, float* sums) {
  add_products<Code8>(x, row, rows, panels, sums);
  for (size_t p = 0; p < panels.count; p++) {
    const Floats scale = load(args.codes->scale + panels.index[p] * kPanelWidth);
    NativeInt offset[kParts];
    __builtin_memcpy(offset, args.codes->sums + panels.index[p] * kPanelWidth, sizeof(offset));
    LLM_FOR_PARTS offset[i] *= kCodeOffset;
    for (size_t r = 0; r < rows; r++) {
      float* target = sums + (p * rows + r) * kPanelWidth;
      Floats value;
      LLM_FOR_PARTS {
        NativeInt sum;
        __builtin_memcpy(&sum, target + i * kNative, sizeof(sum));
        value.part[i] = __builtin_convertvector(sum - offset[i], NativeFloat);
      }
      store(target, value * scale * broadcast(x.scale[row + r]));
    }
  }
}

// Rows that are codes already.
inline CodedRows<Code8> moved_rows(const LinearArgs& args, const ActivationForm<Code8>& form) {
  const size_t columns = form.inputs == 0 ? 0 : Passes::padded(form.inputs, form.pass);
  auto* moved = static_cast<uint8_t*>(scratch(Scratch::kActivations, args.m * columns + 1));
  for_rows_of_x(args, [&](size_t row) {
    const auto* codes = static_cast<const int8_t*>(args.x) + row * args.k;
    form.passes.for_runs(row, 0, form.inputs, [&](size_t first, size_t last, size_t at) {
      for (size_t i = first; i < last; i++) {
        moved[at + i - first] = static_cast<uint8_t>((i < args.k ? codes[i] : 0) + Operand<Code8>::kOffset);
      }
    });
  });
  return {{form, moved}, args.x_scale};
}

inline void w8a8_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    const ActivationForm<Code8> form(args.m, args.k);
    if (args.x_scale != nullptr) return linear_with<Element>(args, moved_rows(args, form));
    linear_with<Element>(args, code_rows<Element>(args, form, [](size_t, const uint8_t*) {}));
  });
}

}  // namespace llm::LLM_ISA
