// Attention over a paged cache, causal or bidirectional, in the style of FlashAttention: keys in chunks at fixed
// positions, online softmax.
//
// A row's chunks begin at absolute positions 0, 64, 128, ... of its own context, so its operations, and its bits, are
// the same whether it is decoded, prefilled whole or in chunks, and wherever its blocks are. Rows that share a KV head
// and have adjacent positions form a tile, which reads each key once. A row with a window begins at the group of its
// first visible token; earlier block table entries are not read. The tokens 0 to 1023, 1024 to 2047 and so on form
// segments with separate sums. These are added in this order, whether one thread has computed all of them or, for a
// tile much longer than the others, several threads share them. T. Dao et al., FlashAttention (2022), algorithm 1; GQA:
// J. Ainslie et al. (2023); T. Dao et al., Flash-Decoding (2023).
#pragma once

#include "attention_items.h"
#include "attention_weights.h"
#include "kernels.h"
#include "kv_layout.h"
#include "quantized_attention.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile.h"

namespace llm::LLM_ISA {

template <class Element>
class AttentionTile {
 public:
  using Activation = ActivationOf<Element>;

  // `following`: the item that this thread is likely to run next.
  AttentionTile(const AttentionArgs& args, const AttentionItem& item, const AttentionItem& following)
      : args_(args),
        item_(item),
        following_(following),
        shared_(args.num_heads / args.num_kv_heads),
        rows_(item.count * shared_),
        dim_(args.head_dim),
        key_dim_(args.key_dim > 0 ? args.key_dim : dim_),
        stored_dim_(key_dim_ + (args.quantized ? kScaleBytes : 0)),
        rope_dim_(args.q_rope == nullptr ? 0 : args.rope_dim),
        reach_(args.causal       ? 0
               : args.window > 0 ? args.window - 1
                                 : item.context),
        has_score_mod_(args.cap > 0.0f || args.slopes != nullptr),
        scale_((has_score_mod_ ? 1.0f : args.scale) * 1.44269504f),
        of_segment_(nullptr, 0, 0),
        of_all_(nullptr, 0, 0) {
    char* memory = static_cast<char*>(scratch(Scratch::kTile, bytes()));
    q_ = take<Activation>(memory, rows_ * key_dim_);
    scores_ = take<float>(memory, rows_ * kChunkTokens);
    weights_ = take<Activation>(memory, rows_ * kChunkTokens);
    const size_t size = AttentionSums::size(rows_, dim_);
    of_segment_ = {item.part == nullptr ? take<float>(memory, size) : item.part, rows_, dim_};
    if (item.part == nullptr && item.num_segments() > 1) of_all_ = {take<float>(memory, size), rows_, dim_};
    reference_ = take<float>(memory, rows_);
    row_scale_ = take<float>(memory, rows_);
    largest_ = take<float>(memory, (rows_ + kLanes - 1) * kLanes);
    factor_ = take<float>(memory, rows_);
    cleaned_ = take<Element>(memory, kGroupTokens * dim_);
    if (args.quantized) quantized_ = QuantizedTile(memory, rows_, dim_);
    if (!is_latent()) return;
    latent_values_ = take<Element>(memory, kChunkTokens * dim_);
    q_rope_ = take<Activation>(memory, rows_ * rope_dim_);
    rope_keys_ = take<Element>(memory, kChunkTokens * rope_dim_);
  }

  void run() {
    load_queries();
    clear();
    Groups groups = find_groups(item_, first_chunk(item_));
    for (size_t chunk = first_chunk(item_); chunk < end_chunk(item_); chunk++) {
      first_row_ = first_row_seeing(chunk * kChunkTokens);
      end_row_ = end_of_rows_seeing((chunk + 1) * kChunkTokens - 1);
      const bool ends = chunk + 1 == end_chunk(item_);
      const Groups next = ends ? find_groups(following_, first_chunk(following_)) : find_groups(item_, chunk + 1);
      gather_blocks(groups, next);
      if (args_.quantized) see_tokens(chunk);
      compute_scores();
      if (has_score_mod_) modify_scores(chunk);
      online_softmax(chunk);
      add_values(chunk);
      groups = next;
      if (item_.num_segments() == 1 || !(ends || (chunk + 1) % kSegmentChunks == 0)) continue;
      join(chunk / kSegmentChunks, of_segment_);
      clear();
    }
    if (item_.part == nullptr) store_result(item_.num_segments() > 1 ? of_all_ : of_segment_);
  }

