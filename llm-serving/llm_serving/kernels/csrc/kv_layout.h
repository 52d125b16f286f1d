// Layout of keys and values in a cache [num_blocks, block_size, num_kv_heads, head_dim].
//
// A block is contiguous and holds its heads one after another; a head holds groups of 16 tokens; a group is laid out as
// packed panels (packed_weights.h), so that scores and sums are products with packed weights:
// keys     one panel: 16 tokens are the columns, head_dim the inputs
// values   head_dim / 16 panels: 16 dims are the columns, 16 tokens the inputs
// block_size and head_dim are multiples of 16.
//
// In a cache of qvalues [num_blocks, block_size, num_kv_heads, head_dim + 4], int8, each token has a scale for each
// head: an element is scale * qvalue. Keys are rotated before they are rounded (rotation.h). A group has its qvalues,
// of which four inputs are adjacent whatever the model dtype, followed by its 16 float32 scales.
#pragma once

#include "kernels.h"

namespace llm {

constexpr size_t kGroupTokens = 16;
// Tokens of a chunk, which attention processes together.
constexpr size_t kChunkTokens = 64;
constexpr size_t kChunkGroups = kChunkTokens / kGroupTokens;
// Inputs of qvalues that are adjacent: dims of a key, tokens of a value.
constexpr size_t kCodeInputs = 4;
// Bytes of the scale of one token and head.
constexpr size_t kScaleBytes = 4;

// Offset of the first element of a group of tokens of one head; for qvalues, of the first byte, with `head_dim`
// including kScaleBytes.
LLM_INLINE size_t group_offset(size_t block, size_t group, size_t head, size_t block_size, size_t heads,
                               size_t head_dim) {
  return (block * heads + head) * block_size * head_dim + group * kGroupTokens * head_dim;
}

// Offset of element (token, dim) in a group of values.
LLM_INLINE size_t value_offset(size_t token, size_t dim, bool pairs) {
  const size_t panel = dim / kPanelWidth * kPanelWidth * kGroupTokens;
  const size_t column = dim % kPanelWidth;
  return panel + (pairs ? (token / 2 * kPanelWidth + column) * 2 + token % 2 : token * kPanelWidth + column);
}

// Offset of element (token, dim) in a group of keys.
LLM_INLINE size_t key_offset(size_t token, size_t dim, bool pairs) {
  return pairs ? (dim / 2 * kGroupTokens + token) * 2 + dim % 2 : dim * kGroupTokens + token;
}

}  // namespace llm
