// Division of the work of attention into tiles of rows that share a KV head, and of a long tile into segments.
#pragma once

#include "kernels.h"
#include "kv_layout.h"
#include "simd.h"
#include "thread_pool.h"

namespace llm::LLM_ISA {

// Chunks of a segment, whose sums are added before they join those of other segments.
constexpr size_t kSegmentChunks = 16;
// Rows of an attention tile. Their scores, weights and sums fit the first-level cache. With AMX they fit the
// second-level cache, and the number is a multiple of 32, so that the configuration of the AMX tiles rarely changes.
// With qvalues, more rows share the scales of a chunk, which outweighs what no longer fits.
#if defined(LLM_AMX)
constexpr size_t kAttentionRows = 128;
#else
constexpr size_t kAttentionRows = 48;
#endif
constexpr size_t kQuantizedAttentionRows = 96;

// Work of one tile: `count` query positions of one request and all heads that share KV head `kv_head`, for the segments
// from `first_segment` to before `end_segment`.
struct AttentionItem {
  uint32_t request, kv_head;
  size_t first_row;  // row of q of the first position
  size_t position;   // index of the first position's own token
  size_t count;
  size_t context;    // tokens of the request
  size_t last_seen;  // index of the last token that any of these positions sees
  uint32_t first_segment, end_segment;
  float* part = nullptr;  // where the sums of a single segment go; null: the item has all segments and writes y

  size_t num_segments() const { return end_segment - first_segment; }
};

// Returns the index of the first token that a position sees.
inline size_t first_of_window(const AttentionArgs& args, size_t position) {
  if (args.chunk > 0) return position - position % args.chunk;
  return args.window == 0 || position < args.window ? 0 : position + 1 - args.window;
}

// Returns the index of the last of `context` tokens that a position sees.
inline size_t last_seen_by(const AttentionArgs& args, size_t position, size_t context) {
  if (args.causal) return position;
  const size_t last = context - 1;
  return args.window == 0 || position + args.window > last ? last : position + args.window - 1;
}

// For each row of a tile: its largest score, sum of weights, and weighted sum of values. Weights are relative to the
// largest score.
struct AttentionSums {
  float* max;    // [rows]
  float* total;  // [rows][16], added at the end
  float* sums;   // [rows, dim]

  static size_t size(size_t rows, size_t dim) { return rows * (dim + kLanes) + (rows + kLanes - 1) / kLanes * kLanes; }

  AttentionSums(float* memory, size_t rows, size_t dim)
      : max(memory + rows * (dim + kLanes)), total(memory + rows * dim), sums(memory) {}
};

// The part of a chunk that a row sees. Without a window it is the beginning or all of it: loops that know this are
// unrolled.
enum class Part { kAll, kBeginning, kAny };

// The tokens of a chunk that a row sees.
struct Seen {
  size_t first, end;

  Part part() const { return first > 0 ? Part::kAny : end < kChunkTokens ? Part::kBeginning : Part::kAll; }

  template <Part kPart>
  size_t first_lane() const {
    return kPart == Part::kAny ? first / kLanes * kLanes : 0;
  }
  template <Part kPart>
  size_t end_lane() const {
    return kPart == Part::kAll ? kChunkTokens : end;
  }
  // Keeps the lanes from token `at` on that the row sees, and sets the others to `other`.
  template <Part kPart>
  LLM_INLINE Floats keep(Floats value, size_t at, float other) const {
    if (kPart != Part::kAll) value = keep_first(value, end - at, other);
    return kPart == Part::kAny && first > at ? keep_from(value, first - at, other) : value;
  }
};

// Division of the work of all requests into items. All heads of the same positions are consecutive, as they are in a
// block, and requests with the longest contexts come first, so that all threads end together. A tile that is much
// longer than the others becomes one item for each segment.
class AttentionItems {
 public:
  explicit AttentionItems(const AttentionArgs& args) : args_(args) {
    size_t work = 0;
    bool is_long = false;
    for_tiles([&](const AttentionItem& tile) {
      work += args_.num_kv_heads * work_of(tile);
      is_long |= tile.num_segments() > 1;
      count_ += args_.num_kv_heads;
    });
    largest_ = is_long && num_threads() > 1 ? work / (kItemsPerThread * num_threads()) : work;
    size_t part_size = 0;
    if (is_long) {
      for_tiles([&](const AttentionItem& tile) {
        if (!is_shared(tile)) return;
        num_shared_ += args_.num_kv_heads;
        count_ += args_.num_kv_heads * (tile.num_segments() - 1);
        part_size += args_.num_kv_heads * tile.num_segments() * size_of(tile);
      });
    }
    const size_t bytes = (count_ + num_shared_) * sizeof(AttentionItem);
    items_ = static_cast<AttentionItem*>(scratch(Scratch::kItems, bytes + 1));
    fill(part_size == 0 ? nullptr : static_cast<float*>(scratch(Scratch::kScores, part_size * sizeof(float))));
  }

