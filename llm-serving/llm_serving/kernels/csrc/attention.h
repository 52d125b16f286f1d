// Causal attention over a paged cache, FlashAttention style: keys in chunks of fixed places, softmax along the way.
//
// A row's chunks begin at absolute positions 0, 64, 128, ... of its own context, so its operations, and its bits, are
// the same whether it is decoded, prefilled whole or in chunks, and wherever its blocks lie. Rows that share a head of
// keys and are neighbours in position form a tile, which reads each key once. A row with a window begins at the group
// of its first token: what lies before is neither looked up nor trusted. T. Dao et al., FlashAttention (2022),
// algorithm 1; GQA: J. Ainslie et al. (2023).
#pragma once

#include "kernels.h"
#include "kv_layout.h"
#include "simd.h"
#include "thread_pool.h"
#include "tile.h"

namespace llm::LLM_ISA {

constexpr size_t kChunkTokens = 64;
constexpr size_t kChunkGroups = kChunkTokens / kGroupTokens;
// Rows of a tile: their scores, weights and sums stay in the first-level cache.
constexpr size_t kAttentionRows = 48;

// Work of one tile: `count` query positions of one request, all heads that share head `kv_head`.
struct AttentionItem {
  uint32_t request, kv_head;
  size_t first_row;   // row of q of the first position
  size_t first_seen;  // index of the last key that this position sees; the next sees one more
  size_t count;

  size_t last_seen() const { return first_seen + count - 1; }
};

template <class Element>
class AttentionTile {
 public:
  using Activation = ActivationOf<Element>;

  // `following`: an item that this thread is likely to run next.
  AttentionTile(const AttentionArgs& args, const AttentionItem& item, const AttentionItem& following)
      : args_(args),
        item_(item),
        following_(following),
        shared_(args.num_heads / args.num_kv_heads),
        rows_(item.count * shared_),
        dim_(args.head_dim),
        turned_dim_(args.q_turned == nullptr ? 0 : args.turned_dim),
        bends_(args.cap > 0.0f || args.slopes != nullptr),
        scale_((bends_ ? 1.0f : args.scale) * 1.44269504f) {
    char* memory = static_cast<char*>(scratch(Scratch::kTile, bytes()));
    q_ = take<Activation>(memory, rows_ * dim_);
    scores_ = take<float>(memory, rows_ * kChunkTokens);
    weights_ = take<Activation>(memory, rows_ * kChunkTokens);
    sums_ = take<float>(memory, rows_ * dim_);
    max_ = take<float>(memory, rows_);
    total_ = take<float>(memory, rows_ * kLanes);
    reference_ = take<float>(memory, rows_);
    factor_ = take<float>(memory, rows_);
    cleaned_ = take<Element>(memory, kGroupTokens * dim_);
    if (turned_dim_ == 0) return;
    q_turned_ = take<Activation>(memory, rows_ * turned_dim_);
    latent_values_ = take<Element>(memory, kChunkTokens * dim_);
    turned_keys_ = take<Element>(memory, kChunkTokens * turned_dim_);
  }

  void run() {
    load_queries();
    Groups groups = find_groups(item_, first_chunk(item_));
    for (size_t chunk = first_chunk(item_); chunk * kChunkTokens <= item_.last_seen(); chunk++) {
      first_row_ = first_row_seeing(chunk * kChunkTokens);
      end_row_ = end_of_rows_seeing((chunk + 1) * kChunkTokens - 1);
      const bool ends = (chunk + 1) * kChunkTokens > item_.last_seen();
      const Groups next = ends ? find_groups(following_, first_chunk(following_)) : find_groups(item_, chunk + 1);
      look_up(groups, next);
      compute_scores();
      if (bends_) bend_scores(chunk);
      soften(chunk);
      add_values(chunk);
      groups = next;
    }
    store_result();
  }

 private:
  // Where the groups of a chunk that any row of an item sees begin in the caches.
  struct Groups {
    size_t count = 0;
    size_t offset[kChunkGroups];
  };

  template <class Type>
  static Type* take(char*& memory, size_t count) {
    Type* result = reinterpret_cast<Type*>(memory);
    memory += (count * sizeof(Type) + 63) / 64 * 64;
    return result;
  }

  size_t bytes() const {
    return rows_ * (dim_ * (sizeof(Activation) + sizeof(float)) + kChunkTokens * (sizeof(Activation) + sizeof(float)) +
                    (3 + kLanes) * sizeof(float)) +
           kGroupTokens * dim_ * sizeof(Element) + 12 * 64 +
           (turned_dim_ == 0
                ? 0
                : rows_ * turned_dim_ * sizeof(Activation) + kChunkTokens * (dim_ + turned_dim_) * sizeof(Element));
  }

