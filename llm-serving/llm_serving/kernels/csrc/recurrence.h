// Linear recurrences over the rows of sequences: the gated delta rule (Yang et al. 2024) and Mamba-2 (Dao and Gu
// 2024).
//
// The state of a head is a matrix S [key_dim, value_dim], zeros at first. A row changes it to
//     S' = decay * S + k (beta * (v - decay * S^T k))^T    delta rule
//     S' = decay * S + k (beta * v)^T                      Mamba-2
// and gives y = S'^T q + skip * v, where decay = exp(rate * softplus(a + bias)). Sums over key_dim run in one order:
// four partial sums of every fourth element, then (first + second) + (third + fourth).
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"
#include "thread_pool.h"

namespace llm::LLM_ISA {

// Rows of a chunk, one per SIMD lane; their keys and queries are prepared together.
constexpr size_t kChunk = kLanes;

// log(1 + e^x) within 4 units in the last place. With z = e^-|x| and s = z / (2 + z), log(1 + z) = 2 atanh(s), by its
// series up to s^15 (remainder below 2^-29 of the result).
LLM_INLINE Floats softplus(Floats x) {
  const Floats z = exp(zeros() - maximum(x, zeros() - x));
  const Floats s = z / (broadcast(2.0f) + z), square = s * s;
  constexpr float kTerms[] = {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f};
  Floats p = broadcast(2.0f / 15);
  for (const float term : kTerms) p = multiply_add(p, square, broadcast(term));
  return maximum(x, zeros()) + p * s;
}

// Scratch memory of a chunk of rows.
struct ChunkOfRows {
  float *q, *k;  // [kChunk, key_dim], of this thread
  float decay[kLanes], beta[kLanes];
};

// Widens a row of keys or queries; with `eps`, divides it by its norm: x * scale / sqrt(sum of squares + eps).
template <class Element, bool kNormalise>
LLM_INLINE void prepare_row(const Element* x, size_t size, float scale, float eps, float* y) {
  Floats factor = broadcast(scale);
  if (kNormalise) {
    Floats squares = zeros();
    for (size_t i = 0; i < size; i += kLanes) {
      const Floats each = load_first(x + i, size - i);
      squares = multiply_add(each, each, squares);
    }
    factor = broadcast(scale / __builtin_sqrtf(sum_lanes(squares) + eps));
  }
  for (size_t i = 0; i < size; i += kLanes) {
    const size_t left = size - i;
    store_first(y + i, load_first(x + i, left) * factor, left);
  }
}

template <class Element>
LLM_INLINE Floats column_of(const void* x, size_t first_row, size_t rows, size_t stride, size_t column) {
  Element elements[kLanes] = {};
  const Element* source = static_cast<const Element*>(x) + first_row * stride + column;
  for (size_t i = 0; i < rows; i++) elements[i] = source[i * stride];
  return load(elements);
}

template <class Element, bool kDelta>
void prepare_chunk(const RecurrenceArgs& args, size_t head, size_t first_row, size_t rows, ChunkOfRows& chunk) {
  const size_t key_head = head / (args.heads / args.key_heads), dim = args.key_dim;
  for (size_t i = 0; i < rows; i++) {
    const size_t row = first_row + i;
    const Element* q = static_cast<const Element*>(args.q) + row * args.q_stride + key_head * dim;
    const Element* k = static_cast<const Element*>(args.k) + row * args.k_stride + key_head * dim;
    prepare_row<Element, kDelta>(q, dim, args.scale, args.eps, chunk.q + i * dim);
    prepare_row<Element, kDelta>(k, dim, 1.0f, args.eps, chunk.k + i * dim);
  }
  const Floats a = column_of<Element>(args.a, first_row, rows, args.a_stride, head);
  Floats step = softplus(a + broadcast(args.bias[head]));
  step = zeros() - maximum(zeros() - maximum(step, broadcast(args.low)), broadcast(-args.high));
  store(chunk.decay, exp(step * broadcast(args.rates[head])));
  store(chunk.beta, kDelta ? sigmoid_of(column_of<Element>(args.b, first_row, rows, args.b_stride, head)) : step);
}

// Returns S^T x for one block of a state, S [key_dim, 16].
LLM_INLINE Floats product_of_state(const float* state, const float* x, size_t dim) {
  Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
  size_t i = 0;
  for (; i + 4 <= dim; i += 4) {
    for (size_t j = 0; j < 4; j++) {
      sums[j] = multiply_add(load(state + (i + j) * kLanes), broadcast(x[i + j]), sums[j]);
    }
  }
  for (size_t j = 0; i + j < dim; j++) {
    sums[j] = multiply_add(load(state + (i + j) * kLanes), broadcast(x[i + j]), sums[j]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Writes decay * S + k change^T to `to`, which may be `from`; returns the product of the new state with q.
LLM_INLINE Floats update_state(const float* from, float* to, const float* k, const float* q, Floats change, float decay,
                               size_t dim) {
  Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
  const Floats kept = broadcast(decay);
  auto update = [&](size_t i, size_t j) {
    const Floats next = multiply_add(broadcast(k[i]), change, load(from + i * kLanes) * kept);
    store(to + i * kLanes, next);
    sums[j] = multiply_add(next, broadcast(q[i]), sums[j]);
  };
  size_t i = 0;
  for (; i + 4 <= dim; i += 4) {
    for (size_t j = 0; j < 4; j++) update(i + j, j);
  }
  for (size_t j = 0; i + j < dim; j++) update(i + j, j);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Computes one head of the rows of one sequence. Sixteen columns of the state go through a chunk of rows before the
// next sixteen, so that they stay in the L1 cache; a single row reads its state once and writes it once.
template <class Element, bool kDelta>
void recur_head(const RecurrenceArgs& args, size_t sequence, size_t head) {
  const size_t dim = args.key_dim, width = args.value_dim, blocks = (width + kLanes - 1) / kLanes;
  const size_t block_size = dim * kLanes, head_size = blocks * block_size;
  const size_t first_row = static_cast<size_t>(args.sequences.first_rows[sequence]);
  const size_t end_row = first_row + static_cast<size_t>(args.sequences.lens[sequence]);
  auto slot_of = [&](int64_t slot) {
    return args.states + (static_cast<size_t>(slot) * args.heads + head) * head_size;
  };
  float* local = static_cast<float*>(scratch(Scratch::kTile, head_size * sizeof(float)));
  ChunkOfRows chunk;
  chunk.q = static_cast<float*>(scratch(Scratch::kScores, 2 * kChunk * dim * sizeof(float)));
  chunk.k = chunk.q + kChunk * dim;
  const int64_t slot_in = args.sequences.in[sequence];
  if (slot_in < 0) __builtin_memset(local, 0, head_size * sizeof(float));
  const float* before = slot_in < 0 ? local : slot_of(slot_in);  // the state before the chunk
  for (size_t first = first_row; first < end_row; first += kChunk) {
    const size_t rows = end_row - first < kChunk ? end_row - first : kChunk;
    prepare_chunk<Element, kDelta>(args, head, first, rows, chunk);
    const float* after = before;
    for (size_t block = 0; block < blocks; block++) {
      const size_t column = block * kLanes, left = width - column;
      const float* from = before + block * block_size;
      for (size_t i = 0; i < rows; i++) {
        const size_t row = first + i;
        const int64_t slot = args.sequences.out[row];
        after = slot < 0 ? local : slot_of(slot);
        float* to = const_cast<float*>(after) + block * block_size;
        const Element* v = static_cast<const Element*>(args.v) + row * args.v_stride + head * width + column;
        const Floats value = load_first(v, left);
        Floats change = value;
        if (kDelta) change = value - broadcast(chunk.decay[i]) * product_of_state(from, chunk.k + i * dim, dim);
        change = change * broadcast(chunk.beta[i]);
        Floats y = update_state(from, to, chunk.k + i * dim, chunk.q + i * dim, change, chunk.decay[i], dim);
        if (args.skip != nullptr) y = multiply_add(value, broadcast(args.skip[head]), y);
        store_first(static_cast<Element*>(args.y) + row * args.y_stride + head * width + column, y, left);
        from = to;
      }
    }
    before = after;
  }
}

template <class Element, bool kDelta>
void recur(const RecurrenceArgs& args) {
  const size_t count = args.sequences.count;
  size_t rows = 0;
  for (size_t i = 0; i < count; i++) rows += static_cast<size_t>(args.sequences.lens[i]);
  if (rows == 0) return;
  for_row_ranges(count * args.heads, (rows + count - 1) / count * args.key_dim * args.value_dim,
                 [&](size_t begin, size_t end) {
                   for (size_t i = begin; i < end; i++) {
                     recur_head<Element, kDelta>(args, i / args.heads, i % args.heads);
                   }
                 });
}

inline void recurrence(const RecurrenceArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    args.b != nullptr ? recur<Element, true>(args) : recur<Element, false>(args);
  });
}

}  // namespace llm::LLM_ISA
