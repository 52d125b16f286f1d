// Samples one token for each row of logits, as worker/sampling_reference.py defines. Rows are independent and every sum
// is exact, so the result is bit-identical for all instruction sets and numbers of threads.
#pragma once

#include <algorithm>

#include "floating_mode.h"
#include "penalties.h"
#include "philox.h"
#include "thread_pool.h"
#include "token_filters.h"

namespace llm::LLM_ISA {

struct Largest {
  float value;  // NaN if any is
  size_t index;
};

// Returns the largest of `values` [size], the first of equal ones.
LLM_INLINE Largest find_largest(const float* values, size_t size) {
  constexpr size_t kBlock = 1024;
  float best = -__builtin_inff();
  size_t best_block = 0;
  NativeInt unordered = {};
  for (size_t begin = 0; begin < size; begin += kBlock) {
    const size_t end = begin + kBlock < size ? begin + kBlock : size;
    Floats block[2] = {broadcast(-__builtin_inff()), broadcast(-__builtin_inff())};
    size_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      for (size_t j = 0; j < 2; j++) {
        const Floats value = load(values + i + j * kLanes);
        LLM_FOR_PARTS unordered |= value.part[i] != value.part[i];
        block[j] = maximum(value, block[j]);
      }
    }
    for (; i < end; i += kLanes) {
      const size_t count = end - i;
      const Floats value = keep_first(load_first(values + i, count), count, -__builtin_inff());
      LLM_FOR_PARTS unordered |= value.part[i] != value.part[i];
      block[0] = maximum(value, block[0]);
    }
    const float largest = max_lane(maximum(block[0], block[1]));
    if (largest > best) {
      best = largest;
      best_block = begin;
    }
  }
  for (size_t j = 0; j < kNative; j++) {
    if (unordered[j] != 0) return {__builtin_nanf(""), 0};
  }
  size_t index = best_block;
  while (values[index] != best) index++;
  return {best, index};
}

LLM_INLINE bool is_finite(float value) { return value - value == 0; }

// Inserts token `id` into the `count` largest found so far, in descending order; later ids follow equal ones.
LLM_INLINE void insert_token(float* largest, int32_t* ids, size_t count, float value, int32_t id) {
  size_t place = count;
  for (; place > 0 && largest[place - 1] < value; place--) {
    largest[place] = largest[place - 1];
    ids[place] = ids[place - 1];
  }
  largest[place] = value;
  ids[place] = id;
}

// Writes the ids of the `count` largest of `values` [size], largest first, of equal ones the lowest id first. `room`
// holds `count` numbers; 0 < count <= size.
LLM_INLINE void max_likely(const float* values, size_t size, size_t count, int32_t* ids, float* room) {
  size_t i = 0;
  for (; i < count; i++) insert_token(room, ids, i, values[i], static_cast<int32_t>(i));
  auto consider = [&](size_t id) {
    if (values[id] > room[count - 1]) insert_token(room, ids, count - 1, values[id], static_cast<int32_t>(id));
  };
  for (; i + kLanes <= size; i += kLanes) {
    if (!(max_lane(load(values + i)) > room[count - 1])) continue;
    for (size_t j = 0; j < kLanes; j++) consider(i + j);
  }
  for (; i < size; i++) consider(i);
}

