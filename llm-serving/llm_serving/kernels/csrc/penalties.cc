#include "penalties.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace llm {

bool is_adjusted(const SampleArgs& args, size_t row) {
  return args.history_offsets[row] < args.history_offsets[row + 1] ||
         args.bias_offsets[row] < args.bias_offsets[row + 1] ||
         args.allowed_offsets[row] < args.allowed_offsets[row + 1];
}

void adjust_logits(const SampleArgs& args, size_t row, float* values, int32_t* counts) {
  const size_t size = static_cast<size_t>(args.vocab_size);
  const float* logits = args.logits + row * size;
  std::memcpy(values, logits, size * sizeof(float));

  const float repetition = args.repetition_penalty[row];
  const float presence = args.presence_penalty[row];
  const float frequency = args.frequency_penalty[row];
  const int32_t* const begin = args.history_token_ids + args.history_offsets[row];
  const int32_t* const end = args.history_token_ids + args.history_offsets[row + 1];
  const int32_t* const output = begin + std::min<ptrdiff_t>(args.history_prompt_lens[row], end - begin);
  // Always computed from the original logit, so that a token may occur any number of times.
  auto repeated = [&](int32_t token) {
    const float before = logits[token];
    if (repetition == 1 || std::isinf(before)) return before;
    // A finite logit stays finite.
    return std::clamp(before > 0 ? before / repetition : before * repetition, -FLT_MAX, FLT_MAX);
  };
  if (repetition != 1) {
    for (const int32_t* token = begin; token < end; token++) values[*token] = repeated(*token);
  }
  if (presence != 0 || frequency != 0) {
    for (const int32_t* token = output; token < end; token++) counts[*token] = 0;
    for (const int32_t* token = output; token < end; token++) counts[*token]++;
    for (const int32_t* token = output; token < end; token++) {
      values[*token] = repeated(*token) - (presence + frequency * static_cast<float>(counts[*token]));
    }
  }
  for (int32_t i = args.bias_offsets[row]; i < args.bias_offsets[row + 1]; i++) {
    values[args.bias_token_ids[i]] += args.bias_values[i];
  }
  const int32_t* const words = args.allowed_words + args.allowed_offsets[row];
  const size_t num_words = static_cast<size_t>(args.allowed_offsets[row + 1] - args.allowed_offsets[row]);
  if (num_words == 0) return;
  for (size_t i = 0; i < size; i++) {
    const uint32_t word = i / 32 < num_words ? static_cast<uint32_t>(words[i / 32]) : 0;
    if ((word >> (i % 32) & 1) == 0) values[i] = -INFINITY;
  }
}

}  // namespace llm