  // Writes the result of a tile whose segments have stored their sums consecutively at `parts`.
  void join_parts(float* parts) {
    for (uint32_t segment = item_.first_segment; segment < item_.end_segment; segment++) {
      join(segment, {parts, rows_, dim_});
      parts += AttentionSums::size(rows_, dim_);
    }
    store_result(of_all_);
  }

 private:
  // Offsets in the caches of the groups of a chunk that any row of an item sees.
  struct Groups {
    size_t count = 0;
    size_t offset[kChunkGroups];
  };

  // Whether the values are elements of the keys.
  bool is_latent() const { return rope_dim_ > 0 || args_.key_dim > 0; }

  size_t bytes() const {
    return rows_ * (key_dim_ * sizeof(Activation) + kChunkTokens * (sizeof(Activation) + sizeof(float)) +
                    (3 + kLanes) * sizeof(float)) +
           kLanes * kLanes * sizeof(float) + 2 * AttentionSums::size(rows_, dim_) * sizeof(float) +
           kGroupTokens * dim_ * sizeof(Element) + 15 * 64 + (args_.quantized ? QuantizedTile::bytes(rows_, dim_) : 0) +
           (!is_latent()
                ? 0
                : rows_ * rope_dim_ * sizeof(Activation) + kChunkTokens * (dim_ + rope_dim_) * sizeof(Element));
  }

  // Rows are ordered by position, so the rows that see a token are the last ones...
  size_t first_row_seeing(size_t token) const {
    const size_t seen = item_.position + reach_;
    return token <= seen ? 0 : (token - seen) * shared_;
  }

  // ...and the rows whose window still contains it are the first ones.
  size_t end_of_rows_seeing(size_t token) const {
    if (args_.window == 0 && args_.chunk == 0) return rows_;
    // The first position whose window or chunk excludes the token.
    const size_t end = args_.chunk > 0 ? (token / args_.chunk + 1) * args_.chunk : token + args_.window;
    const size_t count = end <= item_.position ? 0 : end - item_.position;
    return count < item_.count ? count * shared_ : rows_;
  }

  // The index of a row's own token, and of the last and of the first token that it sees.
  size_t position_of(size_t row) const { return item_.position + row / shared_; }
  size_t seen_by(size_t row) const { return last_seen_by(args_, position_of(row), item_.context); }
  size_t seen_from(size_t row) const { return first_of_window(args_, position_of(row)); }

  size_t first_chunk(const AttentionItem& item) const {
    const size_t of_window = first_of_window(args_, item.position) / kChunkTokens;
    const size_t of_segment = item.first_segment * kSegmentChunks;
    return of_window > of_segment ? of_window : of_segment;
  }

  static size_t end_chunk(const AttentionItem& item) {
    const size_t of_rows = item.last_seen / kChunkTokens + 1;
    const size_t of_segment = item.end_segment * kSegmentChunks;
    return of_rows < of_segment ? of_rows : of_segment;
  }

  size_t head_of(size_t row) const { return item_.kv_head * shared_ + row % shared_; }

  // Groups before the item's window get the offset of the first group in it: what is read there is not used.
  Groups find_groups(const AttentionItem& item, size_t chunk) const {
    Groups groups;
    const size_t behind = first_of_window(args_, item.position) / kGroupTokens;
    const size_t in_a_block = args_.block_size / kGroupTokens;
    const size_t first = chunk * kChunkGroups;
    const int64_t* block = args_.block_tables + item.request * args_.table_width + first / in_a_block;
    size_t group = first % in_a_block;
    for (size_t token = chunk * kChunkTokens; groups.count < kChunkGroups && token <= item.last_seen;
         token += kGroupTokens) {
      const size_t index = groups.count++;
      if (token / kGroupTokens >= behind) {
        groups.offset[index] = group_offset(static_cast<size_t>(*block), group, item.kv_head, args_.block_size,
                                            args_.num_kv_heads, stored_dim_);
        for (size_t i = index; i > 0 && token / kGroupTokens == behind; i--) groups.offset[i - 1] = groups.offset[i];
      }
      if (++group < in_a_block) continue;
      group = 0;
      block++;
    }
    return groups;
  }

