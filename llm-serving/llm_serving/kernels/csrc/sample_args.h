// Inputs and outputs of the sampler: the arrays of worker/sampler.py, which declares the same structure.
#pragma once

#include <cstdint>

namespace llm {

// Why a row has no token (worker/sampling_reference.py, Failure).
enum SampleFailure : int32_t { kNoFailure = 0, kLogitsFailure = 1, kAdjustedFailure = 2 };

// S rows of V logits. The caller has checked that ids are below V and offsets are valid.
struct SampleArgs {
  int64_t num_samples;
  int64_t vocab_size;  // at most 2^20
  const float* logits;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* typical_p;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const uint64_t* seed;
  const int32_t* position;
  const int32_t* num_logprobs;
  const int32_t* history_offsets;  // [S + 1]
  const int32_t* history_token_ids;
  const int32_t* history_prompt_lens;
  const int32_t* bias_offsets;  // [S + 1]
  const int32_t* bias_token_ids;
  const float* bias_values;
  const int32_t* allowed_offsets;  // [S + 1]
  const int32_t* allowed_words;    // one bit a token, lowest first
  int64_t top_width;               // K: columns of top_token_ids
  // Results; see Choices of worker/sampling_reference.py.
  int32_t* token_ids;
  int32_t* failures;
  float* largest;
  double* total_weights;
  int32_t* top_token_ids;  // [S, K]
};

}  // namespace llm
