// W4A8: weights of 4 bits with a scale for each column and group of inputs, times rows quantized to 8 bits with a scale
// each.
//
// rows     quantized_rows.h
// sums     of products of qvalues, of a group's inputs, in 32 bits: exact, so their order is free
// results  (sum over groups, in ascending order, of group's sum * scale of the column and group) * scale of the row,
//          each product and each sum rounded to float32
// The bits of a row are those of tests/support/kernels/quantized_products.py on every instruction set: nothing
// is fused.
//
// Qvalues of weights are unsigned, as vpdpbusd requires for one operand: a group's sum is that of their products with
// the qvalues of the row, minus the zero point times the sum of the row's qvalues, which is computed in advance.
#pragma once

#include "grouped.h"
#include "quantized_rows.h"

namespace llm::LLM_ISA {

// Two qvalues of a weight.
struct Code4 {
  uint8_t pair;
};

// Layout of rows for it.
template <>
struct Operand<Code4> {
  using Activation = int8_t;
  static constexpr int32_t kOffset = 0;
  static constexpr size_t kMultiple = 8;
#if defined(__AVX512VNNI__)
  static constexpr bool kQuick = true;
#else
  static constexpr bool kQuick = false;
#endif
};

// `kZeros`: whether zero points are given; otherwise they are 8.
template <bool kZeros>
struct NibbleProduct {
  using Activation = int8_t;
  static constexpr size_t kInputs = 8;
  static constexpr size_t kFactors = 2;
  static constexpr size_t kBits = 4;
  static constexpr bool kIsExact = true;
  struct Zero {};
  static LLM_INLINE Zero zero_of(const uint8_t*) { return {}; }

  using Factor = CodeFactor;
  using Sum = Floats;

  static LLM_INLINE Sum begin(const int32_t* row_sum) { return broadcast_sum(kZeros ? 0 : -8 * *row_sum); }

  static LLM_INLINE Factor load_panel(const uint8_t* qvalues, size_t factor, Zero) {
    Factor pairs = load_qvalues(qvalues);
    LLM_FOR_PARTS pairs.part[i] = (NativeInt)((NativeUint)pairs.part[i] >> (4 * factor)) & 0x0f0f0f0f;
    return pairs;
  }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t factor) {
    return broadcast_qvalues(a + 4 * factor);
  }

  static LLM_INLINE Sum accumulate(const Factor& a, const Factor& b, Sum sum) { return add_fours<false>(b, a, sum); }
  static LLM_INLINE Sum add(Sum a, const Sum& b) { return add_sums(a, b); }

  static LLM_INLINE Floats finish(const Sum& sum, Floats scale, Floats before, const uint8_t* zero,
                                  const int32_t* row_sum) {
    Sum integers = sum;
    if constexpr (kZeros) {
      LLM_FOR_PARTS {
        NativeInt qvalues;
        for (size_t j = 0; j < kNative; j++) qvalues[j] = zero[i * kNative + j];
        integers.part[i] = (NativeFloat)((NativeInt)sum.part[i] - qvalues * *row_sum);
      }
    }
    return before + to_numbers(integers) * scale;
  }
};

// Quantized rows with the sums of their qvalues, [groups][rows].
struct SummedRows : QuantizedRows<Code4> {
  const int32_t* sums;
};

template <class Element>
SummedRows code_and_sum_rows(const LinearArgs& args) {
  ActivationForm<Code4> form(args.m, args.k);
  const size_t group = inputs_of_group(*args.qvalues, form.inputs);
  // A group is never divided.
  if (form.pass < group) form.pass = group < form.inputs ? group : form.inputs;
  if (form.layout.width < form.inputs) form.layout.width = form.pass;
  const size_t bytes = args.qvalues->groups * args.m * sizeof(int32_t) + 1;
  auto* sums = static_cast<int32_t*>(scratch(Scratch::kItems, bytes));
  auto add_up = [&](size_t row, const int8_t* qvalues) {
    for (size_t k = 0; k < form.inputs; k += group) {
      const size_t count = form.inputs - k < group ? form.inputs - k : group;
      const int8_t* of_group = qvalues + form.layout.at(row, k);
      int32_t sum = 0;
      for (size_t i = 0; i < count; i++) sum += of_group[i];
      sums[k / group * args.m + row] = sum;
    }
  };
  return {code_rows<Element>(args, form, add_up), sums};
}

inline const Code4* whole_panel(const LinearArgs& args, size_t panel, size_t, Code4*) {
  return static_cast<const Code4*>(args.weight) + panel * panel_bytes(WeightFormat::kW4A8, 4, args.k);
}

template <bool kZeros>
void add_groups(const LinearArgs& args, const SummedRows& x, size_t row, size_t rows, const UnitPanels<Code4>& panels,
                float* totals) {
  auto product = grouped_product<NibbleProduct<kZeros>>(args, panels, rows, totals);
  for (size_t k = 0; k < x.inputs; k += x.pass) {
    product.a = x.at(row, k);
    product.a_stride = x.layout.width;
    product.inputs = x.inputs - k < x.pass ? x.inputs - k : x.pass;
    product.after = x.inputs - k - product.inputs;
    product.row_sums = x.sums + k / product.group * args.m + row;
    product.row_sums_stride = args.m;
    product.add_to_totals = k > 0;
    multiply_grouped(product);
    product.next_pass(x.pass, x.pass / product.group);
  }
}

inline void sum_products(const LinearArgs& args, const SummedRows& x, size_t row, size_t rows,
                         const UnitPanels<Code4>& panels, float* sums) {
  if (x.inputs == 0) {
    __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
  } else if (args.qvalues->zero == nullptr) {
    add_groups<false>(args, x, row, rows, panels, sums);
  } else {
    add_groups<true>(args, x, row, rows, panels, sums);
  }
  for (size_t p = 0; p < panels.count; p++) {
    for (size_t r = 0; r < rows; r++) {
      float* target = sums + (p * rows + r) * kPanelWidth;
      store(target, load(target) * broadcast(x.scale[row + r]));
    }
  }
}

inline void w4a8_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    linear_with<Element>(args, code_and_sum_rows<Element>(args));
  });
}

}  // namespace llm::LLM_ISA