  // Collects pointers to the keys and values of a chunk, and prefetches the keys of the next chunk, or of the first
  // chunk of the following item; if that has fewer groups, its last group is repeated. Blocks have arbitrary addresses,
  // so the hardware prefetcher cannot predict them.
  void gather_blocks(const Groups& groups, const Groups& next) {
    num_groups_ = groups.count;
    if (args_.quantized) {
      return quantized_.gather_blocks(args_.key_cache, args_.value_cache, groups.offset, groups.count, next.offset,
                                      next.count);
    }
    for (size_t i = 0; i < groups.count; i++) {
      keys_[i] = static_cast<const Element*>(args_.key_cache) + groups.offset[i];
      values_[i] = is_latent() ? transpose_latent(groups.offset[i], i)
                               : static_cast<const Element*>(args_.value_cache) + groups.offset[i];
    }
    const size_t last = next.count > 0 ? next.count - 1 : 0;
    for (size_t i = 0; i < kChunkGroups; i++) {
      const size_t at = i < last ? i : last;
      next_keys_[i] = static_cast<const Element*>(args_.key_cache) + next.offset[at];
    }
  }

  // Converts group i of latent keys to the layout of values, which is returned. If the value cache has their rotary
  // part, converts it to the layout of keys.
  const Element* transpose_latent(size_t offset, size_t i) {
    constexpr bool kPairs = Operand<Element>::kInputs == 2;
    const Element* keys = static_cast<const Element*>(args_.key_cache) + offset;
    Element* values = latent_values_ + i * kGroupTokens * dim_;
    for (size_t dim = 0; dim < dim_; dim++) {
      for (size_t token = 0; token < kGroupTokens; token++) {
        values[value_offset(token, dim, kPairs)] = keys[key_offset(token, dim, kPairs)];
      }
    }
    if (rope_dim_ == 0) return values;
    const Element* rope = static_cast<const Element*>(args_.value_cache) + offset / dim_ * rope_dim_;
    Element* rope_keys = rope_keys_ + i * kGroupTokens * rope_dim_;
    for (size_t dim = 0; dim < rope_dim_; dim++) {
      for (size_t token = 0; token < kGroupTokens; token++) {
        rope_keys[key_offset(token, dim, kPairs)] = rope[value_offset(token, dim, kPairs)];
      }
    }
    rope_[i] = rope_keys;
    return values;
  }

  void load_queries() {
    const size_t stride = args_.q_stride > 0 ? args_.q_stride : args_.num_heads * key_dim_;
    const size_t head = item_.kv_head * shared_;
    for (size_t position = 0, row = 0; position < item_.count; position++) {
      const size_t from = item_.first_row + position;
      const Element* q = static_cast<const Element*>(args_.q) + from * stride + head * key_dim_;
      const Element* rope = static_cast<const Element*>(args_.q_rope) + from * args_.rope_stride + head * rope_dim_;
      for (size_t i = 0; i < shared_; i++, row++) {
        if (args_.quantized) {
          quantized_.load_query(row, q + i * dim_, has_score_mod_ ? args_.scale : scale_, has_score_mod_);
        } else {
          to_activations(q + i * key_dim_, key_dim_, q_ + row * key_dim_);
        }
        row_scale_[row] = args_.quantized ? 1.0f / kExponentUnit : scale_;
        if (rope_dim_ > 0) to_activations(rope + i * rope_dim_, rope_dim_, q_rope_ + row * rope_dim_);
      }
    }
  }

  // Begins a segment.
  void clear() {
    for (size_t row = 0; row < rows_; row++) of_segment_.max[row] = -__builtin_inff();
    __builtin_memset(of_segment_.total, 0, rows_ * kLanes * sizeof(float));
    __builtin_memset(of_segment_.sums, 0, rows_ * dim_ * sizeof(float));
  }

