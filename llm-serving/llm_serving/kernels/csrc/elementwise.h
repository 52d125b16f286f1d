// RMSNorm, rotary embedding, SwiGLU and addition: rows of float arithmetic, rounded once at the end.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace llm::LLM_ISA {

// Elements below which one thread is quicker than waking another.
constexpr size_t kElementsPerTask = 16384;

// Calls body(first, last) for ranges that cover [0, rows); which rows share a range changes no row.
template <class Body>
void for_row_ranges(size_t rows, size_t row_size, Body body) {
  const size_t rows_per_task = row_size >= kElementsPerTask ? 1 : kElementsPerTask / (row_size + 1) + 1;
  auto task = [&](size_t i) {
    const size_t first = i * rows_per_task;
    body(first, first + rows_per_task < rows ? first + rows_per_task : rows);
  };
  parallel_for((rows + rows_per_task - 1) / rows_per_task, task);
}

// y = a + b
template <class Element>
void add_row(const Element* a, const Element* b, Element* y, size_t size) {
  for (size_t i = 0; i < size; i += kLanes) {
    const size_t left = size - i;
    store_first(y + i, load_first(a + i, left) + load_first(b + i, left), left);
  }
}

template <class Element>
void rms_norm_rows(const RmsNormArgs& args) {
  const Element* gamma = static_cast<const Element*>(args.gamma);
  for_row_ranges(args.rows, args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* x = static_cast<const Element*>(args.x) + row * args.size;
      if (args.added != nullptr) {
        Element* sum = static_cast<Element*>(args.sum) + row * args.size;
        add_row(x, static_cast<const Element*>(args.added) + row * args.size, sum, args.size);
        x = sum;
      }
      Floats squares = zeros();
      for (size_t i = 0; i < args.size; i += kLanes) {
        const Floats value = load_first(x + i, args.size - i);
        squares = multiply_add(value, value, squares);
      }
      const float mean = sum_lanes(squares) / static_cast<float>(args.size);
      const float rstd = 1.0f / __builtin_sqrtf(mean + args.eps);
      if (args.rstd != nullptr) args.rstd[row] = rstd;
      args.y_passes.or_rows(args.rows, args.size).for_runs(row, 0, args.size, [&](size_t begin, size_t end, size_t at) {
        Element* y = static_cast<Element*>(args.y) + at;
        for (size_t i = begin; i < end; i += kLanes) {
          const size_t left = end - i;
          store_first(y + i - begin, load_first(x + i, left) * broadcast(rstd) * load_first(gamma + i, left), left);
        }
      });
    }
  });
}

template <class Element, class Table>
void rotate_rows(const RotaryArgs& args) {
  const size_t half = args.head_dim / 2;
  const size_t width = args.heads * args.head_dim;
  for_row_ranges(args.rows, width, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const size_t at = args.positions == nullptr ? row : static_cast<size_t>(args.positions[row]);
      const Table* cos = static_cast<const Table*>(args.cos) + at * args.head_dim;
      const Table* sin = static_cast<const Table*>(args.sin) + at * args.head_dim;
      for (size_t head = 0; head < args.heads; head++) {
        const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride + head * args.head_dim;
        Element* y = static_cast<Element*>(args.y) + row * width + head * args.head_dim;
        for (size_t i = 0; i < half; i += kLanes) {
          const size_t left = half - i;
          const Floats a = load_first(x + i, left);
          const Floats b = load_first(x + half + i, left);
          const Floats low = a * load_first(cos + i, left) - b * load_first(sin + i, left);
          const Floats high = b * load_first(cos + half + i, left) + a * load_first(sin + half + i, left);
          store_first(y + i, low, left);
          store_first(y + half + i, high, left);
        }
      }
    }
  });
}

LLM_INLINE Floats silu_times(Floats gate, Floats up) { return gate / (broadcast(1.0f) + exp(zeros() - gate)) * up; }

template <class Element>
void swiglu_rows(const SwigluArgs& args) {
  for_row_ranges(args.rows, 2 * args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* gate = static_cast<const Element*>(args.x) + row * 2 * args.size;
      const Element* up = gate + args.size;
      Element* y = static_cast<Element*>(args.y) + row * args.size;
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        store_first(y + i, silu_times(load_first(gate + i, left), load_first(up + i, left)), left);
      }
    }
  });
}

template <class Element>
void add_elements(const AddArgs& args) {
  const Element* a = static_cast<const Element*>(args.a);
  const Element* b = static_cast<const Element*>(args.b);
  Element* y = static_cast<Element*>(args.y);
  for_row_ranges((args.size + kLanes - 1) / kLanes, kLanes, [&](size_t first, size_t last) {
    const size_t at = first * kLanes;
    const size_t end = last * kLanes < args.size ? last * kLanes : args.size;
    add_row(a + at, b + at, y + at, end - at);
  });
}

}  // namespace llm::LLM_ISA
