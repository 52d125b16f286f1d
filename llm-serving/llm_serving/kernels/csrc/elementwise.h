// RMSNorm, rotary embedding, gates and sums: rows of float arithmetic, rounded once at the end.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace llm::LLM_ISA {

// Fewer elements are processed by one thread, which is faster than waking another.
constexpr size_t kElementsPerTask = 16384;

// Calls body(first, last) for ranges that cover [0, rows); the division does not affect any row.
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
float mean_of(const Element* x, size_t size) {
  Floats sum = zeros();
  for (size_t i = 0; i < size; i += kLanes) sum = sum + load_first(x + i, size - i);
  return sum_lanes(sum) / static_cast<float>(size);
}

template <class Element, class Gamma, bool kCentred>
void rms_norm_rows(const RmsNormArgs& args) {
  const Gamma* gamma = static_cast<const Gamma*>(args.gamma);
  const Gamma* beta = static_cast<const Gamma*>(args.beta);
  const size_t group = args.group > 0 ? args.group : args.size;
  const TiledLayout y_layout = args.y_layout.or_rows(args.rows, args.size);
  auto or_size = [&](size_t stride) { return stride > 0 ? stride : args.size; };
  for_row_ranges(args.rows, args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* x = static_cast<const Element*>(args.x) + row * or_size(args.x_stride);
      if (args.residual != nullptr) {
        Element* sum = static_cast<Element*>(args.sum) + row * or_size(args.sum_stride);
        add_row(x, static_cast<const Element*>(args.residual) + row * or_size(args.residual_stride), sum, args.size);
        x = sum;
      }
      for (size_t column = 0; column < args.size; column += group, x += group) {
        const float centre = kCentred ? mean_of(x, group) : 0.0f;
        auto value = [&](size_t i, size_t left) {
          const Floats element = load_first(x + i, left);
          return kCentred ? element - broadcast(centre) : element;
        };
        Floats squares = zeros();
        for (size_t i = 0; i < group; i += kLanes) {
          const Floats each = kCentred ? keep_first(value(i, group - i), group - i, 0.0f) : value(i, group - i);
          squares = multiply_add(each, each, squares);
        }
        const float mean = sum_lanes(squares) / static_cast<float>(group);
        const float rstd = 1.0f / __builtin_sqrtf(mean + args.eps);
        const size_t first_weight = args.of_row ? 0 : column;
        if (args.rstd != nullptr) args.rstd[row] = rstd;
        y_layout.for_runs(row, column, column + group, [&](size_t begin, size_t end, size_t at) {
          Element* y = static_cast<Element*>(args.y) + at;
          for (size_t i = begin; i < end; i += kLanes) {
            const size_t left = end - i;
            const Floats weight = load_first(gamma + i - first_weight, left);
            Floats scaled = value(i - column, left) * broadcast(rstd) * weight;
            if (beta != nullptr) scaled = scaled + load_first(beta + i - first_weight, left);
            store_first(y + i - begin, scaled, left);
          }
        });
      }
    }
  });
}

template <class Element, class Table>
void rotate_rows(const RotaryArgs& args) {
  const size_t half = args.head_dim / 2;
  const size_t width = args.heads * args.head_dim;
  const size_t y_stride = args.y_stride > 0 ? args.y_stride : width;
  for_row_ranges(args.rows, width, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const size_t position = args.positions == nullptr ? row : static_cast<size_t>(args.positions[row]);
      const Table* cos = static_cast<const Table*>(args.cos) + position * args.head_dim;
      const Table* sin = static_cast<const Table*>(args.sin) + position * args.head_dim;
      for (size_t head = 0; head < args.heads; head++) {
        const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride + head * args.head_dim;
        Element* y = static_cast<Element*>(args.y) + row * y_stride + head * args.head_dim;
        for (size_t i = 0; i < half; i += kLanes) {
          const size_t left = half - i;
          const size_t at = head * args.head_dim + i;
          Floats a = load_first(x + i, left);
          Floats b = load_first(x + half + i, left);
          if (args.bias != nullptr) {
            a = a + load_first(args.bias + at, left);
            b = b + load_first(args.bias + at + half, left);
          }
          Floats low = a * load_first(cos + i, left) - b * load_first(sin + i, left);
          Floats high = b * load_first(cos + half + i, left) + a * load_first(sin + half + i, left);
          if (args.offset != nullptr) {
            low = low - load_first(args.offset + at, left);
            high = high - load_first(args.offset + at + half, left);
          }
          store_first(y + i, low, left);
          store_first(y + half + i, high, left);
        }
      }
    }
  });
}