  // Adds the sums of a segment to those of earlier segments, for the rows that see any of it. The first segment that a
  // row sees is copied.
  void join(size_t segment, const AttentionSums& of_segment) {
    const size_t begin = segment * kSegmentChunks * kChunkTokens;
    const size_t end = begin + kSegmentChunks * kChunkTokens;
    for (size_t row = first_row_seeing(begin); row < end_of_rows_seeing(end - 1); row++) {
      const float* from = of_segment.sums + row * dim_;
      const float* from_total = of_segment.total + row * kLanes;
      float* sums = of_all_.sums + row * dim_;
      float* total = of_all_.total + row * kLanes;
      if (seen_from(row) >= begin) {
        of_all_.max[row] = of_segment.max[row];
        __builtin_memcpy(total, from_total, kLanes * sizeof(float));
        __builtin_memcpy(sums, from, dim_ * sizeof(float));
        continue;
      }
      const float before = of_all_.max[row];
      const float found = of_segment.max[row];
      const float next = found > before ? found : before;
      const float reference = next == -__builtin_inff() ? 0.0f : next;
      const Floats of_before = exp2(broadcast(before - reference));
      const Floats of_found = exp2(broadcast(found - reference));
      store(total, multiply_add(load(total), of_before, load(from_total) * of_found));
      for (size_t i = 0; i < dim_; i += kLanes) {
        store(sums + i, multiply_add(load(sums + i), of_before, load(from + i) * of_found));
      }
      of_all_.max[row] = next;
    }
  }

  void compute_scores() {
    if (args_.quantized) return quantized_.compute_scores(first_row_, end_row_, scores_, largest_);
    Product<Element> product(end_row_ - first_row_, q_ + first_row_ * key_dim_, keys_, num_groups_, key_dim_,
                             scores_ + first_row_ * kChunkTokens);
    product.c_stride = kChunkTokens;
    product.c_panel = kPanelWidth;
    product.next = values_;
    multiply(product);
    if (rope_dim_ == 0) return;
    Product<Element> rope(end_row_ - first_row_, q_rope_ + first_row_ * rope_dim_, rope_, num_groups_, rope_dim_,
                          scores_ + first_row_ * kChunkTokens);
    rope.c_stride = kChunkTokens;
    rope.c_panel = kPanelWidth;
    rope.add_to_c = true;
    multiply(rope);
  }

  // Scales scores, applies the cap, and subtracts the ALiBi bias.
  void modify_scores(size_t chunk) {
    for (size_t row = first_row_; row < end_row_; row++) {
      const float slope = args_.slopes == nullptr ? 0.0f : args_.slopes[head_of(row)];
      const float scale = args_.quantized ? 1.0f : args_.scale;
      for (size_t i = 0; i < num_groups_ * kGroupTokens; i += kLanes) {
        float* scores = scores_ + row * kChunkTokens + i;
        Floats value = load(scores) * broadcast(scale);
        if (args_.cap > 0.0f) value = broadcast(args_.cap) * tanh(value / broadcast(args_.cap));
        const auto to_first =
            static_cast<ptrdiff_t>(position_of(row)) - static_cast<ptrdiff_t>(chunk * kChunkTokens + i);
        const Floats distance = broadcast(static_cast<float>(to_first)) - lane_numbers();
        store(scores, value - broadcast(slope) * distance);
      }
    }
  }

  // Turns the scores of rows into weights relative to the largest score so far, and rescales the sums. With
  // `kWeighsBetween`, `weigh_and_add_values` does this instead if all rows see the chunk. Each stage is done for all
  // rows before the next begins: the instructions of different rows overlap.
  void online_softmax(size_t chunk) {
    if (args_.quantized) return update_references_quantized();
    for_rows(chunk, [&](size_t row, const Seen& seen) {
      switch (seen.part()) {
        case Part::kAll:
          return find_largest<Part::kAll>(row, seen);
        case Part::kBeginning:
          return find_largest<Part::kBeginning>(row, seen);
        case Part::kAny:
          return find_largest<Part::kAny>(row, seen);
      }
    });
    for (size_t row = first_row_; row < end_row_; row += kLanes) update_references(row, end_row_ - row);
    if (kWeighsBetween<Element> && all_rows_see(chunk)) return;
    const SoftmaxWeigher<Activation> weigher = weigher_from(0);
    for_rows(chunk, [&](size_t row, const Seen& seen) {
      switch (seen.part()) {
        case Part::kAll:
          weigher.template weigh<Part::kAll>(row, seen);
          break;
        case Part::kBeginning:
          weigher.template weigh<Part::kBeginning>(row, seen);
          break;
        case Part::kAny:
          weigher.template weigh<Part::kAny>(row, seen);
          break;
      }
      if (factor_[row] == 1.0f) return;
      float* sums = of_segment_.sums + row * dim_;
      for (size_t i = 0; i < dim_; i += kLanes) store(sums + i, load(sums + i) * broadcast(factor_[row]));
    });
  }