  // Rows are ordered by position, so those that have reached a token are the last ones.
  size_t first_row_seeing(size_t token) const {
    return token <= item_.first_seen ? 0 : (token - item_.first_seen) * shared_;
  }

  // And those whose window has not left it behind are the first ones.
  size_t end_of_rows_seeing(size_t token) const {
    if (args_.window == 0) return rows_;
    const size_t end = token + args_.window;  // the first position that does not see the token
    const size_t count = end <= item_.first_seen ? 0 : end - item_.first_seen;
    return count < item_.count ? count * shared_ : rows_;
  }

  // The last and the first token that a row sees.
  size_t seen_by(size_t row) const { return item_.first_seen + row / shared_; }
  size_t seen_from(size_t row) const { return first_of_window(seen_by(row)); }

  size_t first_of_window(size_t position) const {
    return args_.window == 0 || position < args_.window ? 0 : position + 1 - args_.window;
  }

  size_t first_chunk(const AttentionItem& item) const { return first_of_window(item.first_seen) / kChunkTokens; }

  size_t head_of(size_t row) const { return item_.kv_head * shared_ + row % shared_; }

  size_t query_offset(size_t row) const {
    const size_t stride = args_.q_stride > 0 ? args_.q_stride : args_.num_heads * dim_;
    return (item_.first_row + row / shared_) * stride + head_of(row) * dim_;
  }

  // Groups before the window of an item have the place of the first one in it: what is read there is not used.
  Groups find_groups(const AttentionItem& item, size_t chunk) const {
    Groups groups;
    const size_t behind = first_of_window(item.first_seen) / kGroupTokens;
    const size_t in_a_block = args_.block_size / kGroupTokens;
    const size_t first = chunk * kChunkGroups;
    const int64_t* block = args_.block_tables + item.request * args_.table_width + first / in_a_block;
    size_t group = first % in_a_block;
    for (size_t token = chunk * kChunkTokens; groups.count < kChunkGroups && token <= item.last_seen();
         token += kGroupTokens) {
      const size_t index = groups.count++;
      if (token / kGroupTokens >= behind) {
        groups.offset[index] =
            group_offset(static_cast<size_t>(*block), group, item.kv_head, args_.block_size, args_.num_kv_heads, dim_);
        for (size_t i = index; i > 0 && token / kGroupTokens == behind; i--) groups.offset[i - 1] = groups.offset[i];
      }
      if (++group < in_a_block) continue;
      group = 0;
      block++;
    }
    return groups;
  }

  // The keys and values of a chunk, and the keys of the next one or of the first one of the item that follows; where it
  // has fewer groups, the last one again. The blocks they belong to lie anywhere, so they are prefetched while other
  // groups are read: the hardware cannot guess where.
  void look_up(const Groups& groups, const Groups& next) {
    num_groups_ = groups.count;
    for (size_t i = 0; i < groups.count; i++) {
      keys_[i] = static_cast<const Element*>(args_.key_cache) + groups.offset[i];
      values_[i] = turned_dim_ > 0 ? turn_over(groups.offset[i], i)
                                   : static_cast<const Element*>(args_.value_cache) + groups.offset[i];
    }
    const size_t last = next.count > 0 ? next.count - 1 : 0;
    for (size_t i = 0; i < kChunkGroups; i++) {
      const size_t at = i < last ? i : last;
      next_keys_[i] = static_cast<const Element*>(args_.key_cache) + next.offset[at];
    }
  }

  // Brings group i of latent keys into the order of values, which are returned, and their turned part into that of
  // keys.
  const Element* turn_over(size_t offset, size_t i) {
    constexpr bool kPairs = Operand<Element>::kInputs == 2;
    const Element* keys = static_cast<const Element*>(args_.key_cache) + offset;
    Element* values = latent_values_ + i * kGroupTokens * dim_;
    for (size_t dim = 0; dim < dim_; dim++) {
      for (size_t token = 0; token < kGroupTokens; token++) {
        values[value_offset(token, dim, kPairs)] = keys[key_offset(token, dim, kPairs)];
      }
    }
    const Element* turned = static_cast<const Element*>(args_.value_cache) + offset / dim_ * turned_dim_;
    Element* turned_keys = turned_keys_ + i * kGroupTokens * turned_dim_;
    for (size_t dim = 0; dim < turned_dim_; dim++) {
      for (size_t token = 0; token < kGroupTokens; token++) {
        turned_keys[key_offset(token, dim, kPairs)] = turned[value_offset(token, dim, kPairs)];
      }
    }
    turned_[i] = turned_keys;
    return values;
  }

