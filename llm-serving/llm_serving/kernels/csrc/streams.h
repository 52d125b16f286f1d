// Operations on several residual streams in one row (AltUp, Baykal et al. 2023), and sparse activations, as Gemma 3n
// has.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

namespace llm::LLM_ISA {

template <class Element>
void mix_rows(const MixStreamsArgs& args) {
  for_row_ranges(args.rows, args.streams * args.terms * args.size, [&](size_t first, size_t last) {
    const size_t terms = TiledLayout::padded(args.terms, kLanes);
    auto* factors = static_cast<float*>(scratch(Scratch::kTile, terms * sizeof(float) + 1));
    for (size_t row = first; row < last; row++) {
      const Element* base = static_cast<const Element*>(args.base) + row * args.base_stride;
      const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride;
      const Element* coefficients = static_cast<const Element*>(args.coefficients);
      if (coefficients != nullptr) coefficients += row * args.coefficients_stride;
      Element* y = static_cast<Element*>(args.y) + row * args.y_stride;
      for (size_t stream = 0; stream < args.streams; stream++) {
        for (size_t term = 0; term < terms; term += kLanes) {
          Floats given = zeros();
          if (coefficients != nullptr) given = load_first(coefficients + stream * args.terms + term, args.terms - term);
          store(factors + term, given + broadcast(args.offset));
        }
        for (size_t i = 0; i < args.size; i += kLanes) {
          const size_t left = args.size - i;
          Floats sum = load_first(base + stream * args.size + i, left);
          for (size_t term = 0; stream >= args.first && term < args.terms; term++) {
            sum = sum + broadcast(factors[term]) * load_first(x + term * args.size + i, left);
          }
          store_first(y + stream * args.size + i, sum, left);
        }
      }
    }
  });
}

template <class Element>
float mean_square(const Element* x, size_t size) {
  Floats squares = zeros();
  for (size_t i = 0; i < size; i += kLanes) {
    const Floats each = load_first(x + i, size - i);
    squares = multiply_add(each, each, squares);
  }
  return sum_lanes(squares) / static_cast<float>(size);
}

template <class Element>
void match_rows(const MatchStreamsArgs& args) {
  for_row_ranges(args.rows, (args.streams + 1) * args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* like = static_cast<const Element*>(args.like) + row * args.like_stride;
      const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride;
      Element* y = static_cast<Element*>(args.y) + row * args.y_stride;
      const float wanted = __builtin_sqrtf(mean_square(like, args.size));
      for (size_t i = 0; i < args.size; i += kLanes)
        store_first(y + i, load_first(like + i, args.size - i), args.size - i);
      for (size_t stream = 0; stream < args.streams; stream++) {
        const Element* part = x + stream * args.size;
        const float mean = mean_square(part, args.size);
        const Floats factor = broadcast(wanted / __builtin_sqrtf(mean > args.eps ? mean : args.eps));
        Element* to = y + (args.sums ? 0 : (stream + 1) * args.size);
        for (size_t i = 0; i < args.size; i += kLanes) {
          const size_t left = args.size - i;
          const Floats scaled = load_first(part + i, left) * factor;
          store_first(to + i, args.sums ? load_first(to + i, left) + scaled : scaled, left);
        }
      }
    }
  });
}

template <class Element>
void sparsify_rows(const SparsifyArgs& args) {
  for_row_ranges(args.rows, 3 * args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride;
      Element* y = static_cast<Element*>(args.y) + row * args.y_stride;
      const float mean = mean_of(x, args.size);
      Floats squares = zeros();
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        const Floats away = keep_first(load_first(x + i, left) - broadcast(mean), left, 0.0f);
        squares = multiply_add(away, away, squares);
      }
      const float deviation = __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(args.size));
      const Floats least = broadcast(mean + deviation * args.scale);
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        store_first(y + i, maximum(load_first(x + i, left) - least, zeros()), left);
      }
    }
  });
}

inline void mix_streams(const MixStreamsArgs& args) {
  with_element(args.dtype, [&](auto tag) { mix_rows<typename decltype(tag)::Element>(args); });
}

inline void match_streams(const MatchStreamsArgs& args) {
  with_element(args.dtype, [&](auto tag) { match_rows<typename decltype(tag)::Element>(args); });
}

inline void sparsify(const SparsifyArgs& args) {
  with_element(args.dtype, [&](auto tag) { sparsify_rows<typename decltype(tag)::Element>(args); });
}

}  // namespace llm::LLM_ISA