  Seen seen_in(size_t chunk, size_t position) const {
    const size_t begin = chunk * kChunkTokens;
    const size_t from = first_of_window(args_, position);
    const size_t end = last_seen_by(args_, position, item_.context) + 1 - begin;
    return {from > begin ? from - begin : 0, end < kChunkTokens ? end : kChunkTokens};
  }

  // Calls body(row, seen) for the rows that see the current chunk; rows of one position see the same tokens.
  template <class Body>
  LLM_INLINE void for_rows(size_t chunk, Body body) const {
    size_t position = position_of(first_row_);
    for (size_t row = first_row_; row < end_row_; position++) {
      const Seen seen = seen_in(chunk, position);
      for (const size_t end = row + shared_; row < end; row++) body(row, seen);
    }
  }

  void see_tokens(size_t chunk) {
    for (size_t row = first_row_; row < end_row_; row += shared_) {
      const Seen seen = seen_in(chunk, position_of(row));
      quantized_.see(row, row + shared_, seen.first, seen.end, has_score_mod_);
    }
  }

  // With qvalues, weights are computed together with the sums of values.
  void update_references_quantized() {
    for (size_t row = first_row_; row < end_row_ && has_score_mod_; row++) {
      store(largest_ + row * kLanes, quantized_.finish_scores(row, scores_ + row * kChunkTokens));
    }
    for (size_t row = first_row_; row < end_row_; row += kLanes) update_references(row, end_row_ - row);
  }

  // Finds the largest scores of a row in each lane.
  template <Part kPart>
  void find_largest(size_t row, const Seen seen) {
    const float* scores = scores_ + row * kChunkTokens;
    store(largest_ + row * kLanes, largest_of<kPart>(seen, [&](size_t i) { return load(scores + i); }));
  }

  template <Part kPart, class Score>
  LLM_INLINE static Floats largest_of(const Seen seen, Score score) {
    Floats largest = broadcast(-__builtin_inff());
    const size_t end = seen.template end_lane<kPart>();
#pragma GCC unroll 4
    for (size_t i = seen.template first_lane<kPart>(); i < end; i += kLanes) {
      largest = maximum(largest, seen.template keep<kPart>(score(i), i, -__builtin_inff()));
    }
    return largest;
  }

  // Updates the largest scores of at most sixteen rows, and computes the factors that rescale their earlier weights.
  // Scores are in units of log 2, because weights are powers of two.
  void update_references(size_t row, size_t count) {
    const Floats found = max_of_rows(largest_ + row * kLanes) * load_first(row_scale_ + row, count);
    const Floats before = load_first(of_segment_.max + row, count);
    const Floats next = maximum(found, before);
    // If all scores so far are -inf, any finite reference makes all weights zero.
    const Floats reference = zero_if_minus_infinity(next);
    store_first(of_segment_.max + row, next, count);
    store_first(reference_ + row, reference, count);
    store_first(factor_ + row, exp2(before - reference), count);
    if (args_.quantized) quantized_.set_largest(row, count, found, reference);
  }

  void add_values(size_t chunk) {
    if (args_.quantized) return quantized_.add_values(first_row_, end_row_, scores_, factor_, of_segment_);
    if (!all_rows_see(chunk)) {
      for (size_t g = 0; g < num_groups_; g++) {
        add_partly_seen_group(values_[g], chunk * kChunkTokens + g * kGroupTokens, g);
      }
    } else if constexpr (kWeighsBetween<Element>) {
      weigh_and_add_values();
    } else {
      add_groups(values_, kChunkGroups, 0, first_row_, end_row_);
    }
  }

  // Whether all rows that see any token of a chunk see all of its tokens.
  bool all_rows_see(size_t chunk) const {
    const size_t begin = chunk * kChunkTokens;
    return seen_by(first_row_) + 1 >= begin + kChunkTokens && seen_from(end_row_ - 1) <= begin;
  }

  SoftmaxWeigher<Activation> weigher_from(size_t row) const {
    return {scores_ + row * kChunkTokens,
            row_scale_ + row,
            reference_ + row,
            factor_ + row,
            of_segment_.total + row * kLanes,
            weights_ + row * kChunkTokens};
  }