  void load_queries() {
    for (size_t row = 0; row < rows_; row++) {
      if (turned_dim_ > 0) {
        const size_t at = (item_.first_row + row / shared_) * args_.turned_stride + head_of(row) * turned_dim_;
        to_activations(static_cast<const Element*>(args_.q_turned) + at, turned_dim_, q_turned_ + row * turned_dim_);
      }
      to_activations(static_cast<const Element*>(args_.q) + query_offset(row), dim_, q_ + row * dim_);
      max_[row] = -__builtin_inff();
    }
    __builtin_memset(total_, 0, rows_ * kLanes * sizeof(float));
    __builtin_memset(sums_, 0, rows_ * dim_ * sizeof(float));
  }

  void compute_scores() {
    Product<Element> product(end_row_ - first_row_, q_ + first_row_ * dim_, keys_, num_groups_, dim_,
                             scores_ + first_row_ * kChunkTokens);
    product.c_stride = kChunkTokens;
    product.c_panel = kPanelWidth;
    product.next = values_;
    multiply(product);
    if (turned_dim_ == 0) return;
    Product<Element> turned(end_row_ - first_row_, q_turned_ + first_row_ * turned_dim_, turned_, num_groups_,
                            turned_dim_, scores_ + first_row_ * kChunkTokens);
    turned.c_stride = kChunkTokens;
    turned.c_panel = kPanelWidth;
    turned.add_to_c = true;
    multiply(turned);
  }

  // Scales scores, caps them, and takes off what grows with the distance.
  void bend_scores(size_t chunk) {
    for (size_t row = first_row_; row < end_row_; row++) {
      const float slope = args_.slopes == nullptr ? 0.0f : args_.slopes[head_of(row)];
      for (size_t i = 0; i < num_groups_ * kGroupTokens; i += kLanes) {
        float* scores = scores_ + row * kChunkTokens + i;
        Floats value = load(scores) * broadcast(args_.scale);
        if (args_.cap > 0.0f) value = broadcast(args_.cap) * tanh(value / broadcast(args_.cap));
        const auto to_first = static_cast<ptrdiff_t>(seen_by(row)) - static_cast<ptrdiff_t>(chunk * kChunkTokens + i);
        const Floats distance = broadcast(static_cast<float>(to_first)) - lane_numbers();
        store(scores, value - broadcast(slope) * distance);
      }
    }
  }

  // Turns the scores of rows into weights relative to their largest scores so far, and rescales what is summed already.
  // Rows go through each part together, so that none waits for the sums and maxima over lanes of another.
  void soften(size_t chunk) {
    for (size_t row = first_row_; row < end_row_; row++) {
      const Seen seen = seen_in(chunk, row);
      if (seen.all()) {
        find_largest<true>(row, seen);
      } else {
        find_largest<false>(row, seen);
      }
    }
    for (size_t row = first_row_; row < end_row_; row += kLanes) {
      const size_t count = end_row_ - row;
      store_first(factor_ + row, exp2(load_first(factor_ + row, count)), count);
    }
    for (size_t row = first_row_; row < end_row_; row++) {
      const Seen seen = seen_in(chunk, row);
      if (seen.all()) {
        weigh<true>(row, seen);
      } else {
        weigh<false>(row, seen);
      }
      if (factor_[row] == 1.0f) continue;
      float* sums = sums_ + row * dim_;
      for (size_t i = 0; i < dim_; i += kLanes) store(sums + i, load(sums + i) * broadcast(factor_[row]));
    }
  }

  // Tokens of a chunk that a row sees.
  struct Seen {
    size_t first, end;

    bool all() const { return first == 0 && end == kChunkTokens; }
    Floats keep(Floats value, size_t at, float other) const {
      value = keep_first(value, end - at, other);
      return first > at ? keep_from(value, first - at, other) : value;
    }
  };

  Seen seen_in(size_t chunk, size_t row) const {
    const size_t begin = chunk * kChunkTokens;
    const size_t from = seen_from(row);
    const size_t end = seen_by(row) + 1 - begin;
    return {from > begin ? from - begin : 0, end < kChunkTokens ? end : kChunkTokens};
  }

