// Depthwise causal convolutions over the rows of sequences.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace llm::LLM_ISA {

// Columns of a work item: a thread computes them for all rows of a sequence.
constexpr size_t kConvColumns = 256;

// Computes columns [first, first + count) of the rows of one sequence.
template <class Element, Gate kGate>
void convolve_columns(const CausalConvArgs& args, size_t sequence, size_t first, size_t count) {
  const size_t before = args.taps - 1;
  // A copy, because a row may store to the slot that is read here.
  float history[kMaxTaps - 1][kConvColumns] = {};
  if (const int64_t slot = args.sequences.in[sequence]; slot >= 0) {
    const float* state = args.states + static_cast<size_t>(slot) * before * args.size + first;
    for (size_t i = 0; i < before; i++) __builtin_memcpy(history[i], state + i * args.size, count * sizeof(float));
  }
  const size_t first_row = static_cast<size_t>(args.sequences.first_rows[sequence]);
  const Element* x = static_cast<const Element*>(args.x) + first_row * args.x_stride + first;
  Element* y = static_cast<Element*>(args.y) + first_row * args.y_stride + first;
  // Sixteen columns of row `at` of history and sequence together.
  auto input = [&](size_t at, size_t column, size_t left) {
    if (at < before) return load_first(history[at] + column, left);
    return load_first(x + (at - before) * args.x_stride + column, left);
  };
  auto finish = [&](size_t row, size_t column, size_t left, Floats sum) {
    if (kGate == Gate::kSilu) sum = gate_times<Gate::kSilu>(sum, broadcast(1.0f));
    store_first(y + row * args.y_stride + column, sum, left);
  };
  const float* bias = args.bias == nullptr ? nullptr : args.bias + first;
  const float* weight = args.weight + first;
  for (size_t row = 0; row < static_cast<size_t>(args.sequences.lens[sequence]); row++) {
    size_t column = 0;
    if (row >= before) {  // the same sums as below; all rows are in x, none in the state
      const Element* oldest = x + (row - before) * args.x_stride;
      for (; column + kLanes <= count; column += kLanes) {
        Floats sum = bias == nullptr ? zeros() : load(bias + column);
        for (size_t tap = 0; tap < args.taps; tap++) {
          sum = multiply_add(load(oldest + tap * args.x_stride + column), load(weight + tap * args.size + column), sum);
        }
        finish(row, column, kLanes, sum);
      }
    }
    for (; column < count; column += kLanes) {
      const size_t left = count - column;
      Floats sum = bias == nullptr ? zeros() : load_first(bias + column, left);
      for (size_t tap = 0; tap < args.taps; tap++) {
        sum = multiply_add(input(row + tap, column, left), load_first(weight + tap * args.size + column, left), sum);
      }
      finish(row, column, left, sum);
    }
    const int64_t slot = args.sequences.out[first_row + row];
    if (slot < 0) continue;
    float* state = args.states + static_cast<size_t>(slot) * before * args.size + first;
    for (size_t i = 0; i < before; i++) {
      for (size_t column = 0; column < count; column += kLanes) {
        const size_t left = count - column;
        store_first(state + i * args.size + column, input(row + 1 + i, column, left), left);
      }
    }
  }
}

template <class Element, Gate kGate>
void convolve(const CausalConvArgs& args) {
  const size_t parts = (args.size + kConvColumns - 1) / kConvColumns;
  const size_t count = args.sequences.count;
  size_t rows = 0;
  for (size_t i = 0; i < count; i++) rows += static_cast<size_t>(args.sequences.lens[i]);
  if (rows == 0) return;
  for_row_ranges(count * parts, (rows + count - 1) / count * kConvColumns, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
      const size_t first = i % parts * kConvColumns;
      const size_t left = args.size - first;
      convolve_columns<Element, kGate>(args, i / parts, first, left < kConvColumns ? left : kConvColumns);
    }
  });
}

inline void causal_conv(const CausalConvArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    args.gate == Gate::kSilu ? convolve<Element, Gate::kSilu>(args) : convolve<Element, Gate::kNone>(args);
  });
}

}  // namespace llm::LLM_ISA