// Keeps the fewest tokens whose weights sum to at least `share` (below 1) of the total, in ascending order of their
// distance from the mean logarithm of the weights; of equal ones the lowest ids. `room` is as large as `weights`.
// The order of the sums is part of the definition, because the products are not exact.
LLM_INLINE void keep_typical(const float* values, size_t size, float largest, float scale, double share, float* weights,
                             float* room) {
  auto* const ids = static_cast<int32_t*>(scratch(Scratch::kScores, size * sizeof(int32_t) + 1));
  size_t count = 0;
  double total = 0;
  double sum = 0;
  for (size_t i = 0; i < size; i++) {
    if (!(weights[i] > 0)) continue;
    room[i] = (values[i] - largest) * scale;
    total += static_cast<double>(weights[i]);
    sum += static_cast<double>(weights[i]) * static_cast<double>(room[i]);
    ids[count++] = static_cast<int32_t>(i);
  }
  const double mean = sum / total;
  for (size_t j = 0; j < count; j++) {
    float& distance = room[ids[j]];
    distance = static_cast<float>(__builtin_fabs(static_cast<double>(distance) - mean));
  }
  std::sort(ids, ids + count,
            [room](int32_t a, int32_t b) { return room[a] < room[b] || (room[a] == room[b] && a < b); });
  double kept = 0;
  size_t j = 0;
  while (j < count && kept < share * total) kept += static_cast<double>(weights[ids[j++]]);
  for (; j < count; j++) weights[ids[j]] = 0;
}

// Samples a token from `values` with the largest value `largest`.
LLM_INLINE size_t draw(const SampleArgs& args, size_t row, const float* values, float largest, float* weights,
                       float* room) {
  const size_t size = static_cast<size_t>(args.vocab_size);
  const float scale = weight_scale(args.temperature[row]);
  weigh(values, size, largest, scale, args.min_p[row], weights);
  if (args.top_k[row] > 0) keep_top_k(weights, size, static_cast<size_t>(args.top_k[row]), room);
  if (args.top_p[row] < 1) keep_top_p(weights, size, static_cast<double>(args.top_p[row]), room);
  if (args.typical_p[row] < 1) {
    keep_typical(values, size, largest, scale, static_cast<double>(args.typical_p[row]), weights, room);
  }
  const double number = philox_uniform(args.seed[row], static_cast<uint32_t>(args.position[row]));
  return draw_token(weights, size, number);
}

LLM_INLINE void sample_row(const SampleArgs& args, size_t row) {
  const SubnormalsKept mode;
  const size_t size = static_cast<size_t>(args.vocab_size);
  const float* logits = args.logits + row * size;
  int32_t* const top_ids = args.top_token_ids + row * static_cast<size_t>(args.top_width);
  args.token_ids[row] = -1;
  args.failures[row] = kNoFailure;
  args.total_weights[row] = 0;
  for (int64_t i = 0; i < args.top_width; i++) top_ids[i] = -1;

  const Largest largest = find_largest(logits, size);
  args.largest[row] = largest.value;
  if (!is_finite(largest.value)) {
    args.failures[row] = kLogitsFailure;
    return;
  }
  const size_t padded = padded_size(size);
  float* const weights = static_cast<float*>(scratch(Scratch::kItems, 3 * padded * sizeof(float)));
  float* const adjusted = weights + padded;
  float* const room = adjusted + padded;

  const float* values = logits;
  Largest best = largest;
  if (is_adjusted(args, row)) {
    adjust_logits(args, row, adjusted, reinterpret_cast<int32_t*>(room));
    values = adjusted;
    best = find_largest(adjusted, size);
    if (!is_finite(best.value)) {
      args.failures[row] = kAdjustedFailure;
      return;
    }
  }
  size_t token = best.index;
  // With top_k 1 the choice is greedy.
  if (args.temperature[row] > 0 && args.top_k[row] != 1) token = draw(args, row, values, best.value, weights, room);
  args.token_ids[row] = static_cast<int32_t>(token);

  if (args.num_logprobs[row] < 0) return;
  weigh(logits, size, largest.value, weight_scale(1.0f), 0, weights);
  args.total_weights[row] = sum_from(weights, padded, 0);
  const size_t wanted = static_cast<size_t>(args.num_logprobs[row]);
  const size_t count = wanted < size ? wanted : size;
  if (count > 0) max_likely(logits, size, count, top_ids, room);
}

inline void sample(const SampleArgs& args) {
  auto body = [&](size_t row) { sample_row(args, row); };
  parallel_for(static_cast<size_t>(args.num_samples), body);
}

}  // namespace llm::LLM_ISA