  // Leaves the largest score of a row so far, and in `factor_` the exponent of what it makes of weights relative to the
  // largest before. Scores count in units of log 2, as weights are powers of two.
  template <bool kAll>
  void find_largest(size_t row, const Seen& seen) {
    const float* scores = scores_ + row * kChunkTokens;
    Floats largest = broadcast(-__builtin_inff());
#pragma GCC unroll 4
    for (size_t i = kAll ? 0 : seen.first / kLanes * kLanes; i < (kAll ? kChunkTokens : seen.end); i += kLanes) {
      Floats scaled = load(scores + i) * broadcast(scale_);
      if (!kAll) scaled = seen.keep(scaled, i, -__builtin_inff());
      largest = maximum(largest, scaled);
    }
    const float found = max_lane(largest);
    const float next = found > max_[row] ? found : max_[row];
    // A row of nothing but -inf so far: any finite reference makes all its weights zero.
    reference_[row] = next == -__builtin_inff() ? 0.0f : next;
    factor_[row] = max_[row] - reference_[row];
    max_[row] = next;
  }

  // Weights of a row; zero for tokens that it does not see of groups of which it sees others.
  template <bool kAll>
  void weigh(size_t row, const Seen& seen) {
    const float* scores = scores_ + row * kChunkTokens;
    Activation* weights = weights_ + row * kChunkTokens;
    const Floats reference = broadcast(reference_[row]);
    Floats sum = zeros();
#pragma GCC unroll 4
    for (size_t i = kAll ? 0 : seen.first / kLanes * kLanes; i < (kAll ? kChunkTokens : seen.end); i += kLanes) {
      Floats exponent = load(scores + i) * broadcast(scale_) - reference;  // not fused: the largest score gets zero
      if (!kAll) exponent = seen.keep(exponent, i, -__builtin_inff());
      store(weights + i, exp2(exponent));
      sum = sum + load(weights + i);
    }
    float* total = total_ + row * kLanes;
    store(total, multiply_add(load(total), broadcast(factor_[row]), sum));
  }

  void add_values(size_t chunk) {
    const size_t begin = chunk * kChunkTokens;
    if (seen_by(first_row_) + 1 >= begin + kChunkTokens && seen_from(end_row_ - 1) <= begin) {
      return add_groups(values_, kChunkGroups, 0, first_row_, end_row_);
    }
    for (size_t g = 0; g < num_groups_; g++) add_partly_seen_group(values_[g], begin + g * kGroupTokens, g);
  }

  // Adds a group that begins with `token` to the rows that see any of it.
  void add_partly_seen_group(const Element* values, size_t token, size_t g) {
    const size_t last_token = token + kGroupTokens - 1;
    size_t row = first_row_seeing(token) > first_row_ ? first_row_seeing(token) : first_row_;
    const size_t of_window = end_of_rows_seeing(last_token);
    const size_t end = of_window < end_row_ ? of_window : end_row_;
    if (row >= end) return;
    auto sees_all = [&](size_t first, size_t last) { return seen_by(first) >= last_token && seen_from(last) <= token; };
    // Weights of zero do not hide an infinity or NaN outside of what a row sees.
    if (!sees_all(row, end - 1) && !all_finite(values)) {
      for (; row < end; row++) {
        const size_t from = seen_from(row) > token ? seen_from(row) - token : 0;
        const Element* seen = sees_all(row, row) ? values : clean(values, from, seen_by(row) + 1 - token);
        add_groups(&seen, 1, g, row, row + 1);
      }
    }
    if (row < end) add_groups(&values, 1, g, row, end);
  }

  // Adds `count` groups of values, weighted by the columns from group `g` on, to the rows from `first` to `last`;
  // as many groups of the next keys are prefetched.
  void add_groups(const Element* const* groups, size_t count, size_t g, size_t first, size_t last) {
    const Element* panels[kChunkGroups * kPassPanels];
    const Element* next[kChunkGroups * kPassPanels];
    for (size_t dim = 0; dim < dim_; dim += kPassPanels * kPanelWidth) {
      const size_t left = (dim_ - dim) / kPanelWidth;
      const size_t width = left < kPassPanels ? left : kPassPanels;
      for (size_t i = 0; i < count; i++) {
        for (size_t p = 0; p < width; p++) {
          const size_t offset = (dim + p * kPanelWidth) * kGroupTokens;
          panels[i * width + p] = groups[i] + offset;
          next[i * width + p] = next_keys_[g + i] + offset;
        }
      }
      Product<Element> product(last - first, weights_ + first * kChunkTokens + g * kGroupTokens, panels, width,
                               kGroupTokens, sums_ + first * dim_ + dim);
      product.segments = count;
      product.a_stride = kChunkTokens;
      product.c_stride = dim_;
      product.c_panel = kPanelWidth;
      product.add_to_c = true;
      product.next = next;
      multiply(product);
    }
  }