  size_t count() const { return count_; }
  const AttentionItem& operator[](size_t i) const { return items_[i]; }
  // Returns an item that is likely to be computed after item i.
  const AttentionItem& after(size_t i) const { return items_[i + 1 < count_ ? i + 1 : i]; }

  // Tiles that are divided into several items, and their locations.
  size_t num_shared() const { return num_shared_; }
  const AttentionItem& shared(size_t i) const { return items_[count_ + i]; }

 private:
  // A tile is divided if it is more than one part in so many of a thread's work.
  static constexpr size_t kItemsPerThread = 4;

  // Calls body(tile) for all tiles of the first head.
  template <class Body>
  void for_tiles(Body body) const {
    const size_t shared = args_.num_heads / args_.num_kv_heads;
    const size_t rows = args_.quantized ? kQuantizedAttentionRows : kAttentionRows;
    const size_t positions = shared >= rows ? 1 : rows / shared;
    constexpr size_t kSegment = kSegmentChunks * kChunkTokens;
    size_t row = 0;
    for (size_t request = 0; request < args_.batch; request++) {
      const size_t queries = static_cast<size_t>(args_.query_lens[request]);
      const size_t context = static_cast<size_t>(args_.context_lens[request]);
      const size_t before = context - queries;
      for (size_t tiles = (queries + positions - 1) / positions; tiles > 0; tiles--) {
        const size_t at = (tiles - 1) * positions;
        const size_t count = queries - at < positions ? queries - at : positions;
        AttentionItem tile = {static_cast<uint32_t>(request),
                              0,
                              row + at,
                              before + at,
                              count,
                              context,
                              last_seen_by(args_, before + at + count - 1, context),
                              0,
                              0};
        tile.first_segment = static_cast<uint32_t>(first_of_window(args_, tile.position) / kSegment);
        tile.end_segment = static_cast<uint32_t>(tile.last_seen / kSegment + 1);
        body(tile);
      }
      row += queries;
    }
  }

  size_t work_of(const AttentionItem& tile) const {
    return tile.count * (tile.last_seen + 1 - first_of_window(args_, tile.position));
  }
  bool is_shared(const AttentionItem& tile) const { return tile.num_segments() > 1 && work_of(tile) > largest_; }
  size_t size_of(const AttentionItem& tile) const {
    return AttentionSums::size(tile.count * (args_.num_heads / args_.num_kv_heads), args_.head_dim);
  }

  void fill(float* part) {
    AttentionItem* item = items_;
    AttentionItem* of_shared = items_ + count_;
    for_tiles([&](AttentionItem tile) {
      if (!is_shared(tile)) {
        for (tile.kv_head = 0; tile.kv_head < args_.num_kv_heads; tile.kv_head++) *item++ = tile;
        return;
      }
      const size_t size = size_of(tile);
      for (uint32_t segment = tile.first_segment; segment < tile.end_segment; segment++) {
        AttentionItem each = tile;
        each.first_segment = segment;
        each.end_segment = segment + 1;
        for (each.kv_head = 0; each.kv_head < args_.num_kv_heads; each.kv_head++) {
          each.part = part + (each.kv_head * tile.num_segments() + segment - tile.first_segment) * size;
          *item++ = each;
        }
      }
      for (tile.kv_head = 0; tile.kv_head < args_.num_kv_heads; tile.kv_head++) {
        tile.part = part;
        *of_shared++ = tile;
        part += tile.num_segments() * size;
      }
    });
  }

  const AttentionArgs& args_;
  size_t count_ = 0, num_shared_ = 0, largest_ = 0;
  AttentionItem* items_;  // [count + num_shared]
};

}  // namespace llm::LLM_ISA
