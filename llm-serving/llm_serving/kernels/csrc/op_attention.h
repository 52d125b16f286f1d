// Attention as a part of larger operators.
#pragma once

#include "call.h"
#include "passes.h"

namespace llm {

// Rows of query, key and value, `width` elements each and `q_width` of them queries, and the parameters of a call that
// go with them.
struct QkvParameters {
  const void* qkv;
  size_t tokens, width, q_width;
  DType dtype;
  int cos, sin, key_cache, value_cache, slot_mapping, block_tables, query_lens, context_lens;
  float scale;
  void* y;
  Passes y_passes;
};

// Rotates queries and keys, stores keys and values, attends: what four operators do otherwise, with the same bits.
// Returns a status as operators do; nothing is written unless it is 0.
int attend_to_qkv(const Call& call, const QkvParameters& at);

}  // namespace llm