  bool all_finite(const Element* values) const {
    // Zero times a number is zero or, for infinity and NaN, NaN.
    Floats product = zeros();
    for (size_t i = 0; i < kGroupTokens * dim_; i += kLanes) product = product + load(values + i) * zeros();
    const float sum = sum_lanes(product);
    return sum == sum;
  }

  // A copy of a group of values with zeros for all tokens but those from `first` to `end`.
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

  void store_result() {
    for (size_t row = 0; row < rows_; row++) {
      const float total = sum_lanes(load(total_ + row * kLanes));
      factor_[row] = total == 0.0f ? 1.0f : 1.0f / total;
    }
    const Passes passes = args_.y_passes.or_rows(args_.rows, args_.num_heads * dim_);
    const size_t width = shared_ * dim_;
    const size_t column = item_.kv_head * width;
    for (size_t position = 0; position < item_.count; position++) {
      const float* sums = sums_ + position * width;
      size_t row = position * shared_;
      size_t end_of_row = column + dim_;
      passes.for_runs(item_.first_row + position, column, column + width, [&](size_t begin, size_t end, size_t at) {
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

  static constexpr size_t kPassPanels = 8;  // of values in one product

  const AttentionArgs& args_;
  const AttentionItem& item_;
  const AttentionItem& following_;
  const size_t shared_, rows_, dim_;
  const size_t turned_dim_;            // 0: keys are no latents
  const bool bends_;                   // scores, before their softmax
  const float scale_;                  // of scores, in units of log 2
  Activation* q_;                      // [rows, dim]
  float* scores_;                      // [rows, kChunkTokens]
  Activation* weights_;                // [rows, kChunkTokens]
  float* sums_;                        // [rows, dim]
  float* max_;                         // [rows]
  float* total_;                       // [rows][16], of weights, added up in the end
  float* reference_;                   // [rows], what the weights of the chunk at hand are relative to
  float* factor_;                      // [rows], of what is summed already
  Element* cleaned_;                   // [kGroupTokens, dim]
  const Element* keys_[kChunkGroups];  // of the chunk at hand
  const Element* values_[kChunkGroups];
  const Element* next_keys_[kChunkGroups];
  // Of latents: turned queries [rows, turned_dim], and of the chunk at hand values and turned keys.
  Activation* q_turned_ = nullptr;
  Element *latent_values_ = nullptr, *turned_keys_ = nullptr;
  const Element* turned_[kChunkGroups];
  size_t num_groups_ = 0;
  size_t first_row_ = 0, end_row_ = 0;  // of those that see the chunk at hand
};

// The tiles of a request with the longest contexts come first, so that the threads end together, all heads of the same
// positions one after the other, as they lie in a block. Counts them only if `items` is null.
inline size_t list_items(const AttentionArgs& args, AttentionItem* items) {
  const size_t shared = args.num_heads / args.num_kv_heads;
  const size_t positions = shared >= kAttentionRows ? 1 : kAttentionRows / shared;
  size_t count = 0;
  size_t row = 0;
  for (size_t request = 0; request < args.batch; request++) {
    const size_t queries = static_cast<size_t>(args.query_lens[request]);
    const size_t before = static_cast<size_t>(args.context_lens[request]) - queries;
    for (size_t tiles = (queries + positions - 1) / positions; tiles > 0; tiles--) {
      const size_t at = (tiles - 1) * positions;
      for (size_t head = 0; head < args.num_kv_heads; head++, count++) {
        if (items == nullptr) continue;
        items[count] = {static_cast<uint32_t>(request), static_cast<uint32_t>(head), row + at, before + at,
                        queries - at < positions ? queries - at : positions};
      }
    }
    row += queries;
  }
  return count;
}

inline void attention(const AttentionArgs& args) {
  const size_t count = list_items(args, nullptr);
  auto* items = static_cast<AttentionItem*>(scratch(Scratch::kItems, count * sizeof(AttentionItem) + 1));
  list_items(args, items);
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    auto body = [&](size_t i) { AttentionTile<Element>(args, items[i], items[i + 1 < count ? i + 1 : i]).run(); };
    parallel_for(count, body);
  });
}

}  // namespace llm::LLM_ISA
