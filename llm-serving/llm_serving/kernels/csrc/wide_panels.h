// Panels of blocks whose qvalues are widened to bytes in memory, so that many rows can be multiplied by them.
#pragma once

#include "quantized_blocks.h"

namespace llm::LLM_ISA {

template <size_t kBits>
void widen_planes(const uint8_t* planes, size_t blocks, uint8_t* target) {
  for (size_t block = 0; block < blocks; block++, planes += kBits * kLineBytes) {
#pragma GCC unroll 8
    for (size_t line = 0; line < kBlockLines; line++, target += kLineBytes) {
      const CodeFactor values = factors_of<kBits>(planes, line);
      __builtin_memcpy(target, &values, sizeof(values));
    }
  }
}

inline void widen_chunk(const BlockForm& form, const BlockLayout& layout, const BlockChunk& chunk, uint8_t* qvalues,
                        GroupNumbers* numbers) {
  with_bits(form.bits, [&](auto bits) { widen_planes<decltype(bits)::value>(chunk.planes, chunk.blocks, qvalues); });
  const size_t groups = chunk.blocks * layout.block_groups;
  const GroupReader reader(form, layout, chunk);
  for (size_t group = 0; group < groups; group++) numbers[group] = reader.numbers(group);
}

// Panels of one form, whose qvalues are widened for the inputs of one pass.
struct WidePanels {
  const uint8_t* qvalues[kTilePanels];
  const GroupNumbers* numbers[kTilePanels];  // of each group
  BlockForm form;
  size_t first_block, blocks;
  // The packed bytes that are widened next. For each group, a tile prefetches the next `group_lines` lines of each
  // panel, so that memory is read while tiles are multiplied.
  const uint8_t* next[kTilePanels];
  size_t next_bytes, group_lines;
};

}  // namespace llm::LLM_ISA