  // Computes the weights of the rows, rescales their sums, and adds the weighted values of a whole chunk.
  void weigh_and_add_values() {
    size_t weighed = 0;
    Ending<ValueBFloat16> ending = {{weigher_from(first_row_), &weighed, end_row_ - first_row_},
                                    factor_ + first_row_,
                                    of_segment_.sums + first_row_ * dim_,
                                    dim_};
    multiply_values<ValueBFloat16>(values_, kChunkGroups, 0, first_row_, end_row_, [&](auto& product, size_t dim) {
      ending.sums = of_segment_.sums + first_row_ * dim_ + dim;
      product.ending = &ending;
    });
  }

  // Adds the group that begins with `token` for the rows that see any of it.
  void add_partly_seen_group(const Element* values, size_t token, size_t g) {
    const size_t last_token = token + kGroupTokens - 1;
    size_t row = first_row_seeing(token) > first_row_ ? first_row_seeing(token) : first_row_;
    const size_t of_window = end_of_rows_seeing(last_token);
    const size_t end = of_window < end_row_ ? of_window : end_row_;
    if (row >= end) return;
    auto sees_all = [&](size_t first, size_t last) { return seen_by(first) >= last_token && seen_from(last) <= token; };
    // A weight of zero does not hide an infinity or NaN outside of the visible tokens.
    if (!sees_all(row, end - 1) && !all_finite(values)) {
      for (; row < end; row++) {
        const size_t from = seen_from(row) > token ? seen_from(row) - token : 0;
        const Element* seen = sees_all(row, row) ? values : clean(values, from, seen_by(row) + 1 - token);
        add_groups(&seen, 1, g, row, row + 1);
      }
    }
    if (row < end) add_groups(&values, 1, g, row, end);
  }

  // Adds `count` groups of values, weighted by the columns from group `g` on, to the rows from `first` to `last`, and
  // prefetches as many groups of the next keys.
  void add_groups(const Element* const* groups, size_t count, size_t g, size_t first, size_t last) {
    multiply_values<Element>(groups, count, g, first, last, [&](auto& product, size_t dim) {
      product.c = of_segment_.sums + first * dim_ + dim;
      product.add_to_c = true;
    });
  }

  // Multiplies `count` groups of values as elements of type `Value`, which has the layout of `Element`.
  // `set_result(product, dim)` sets the destination of the product for the dims from `dim` on.
  template <class Value, class SetResult>
  LLM_INLINE void multiply_values(const Element* const* groups, size_t count, size_t g, size_t first, size_t last,
                                  SetResult set_result) {
    const Value* panels[kChunkGroups * kPassPanels];
    const Value* next[kChunkGroups * kPassPanels];
    for (size_t dim = 0; dim < dim_; dim += kPassPanels * kPanelWidth) {
      const size_t left = (dim_ - dim) / kPanelWidth;
      const size_t width = left < kPassPanels ? left : kPassPanels;
      for (size_t i = 0; i < count; i++) {
        for (size_t p = 0; p < width; p++) {
          const size_t offset = (dim + p * kPanelWidth) * kGroupTokens;
          panels[i * width + p] = reinterpret_cast<const Value*>(groups[i] + offset);
          next[i * width + p] = reinterpret_cast<const Value*>(next_keys_[g + i] + offset);
        }
      }
      Product<Value> product(last - first, weights_ + first * kChunkTokens + g * kGroupTokens, panels, width,
                             kGroupTokens, nullptr);
      product.segments = count;
      product.a_stride = kChunkTokens;
      product.c_stride = dim_;
      product.c_panel = kPanelWidth;
      product.next = next;
      set_result(product, dim);
      multiply(product);
    }
  }

  bool all_finite(const Element* values) const {
    // Zero times a number is zero; times infinity or NaN it is NaN.
    Floats product = zeros();
    for (size_t i = 0; i < kGroupTokens * dim_; i += kLanes) product = product + load(values + i) * zeros();
    const float sum = sum_lanes(product);
    return sum == sum;
  }

  // Returns a copy of a group of values in which all tokens outside of `first` to `end` are zero.
  const Element* clean(const Element* values, size_t first, size_t end) {
    constexpr bool kPairs = Operand<Element>::kInputs == 2;
    for (size_t token = 0; token < kGroupTokens; token++) {
      for (size_t dim = 0; dim < dim_; dim++) {
        const size_t at = value_offset(token, dim, kPairs);
        cleaned_[at] = token >= first && token < end ? values[at] : Element{};
      }
    }
    return cleaned_;
  }