// Returns GELU: x times the share of a normal distribution below x, within 1e-7 (Abramowitz and Stegun 7.1.26).
LLM_INLINE Floats gelu(Floats x) {
  const Floats size = maximum(x, zeros() - x);
  const Floats z = size * broadcast(0.70710678f);
  const Floats t = broadcast(1.0f) / (broadcast(1.0f) + z * broadcast(0.3275911f));
  constexpr float kTerms[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
  Floats tail = zeros();
  for (const float term : kTerms) tail = tail * t + broadcast(term);
  return maximum(x, zeros()) - size * broadcast(0.5f) * tail * t * exp(zeros() - z * z);
}

// x / (1 + e^-x); gelu is x / (1 + e^-2u) as well, since (1 + tanh u) / 2 = 1 / (1 + e^-2u).
template <Gate kGate>
LLM_INLINE Floats gate_times(Floats gate, Floats up) {
  if (kGate == Gate::kGelu) return gelu(gate) * up;
  if (kGate == Gate::kTanh) return tanh(gate) * up;
  if (kGate == Gate::kClamped) {
    const Floats limit = broadcast(7.0f), below = zeros() - limit;
    gate = zeros() - maximum(zeros() - gate, below);
    up = maximum(zeros() - maximum(zeros() - up, below), below) + broadcast(1.0f);
    return gate / (broadcast(1.0f) + exp(gate * broadcast(-1.702f))) * up;
  }
  Floats exponent = zeros() - gate;
  if (kGate == Gate::kGeluTanh) {
    const Floats cube = gate * gate * gate;
    exponent = (gate + cube * broadcast(0.044715f)) * broadcast(-2 * 0.7978845608f);
  }
  return gate / (broadcast(1.0f) + exp(exponent)) * up;
}

template <class Element, Gate kGate>
void swiglu_rows(const SwigluArgs& args) {
  const size_t x_stride = args.x_stride > 0 ? args.x_stride : (args.has_second ? 2 : 1) * args.size;
  const size_t y_stride = args.y_stride > 0 ? args.y_stride : args.size;
  for_row_ranges(args.rows, 2 * args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* gate = static_cast<const Element*>(args.x) + row * x_stride;
      const Element* up = gate + args.size;
      Element* y = static_cast<Element*>(args.y) + row * y_stride;
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        const Floats second = args.has_second ? load_first(up + i, left) : broadcast(1.0f);
        store_first(y + i, gate_times<kGate>(load_first(gate + i, left), second), left);
      }
    }
  });
}

template <class Element>
void add_scaled_row(const Element* a, const Element* b, float scale, Element* y, size_t size) {
  for (size_t i = 0; i < size; i += kLanes) {
    const size_t left = size - i;
    const Floats scaled = load_first(b + i, left) * broadcast(scale);
    store_first(y + i, a == nullptr ? scaled : load_first(a + i, left) + scaled, left);
  }
}

// Calls combine(a, b, y, size) for runs of contiguous elements; a may be null.
template <class Element, class Combine>
void for_runs(const AddArgs& args, Combine combine) {
  const Element* a = static_cast<const Element*>(args.a);
  const Element* b = static_cast<const Element*>(args.b);
  Element* y = static_cast<Element*>(args.y);
  if (args.rows > 1) {
    return for_row_ranges(args.rows, args.size, [&](size_t first, size_t last) {
      for (size_t row = first; row < last; row++) {
        combine(a == nullptr ? a : a + row * args.a_stride, b + row * args.b_stride, y + row * args.y_stride,
                args.size);
      }
    });
  }
  for_row_ranges((args.size + kLanes - 1) / kLanes, kLanes, [&](size_t first, size_t last) {
    const size_t at = first * kLanes;
    const size_t end = last * kLanes < args.size ? last * kLanes : args.size;
    combine(a == nullptr ? a : a + at, b + at, y + at, end - at);
  });
}

