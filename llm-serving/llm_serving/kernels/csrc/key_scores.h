// Scores of cached keys for the choice of the keys that a sparse attention reads (`KeyScoresArgs`).
//
// The heads of a row are the rows of a product with a chunk of keys. Weighted scores are added in the order of the
// heads, so a score depends on its row and its key alone.
#pragma once

#include "kernels.h"
#include "kv_layout.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile.h"

namespace llm::LLM_ISA {

// Chunks of an item of work.
constexpr size_t kScoredChunks = 16;

// Writes the scores of the keys of `row` from chunk `first` to before chunk `end`.
template <class Element>
void score_chunks(const KeyScoresArgs& args, size_t row, size_t first, size_t end) {
  using Activation = ActivationOf<Element>;
  const size_t heads = args.heads, dim = args.dim;
  const size_t bytes = heads * (dim * sizeof(Activation) + (kChunkTokens + 1) * sizeof(float)) + 128;
  char* memory = static_cast<char*>(scratch(Scratch::kTile, bytes));
  float* scores = reinterpret_cast<float*>(memory);  // [heads, kChunkTokens]
  float* weights = scores + heads * kChunkTokens;
  auto* q = reinterpret_cast<Activation*>(memory + (heads * (kChunkTokens + 1) * sizeof(float) + 63) / 64 * 64);
  to_activations(static_cast<const Element*>(args.q) + row * args.q_stride, heads * dim, q);
  const Element* given = static_cast<const Element*>(args.weights) + row * args.weights_stride;
  for (size_t head = 0; head < heads; head += kLanes) {
    const size_t left = heads - head;
    store_first(weights + head, load_first(given + head, left), left);
  }
  const int64_t* table = args.block_tables + args.owners[row].request * args.table_width;
  const size_t in_a_block = args.block_size / kGroupTokens;
  const size_t num_groups = args.owners[row].position / kGroupTokens + 1;
  for (size_t chunk = first; chunk < end; chunk++) {
    const Element* keys[kChunkGroups];
    size_t count = 0;
    for (size_t group = chunk * kChunkGroups; count < kChunkGroups && group < num_groups; group++) {
      const auto block = static_cast<size_t>(table[group / in_a_block]);
      keys[count++] =
          static_cast<const Element*>(args.keys) + group_offset(block, group % in_a_block, 0, args.block_size, 1, dim);
    }
    Product<Element> product(heads, q, keys, count, dim, scores);
    product.c_stride = kChunkTokens;
    product.c_panel = kPanelWidth;
    multiply(product);
    float* y = args.scores + row * args.scores_stride + chunk * kChunkTokens;
    for (size_t token = 0; token < count * kGroupTokens; token += kLanes) {
      Floats sum = zeros();
      for (size_t head = 0; head < heads; head++) {
        const Floats score = maximum(load(scores + head * kChunkTokens + token), zeros());
        sum = multiply_add(broadcast(weights[head]), score, sum);
      }
      store(y + token, sum);
    }
  }
}

inline void key_scores(const KeyScoresArgs& args) {
  size_t largest = 0;
  for (size_t row = 0; row < args.rows; row++) {
    const size_t chunks = args.owners[row].position / kChunkTokens + 1;
    largest = chunks > largest ? chunks : largest;
  }
  const size_t items = (largest + kScoredChunks - 1) / kScoredChunks;
  with_element(args.dtype, [&](auto tag) {
    auto run = [&](size_t i) {
      const size_t row = i / items, first = i % items * kScoredChunks;
      const size_t chunks = args.owners[row].position / kChunkTokens + 1;
      const size_t end = first + kScoredChunks < chunks ? first + kScoredChunks : chunks;
      if (first < end) score_chunks<typename decltype(tag)::Element>(args, row, first, end);
    };
    parallel_for(args.rows * items, run);
  });
}

}  // namespace llm::LLM_ISA
