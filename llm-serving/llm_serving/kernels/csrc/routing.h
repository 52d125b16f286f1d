// Routing of rows to experts, and the weighted sums of their results.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "simd.h"

namespace llm::LLM_ISA {

// Turns the logits of a row into scores: a sigmoid of each, or a softmax.
inline void score_experts(float* logits, size_t count, bool sigmoid) {
  float largest = -__builtin_inff();
  for (size_t i = 0; i < count; i++) largest = logits[i] > largest ? logits[i] : largest;
  Floats total = zeros();
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t left = count - i;
    const Floats logit = load_first(logits + i, left);
    const Floats one = broadcast(1.0f);
    const Floats score = sigmoid ? one / (one + exp(zeros() - logit)) : exp(logit - broadcast(largest));
    total = total + keep_first(score, left, 0.0f);
    store_first(logits + i, score, left);
  }
  if (sigmoid) return;
  const Floats sum = broadcast(sum_lanes(total));
  for (size_t i = 0; i < count; i += kLanes)
    store_first(logits + i, load_first(logits + i, count - i) / sum, count - i);
}

// Returns the index of the largest of `count` numbers that are not taken, the lower index for equal numbers; any that
// is not taken if all are NaN.
inline size_t find_best(const float* numbers, const bool* taken, size_t count) {
  size_t best = count;
  for (size_t i = 0; i < count; i++) {
    if (taken[i]) continue;
    if (best == count || numbers[i] > numbers[best] || numbers[best] != numbers[best]) best = i;
  }
  return best;
}

// Score of a group of experts: its largest score, or the sum of its two largest.
inline float worth_of_group(const float* wanted, size_t size, bool sums_two) {
  float first = -__builtin_inff();
  float second = -__builtin_inff();
  for (size_t i = 0; i < size; i++) {
    if (wanted[i] > first) {
      second = first;
      first = wanted[i];
    } else if (wanted[i] > second) {
      second = wanted[i];
    }
  }
  return sums_two && size > 1 ? first + second : first;
}

// Marks the experts of all groups except the best as taken.
inline void leave_groups_out(const RouteArgs& args, const float* wanted, float* worth, bool* taken_groups,
                             bool* taken) {
  const size_t size = args.experts / args.groups;
  for (size_t group = 0; group < args.groups; group++) {
    worth[group] = worth_of_group(wanted + group * size, size, args.correction != nullptr);
    taken_groups[group] = false;
  }
  for (size_t i = 0; i < args.top_groups; i++) taken_groups[find_best(worth, taken_groups, args.groups)] = true;
  for (size_t i = 0; i < args.experts; i++) taken[i] = !taken_groups[i / size];
}

// Chooses one expert after another by logit, and computes their weights as `RouteArgs::mixes` describes.
inline void mix_experts(const RouteArgs& args, const float* logits, bool* taken, float* topk_weights,
                        int32_t* topk_ids) {
  for (size_t i = 0; i < args.top_k; i++) {
    const size_t best = find_best(logits, taken, args.experts);
    const float largest = logits[best];
    float total = 0.0f;
    for (size_t expert = 0; expert < args.experts; expert++) {
      const float size = __builtin_fabsf(logits[expert]);
      const float limit = args.mixer_margin * (size > largest ? size : largest);
      if (taken[expert] || largest - logits[expert] > limit) continue;
      float share[kLanes];
      store(share, exp(broadcast(logits[expert] - largest)));
      total += share[0];
    }
    taken[best] = true;
    topk_ids[i] = static_cast<int32_t>(best);
    topk_weights[i] = 1.0f / total * args.scale;
  }
}

inline void route_row(const RouteArgs& args, size_t row) {
  const size_t count = args.experts;
  float* scores = args.logits + row * count;
  for (size_t i = 0; args.bias != nullptr && i < count; i++) scores[i] += args.bias[i];
  if (!args.mixes) score_experts(scores, count, args.sigmoid);
  float* memory = static_cast<float*>(scratch(Scratch::kTile, 2 * count * (sizeof(float) + sizeof(bool))));
  float* wanted = memory;
  bool* taken = reinterpret_cast<bool*>(memory + 2 * count);
  for (size_t i = 0; i < count; i++) {
    wanted[i] = args.correction == nullptr ? scores[i] : scores[i] + args.correction[i];
    taken[i] = false;
  }
  if (args.groups > 1) leave_groups_out(args, wanted, memory + count, taken + count, taken);
  float* topk_weights = args.topk_weights + row * args.topk_weights_stride;
  int32_t* topk_ids = args.topk_ids + row * args.chosen_stride;
  if (args.mixes) return mix_experts(args, scores, taken, topk_weights, topk_ids);
  float total = 0.0f;
  for (size_t i = 0; i < args.top_k; i++) {
    const size_t best = find_best(wanted, taken, count);
    taken[best] = true;
    topk_ids[i] = static_cast<int32_t>(best);
    topk_weights[i] = scores[best];
    total += scores[best];
  }
  for (size_t i = 0; i < args.top_k; i++)
    topk_weights[i] = (args.normalises ? topk_weights[i] / total : topk_weights[i]) * args.scale;
  for (size_t i = 0; args.factors != nullptr && i < args.top_k; i++) topk_weights[i] *= args.factors[topk_ids[i]];
}

inline void route_rows(const RouteArgs& args) {
  for_row_ranges(args.rows, args.experts * args.top_k, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) route_row(args, row);
  });
}

template <class Element>
void gather_sum_rows(const GatherSumArgs& args) {
  for_row_ranges(args.count, args.size, [&](size_t first, size_t last) {
    for (size_t row = first; row < last; row++) {
      const size_t from = args.from == nullptr ? row : args.from[row];
      const Element* x = static_cast<const Element*>(args.x) + from * args.size;
      float* sums = args.sums + args.index[row] * args.size;
      for (size_t i = 0; i < args.size; i += kLanes) {
        const size_t left = args.size - i;
        const Floats share = broadcast(args.share[row]) * load_first(x + i, left);
        store_first(sums + i, load_first(sums + i, left) + share, left);
      }
    }
  });
}

inline void gather_sum(const GatherSumArgs& args) {
  with_element(args.dtype, [&](auto tag) { gather_sum_rows<typename decltype(tag)::Element>(args); });
}

}  // namespace llm::LLM_ISA