template <class Element>
void add_elements(const AddArgs& args) {
  for_runs<Element>(args, [&](const Element* a, const Element* b, Element* y, size_t size) {
    add_scaled_row(a, b, args.scale, y, size);
  });
}

template <class Element, class Function>
void map_elements(const SigmoidArgs& args, Function function) {
  const AddArgs runs = {nullptr, args.x, args.y, args.dtype, args.size};
  for_runs<Element>(runs, [&](const Element*, const Element* x, Element* y, size_t size) {
    for (size_t i = 0; i < size; i += kLanes) {
      const size_t left = size - i;
      store_first(y + i, function(load_first(x + i, left)), left);
    }
  });
}

template <class Element>
void silu_elements(const SigmoidArgs& args) {
  map_elements<Element>(args, [](Floats x) { return gate_times<Gate::kSilu>(x, broadcast(1.0f)); });
}

LLM_INLINE Floats sigmoid_of(Floats x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(zeros() - x)); }

template <class Element, Factor kFactor>
void multiply_by(const AddArgs& args) {
  for_runs<Element>(args, [](const Element* a, const Element* b, Element* y, size_t size) {
    for (size_t i = 0; i < size; i += kLanes) {
      const size_t left = size - i;
      const Floats first = load_first(a + i, left), second = load_first(b + i, left);
      Floats product = first * second;
      if (kFactor == Factor::kSilu) product = gate_times<Gate::kSilu>(second, first);
      if (kFactor == Factor::kRelu) product = first * maximum(second, zeros());
      if (kFactor == Factor::kSigmoid) product = first * sigmoid_of(second);
      store_first(y + i, product, left);
    }
  });
}

template <class Element>
void multiply_elements(const AddArgs& args) {
  switch (args.factor) {
    case Factor::kSilu:
      return multiply_by<Element, Factor::kSilu>(args);
    case Factor::kRelu:
      return multiply_by<Element, Factor::kRelu>(args);
    case Factor::kSigmoid:
      return multiply_by<Element, Factor::kSigmoid>(args);
    default:
      return multiply_by<Element, Factor::kItself>(args);
  }
}

template <class Element>
void sigmoid_elements(const SigmoidArgs& args) {
  map_elements<Element>(args, [](Floats x) { return sigmoid_of(x); });
}

template <class Element>
void round_rows(const RoundArgs& args) {
  for_row_ranges(args.rows, args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const float* x = args.x + row * args.size;
      const Element* residual = static_cast<const Element*>(args.residual);
      if (residual != nullptr) residual += row * args.residual_stride;
      Element* y = static_cast<Element*>(args.y) + row * args.y_stride;
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        Floats value = load_first(x + i, left);
        if (residual != nullptr) {
          value = load_first(residual + i, left) + rounded<Element>(value) * broadcast(args.scale);
        }
        store_first(y + i, value, left);
      }
    }
  });
}

template <class Element>
void sigmoid_gate_rows(const SigmoidGateArgs& args) {
  for_row_ranges(args.rows, args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const Element* x = static_cast<const Element*>(args.x) + row * args.x_stride;
      Element* y = static_cast<Element*>(args.y) + row * args.y_stride;
      const Floats gate = load_first(static_cast<const Element*>(args.gate) + row * args.gate_stride, 1);
      // Only the first lane is used.
      alignas(64) float weights[kLanes];
      store(weights, sigmoid_of(gate));
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        store_first(y + i, load_first(x + i, left) * broadcast(weights[0]), left);
      }
    }
  });
}

inline void cap_logits(const CapArgs& args) {
  for_row_ranges((args.size + kLanes - 1) / kLanes, kLanes, [&](size_t first, size_t last) {
    for (size_t i = first * kLanes; i < last * kLanes && i < args.size; i += kLanes) {
      Floats value = load_first(args.x + i, args.size - i) * broadcast(args.scale);
      if (args.cap > 0.0f) value = broadcast(args.cap) * tanh(value / broadcast(args.cap));
      store_first(args.x + i, value, args.size - i);
    }
  });
}

}  // namespace llm::LLM_ISA
