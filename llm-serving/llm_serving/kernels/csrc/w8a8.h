// W8A8: weights of 8 bits with a scale for each column, times rows that are brought to 8 bits with a scale each.
//
//   rows     scale = largest magnitude / 127; code = x * (127 / largest), rounded to the nearest even integer
//   sums     of products of codes, in 32 bits: exact, so their order is free
//   results  (sum * scale of the column) * scale of the row, each rounded to float32
// The bits of a row are those of kernels/w8a8.py on every instruction set. A row that holds infinity or NaN becomes
// NaN.
//
// vpdpbusd takes one of its operands without sign: activations are kept as code + 128, and 128 times the sum of a
// column's codes is taken off the result. It adds in 32 bits without saturating, unlike vpmaddubsw in 16; elsewhere
// codes are widened to 16 bits first.
#pragma once

#include "linear.h"

namespace llm::LLM_ISA {

// Of a weight.
struct Code8 {
  int8_t value;
};

// What codes of activations are moved by to lose their sign.
constexpr int32_t kCodeOffset = 128;
// Rows without a larger number count as zeros: 127 / largest stays far from overflow.
constexpr float kLeastLargest = 0x1p-100f;

#if defined(__AVX512VNNI__)
// Sums are 32-bit integers in all but name: gcc 12 puts some of 24 vectors of integers on the stack.
template <>
struct Operand<Code8> {
  using Activation = uint8_t;
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
typedef int16_t NativeHalves __attribute__((vector_size(kNative * 4)));

// The products of two pairs of 16-bit numbers in each lane, added.
LLM_INLINE NativeInt multiply_pairs(NativeHalves a, NativeHalves b) {
#if defined(__AVX512BW__)
  return (NativeInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (NativeInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (NativeInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const NativeInt x = (NativeInt)a, y = (NativeInt)b;
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

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

// ---- Activations ---------------------------------------------------------------------------------------------------

// Rows as codes, and their scales [rows].
struct CodedRows : Activations<Code8> {
  const float* scale;
};

// Bits of the largest magnitude among `count` numbers; those of NaN are the largest.
template <class Element>
LLM_INLINE uint32_t largest_bits(const Element* x, size_t count) {
  NativeInt largest[kParts] = {};
  for (size_t i = 0; i < count; i += kLanes) {
    const Floats value = load_first(x + i, count - i);
    for (size_t p = 0; p < kParts; p++) {
      const NativeInt magnitude = (NativeInt)value.part[p] & 0x7fffffff;
      largest[p] = magnitude > largest[p] ? magnitude : largest[p];
    }
  }
  uint32_t result = 0;
  for (size_t p = 0; p < kParts; p++) {
    for (size_t j = 0; j < kNative; j++) {
      const uint32_t bits = static_cast<uint32_t>(largest[p][j]);
      result = bits > result ? bits : result;
    }
  }
  return result;
}

// What a row is multiplied by to become codes; sets `scale` to what codes are multiplied by to become the row.
LLM_INLINE float code_factor(uint32_t largest_bits, float* scale) {
  constexpr uint32_t kInfinity = 0x7f800000;
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof(largest));
  const bool is_finite = largest_bits < kInfinity;
  const bool is_zero = is_finite && largest < kLeastLargest;
  *scale = is_zero ? 0.0f : is_finite ? largest / 127.0f : __builtin_nanf("");
  return is_zero || !is_finite ? 0.0f : 127.0f / largest;
}

// Sixteen codes, moved by the offset.
LLM_INLINE void store_codes(uint8_t* target, Floats value) {
  typedef uint8_t NativeByte __attribute__((vector_size(kNative)));
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits of the sum are then.
  const Floats rounded = value + broadcast(12582912.0f);
  LLM_FOR_PARTS {
    const NativeByte codes = __builtin_convertvector(((NativeUint)rounded.part[i] + kCodeOffset) & 0xff, NativeByte);
    __builtin_memcpy(target + i * kNative, &codes, sizeof(codes));
  }
}

template <class Element>
CodedRows code_rows(const LinearArgs& args) {
  const ActivationForm<Code8> form(args.m, args.k);
  const size_t stride = args.x_passes.or_rows(args.m, args.k).width;
  // The last pass takes as much memory as the others.
  const size_t columns = form.inputs == 0 ? 0 : Passes::padded(form.inputs, form.pass);
  const size_t bytes = Passes::padded(args.m * columns, sizeof(float));
  auto* codes = static_cast<uint8_t*>(scratch(Scratch::kActivations, bytes + args.m * sizeof(float)));
  auto* scale = reinterpret_cast<float*>(codes + bytes);
  for_rows_of_x(args, [&](size_t row) {
    const Element* x = static_cast<const Element*>(args.x) + row * stride;
    const Floats factor = broadcast(code_factor(largest_bits(x, args.k), &scale[row]));
    const bool is_finite = scale[row] == scale[row];
    for (size_t first = 0; first < form.inputs; first += form.pass) {
      const size_t last = first + form.pass < form.inputs ? first + form.pass : form.inputs;
      uint8_t* target = codes + form.passes.at(row, first);
      for (size_t i = first; i < last; i += kLanes) {
        alignas(16) uint8_t sixteen[kLanes];
        store_codes(sixteen, is_finite ? load_first(x + i, args.k - i) * factor : zeros());
        __builtin_memcpy(target + i - first, sixteen, last - i < kLanes ? last - i : kLanes);
      }
    }
  });
  return {{form, codes}, scale};
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Panels of codes are whole in memory.
inline const Code8* whole_panel(const LinearArgs& args, size_t panel, size_t inputs, Code8*) {
  return static_cast<const Code8*>(args.weight) + panel * kPanelWidth * inputs;
}

inline void sum_products(const LinearArgs& args, const CodedRows& x, size_t row, size_t rows,
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

inline void w8a8_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    linear_with<Element>(args, code_rows<Element>(args));
  });
}

}  // namespace llm::LLM_ISA
