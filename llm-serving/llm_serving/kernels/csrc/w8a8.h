// W8A8: weights of 8 bits with a scale for each column, times rows quantized to 8 bits with a scale each.
//
// rows     quantized_rows.h
// sums     of products of qvalues, in 32 bits: exact, so their order is free
// results  (sum * scale of the column) * scale of the row, each rounded to float32; without scales the sums, int32
// The bits of a row are those of tests/support/kernels/quantized_products.py on every instruction set.
//
// With vpdpbusd, activations are stored as qvalue + 128 (qvalues.h), and 128 times the sum of a column's qvalues is
// subtracted from the result.
#pragma once

#include "quantized_rows.h"

namespace llm::LLM_ISA {

// Panels of qvalues are whole in memory.
inline const Code8* whole_panel(const LinearArgs& args, size_t panel, size_t inputs, Code8*) {
  return static_cast<const Code8*>(args.weight) + panel * kPanelWidth * inputs;
}

inline void sum_products(const LinearArgs& args, const QuantizedRows<Code8>& x, size_t row, size_t rows,
                         const UnitPanels<Code8>& panels, float* sums) {
  // Prefetched because scales are read only at the end of the unit, and are not yet in any cache.
  for (size_t p = 0; p < panels.count; p++) {
    const size_t first = panels.index[p] * kPanelWidth;
    __builtin_prefetch(args.qvalues->sums + first);
    if (args.qvalues->scale != nullptr) __builtin_prefetch(args.qvalues->scale + first);
  }
  add_products<Code8>(x, row, rows, panels, sums);
  for (size_t p = 0; p < panels.count; p++) {
    const bool scales = args.qvalues->scale != nullptr;
    const Floats scale = scales ? load(args.qvalues->scale + panels.index[p] * kPanelWidth) : zeros();
    NativeInt offset[kParts];
    __builtin_memcpy(offset, args.qvalues->sums + panels.index[p] * kPanelWidth, sizeof(offset));
    LLM_FOR_PARTS offset[i] *= Operand<Code8>::kOffset;
    for (size_t r = 0; r < rows; r++) {
      float* target = sums + (p * rows + r) * kPanelWidth;
      Floats value;
      LLM_FOR_PARTS {
        NativeInt sum;
        __builtin_memcpy(&sum, target + i * kNative, sizeof(sum));
        sum -= offset[i];
        value.part[i] = scales ? __builtin_convertvector(sum, NativeFloat) : (NativeFloat)sum;
      }
      store(target, scales ? value * scale * broadcast(x.scale[row + r]) : value);
    }
  }
}

// Moves rows that are already qvalues.
inline QuantizedRows<Code8> moved_rows(const LinearArgs& args, const ActivationForm<Code8>& form) {
  using Activation = ActivationOf<Code8>;
  auto* moved = static_cast<Activation*>(scratch(Scratch::kActivations, form.bytes(args.m) + 1));
  for_rows_of_x(args, [&](size_t row) {
    const auto* qvalues = static_cast<const int8_t*>(args.x) + row * args.k;
    form.layout.for_runs(row, 0, form.inputs, [&](size_t first, size_t last, size_t at) {
      for (size_t i = first; i < last; i++) {
        const int32_t qvalue = (i < args.k ? qvalues[i] : 0) + Operand<Code8>::kOffset;
        moved[at + position_of<Activation>(i - first)] = static_cast<Activation>(qvalue);
      }
    });
  });
  return {{form, moved}, args.x_scale};
}

inline void w8a8_linear(const LinearArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    const ActivationForm<Code8> form(args.m, args.k);
    const bool is_quantized = args.x_scale != nullptr || args.qvalues->scale == nullptr;
    if (is_quantized) return linear_with<Element>(args, moved_rows(args, form));
    linear_with<Element>(args, code_rows<Element>(args, form, [](size_t, const ActivationOf<Code8>*) {}));
  });
}

}  // namespace llm::LLM_ISA