  // Returns the factor of a row's sums where the sink of its head takes part in the softmax. `max` is the largest
  // score, to which `total` refers, in units of log 2.
  float share_beside_sink(float total, float max, size_t head) const {
    const float sink = args_.sinks[item_.kv_head * shared_ + head] * 1.44269504f;
    const float reference = max > sink ? max : sink;
    alignas(64) float of_max[kLanes], of_sink[kLanes];
    store(of_max, exp2(broadcast(max - reference)));
    store(of_sink, exp2(broadcast(sink - reference)));
    return of_max[0] / (total * of_max[0] + of_sink[0]);
  }

  void store_result(const AttentionSums& result) {
    for (size_t row = 0; row < rows_; row++) {
      const float total = sum_lanes(load(result.total + row * kLanes));
      factor_[row] = total == 0.0f ? 1.0f : 1.0f / total;
      if (args_.sinks != nullptr) factor_[row] = share_beside_sink(total, result.max[row], row % shared_);
    }
    const TiledLayout layout = args_.y_layout.or_rows(args_.rows, args_.num_heads * dim_);
    const size_t width = shared_ * dim_;
    const size_t column = item_.kv_head * width;
    for (size_t position = 0; position < item_.count; position++) {
      const float* sums = result.sums + position * width;
      size_t row = position * shared_;
      size_t end_of_row = column + dim_;
      layout.for_runs(item_.first_row + position, column, column + width, [&](size_t begin, size_t end, size_t at) {
        Element* y = static_cast<Element*>(args_.y) + at;
        for (size_t i = begin; i < end; i += kLanes) {
          if (i == end_of_row) {
            row++;
            end_of_row += dim_;
          }
          store(y + i - begin, load(sums + i - column) * broadcast(factor_[row]));
        }
      });
    }
  }

  static constexpr size_t kPassPanels = 8;  // panels of values in one product

  const AttentionArgs& args_;
  const AttentionItem& item_;
  const AttentionItem& following_;
  const size_t shared_, rows_, dim_;
  const size_t key_dim_;               // elements of a key; the first dim_ are its value if args.key_dim is set
  const size_t stored_dim_;            // elements of a head in the caches, including its scales
  const size_t rope_dim_;              // elements of the rotary part of keys in the value cache
  const size_t reach_;                 // most later tokens that a row attends to; 0 if causal
  const bool has_score_mod_;           // whether scores are modified before the softmax
  const float scale_;                  // factor of scores, in units of log 2
  Activation* q_;                      // [rows, key_dim]
  float* scores_;                      // [rows, kChunkTokens]
  Activation* weights_;                // [rows, kChunkTokens]
  AttentionSums of_segment_;           // the current segment
  AttentionSums of_all_;               // earlier segments, if there is more than one segment
  float* reference_;                   // [rows], reference of the weights of the current chunk
  float* factor_;                      // [rows], factor that rescales the sums
  float* row_scale_;                   // [rows], factor of scores, in units of log 2
  float* largest_;                     // [rows][16], largest scores of the current chunk in each lane
  Element* cleaned_;                   // [kGroupTokens, dim]
  const Element* keys_[kChunkGroups];  // groups of the current chunk
  const Element* values_[kChunkGroups];
  const Element* next_keys_[kChunkGroups];
  QuantizedTile quantized_;  // for a cache of qvalues
  // For latent keys: rotary queries [rows, rope_dim], and the values and rotary keys of the current chunk.
  Activation* q_rope_ = nullptr;
  Element *latent_values_ = nullptr, *rope_keys_ = nullptr;
  const Element* rope_[kChunkGroups];
  size_t num_groups_ = 0;
  size_t first_row_ = 0, end_row_ = 0;  // rows that see the current chunk
};

inline void attention(const AttentionArgs& args) {
  const AttentionItems items(args);
  with_element(args.dtype, [&](auto tag) {
    using Tile = AttentionTile<typename decltype(tag)::Element>;
    auto run = [&](size_t i) { Tile(args, items[i], items.after(i)).run(); };
    parallel_for(items.count(), run);
    auto join = [&](size_t i) {
      AttentionItem tile = items.shared(i);
      float* parts = tile.part;
      tile.part = nullptr;
      Tile(args, tile, tile).join_parts(parts);
    };
    parallel_for(items.num_shared(), join);
  });
}

}  // namespace llm::LLM_ISA
