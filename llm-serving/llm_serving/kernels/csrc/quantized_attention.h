// A tile of attention over keys and values that are qvalues, as products of qvalues.
//
// scores   queries, rotated as keys are (rotation.h), quantized to 8 bits with a scale for each head
// (quantized_rows.h),
//          times qvalues of keys; exact sums, multiplied by both scales
// weights  of a chunk, relative to its largest, times the scales of values: quantized to unsigned 8 bits, of which 255
// is
//          the largest product, with an ordered dither; exact sums of their products with qvalues of values are added
//          to the sums so far
// So a chunk is read at half the bytes of bfloat16, and multiplied with half as many instructions.
#pragma once

#include "kv_layout.h"
#include "quantized_rows.h"

namespace llm::LLM_ISA {

// What is added to the quantized weights of a chunk before they are rounded to the nearest integer: -1/2 to 1/2, in
// bit-reversed order, an ordered dither (B. E. Bayer 1973, in one dimension). Without it, the many small weights beside
// a large one would all become zero; with it, their sum stays nearly the same.
struct Dither {
  alignas(64) float of_token[kChunkTokens];

  constexpr Dither() : of_token() {
    for (size_t token = 0; token < kChunkTokens; token++) {
      size_t reversed = 0;
      for (size_t bit = 1; bit < kChunkTokens; bit *= 2) reversed = 2 * reversed + (token & bit ? 1 : 0);
      of_token[token] = (static_cast<float>(reversed) + 0.5f) / kChunkTokens - 0.5f;
    }
  }
};
constexpr Dither kDither;

// The next `count` elements of scratch memory, aligned to a cache line.
template <class Type>
Type* take(char*& memory, size_t count) {
  Type* result = reinterpret_cast<Type*>(memory);
  memory += (count * sizeof(Type) + 63) / 64 * 64;
  return result;
}

class QuantizedTile {
 public:
  using Query = ActivationOf<KeyCode>;
  using Weight = ActivationOf<Code8>;

  static size_t bytes(size_t rows, size_t dim) {
    return rows * ((dim + kChunkTokens) * sizeof(Weight) + dim * sizeof(float) + 4 * sizeof(float)) +
           dim * sizeof(float) + 8 * 64;
  }

  QuantizedTile() = default;
  QuantizedTile(char*& memory, size_t rows, size_t dim) : rows_(rows), dim_(dim) {
    q_ = take<Query>(memory, rows * dim);
    q_scale_ = take<float>(memory, rows);
    q_offset_ = take<int32_t>(memory, rows);
    weights_ = take<Weight>(memory, rows * kChunkTokens);
    sums_ = take<float>(memory, rows * dim);
    largest_ = take<float>(memory, rows);
    share_ = take<float>(memory, rows);
    rotated_ = take<float>(memory, dim);
  }

  template <class Element>
  void load_query(size_t row, const Element* q) {
    rotate_row(q, dim_, rotated_);
    const Floats factor = broadcast(code_factor(largest_bits(rotated_, dim_), &q_scale_[row]));
    const bool is_finite = q_scale_[row] == q_scale_[row];
    Query* qvalues = q_ + row * dim_;
    NativeInt sums[kParts] = {};
    for (size_t i = 0; i < dim_; i += kLanes) {
      const Floats value = is_finite ? load(rotated_ + i) * factor : zeros();
      store_qvalues(qvalues + i, value, 0);
      // The qvalue before its rounding to 8 bits: the low bits of a number above 1.5 * 2^23.
      LLM_FOR_PARTS sums[i] += (NativeInt)(value.part[i] + 12582912.0f) - 0x4b400000;
    }
    int32_t sum = 0;
    LLM_FOR_PARTS {
      for (size_t j = 0; j < kNative; j++) sum += sums[i][j];
    }
    q_offset_[row] = Operand<KeyCode>::kOffset * sum;
    q_scale_[row] /= static_cast<float>(rotation_block(dim_));  // a power of two: exact
  }

  // Collects pointers to the `count` groups of a chunk, and to those of the next one, which are prefetched.
  void gather_blocks(const void* keys, const void* values, const size_t* groups, size_t count, const size_t* next,
                     size_t next_count) {
    constexpr int kLocality = kFirstLevelIsNarrow ? 2 : 3;
    const size_t size = kGroupTokens * dim_;
    num_groups_ = count;
    for (size_t i = 0; i < kChunkGroups; i++) {
      const size_t at = i < next_count ? i : next_count > 0 ? next_count - 1 : 0;
      const auto* next_keys = static_cast<const Code8*>(keys) + next[at];
      next_keys_[i] = next_keys;
      __builtin_prefetch(next_keys + size, 0, kLocality);
      __builtin_prefetch(static_cast<const Code8*>(values) + next[at] + size, 0, kLocality);
    }
    for (size_t i = 0; i < count; i++) {
      keys_[i] = static_cast<const KeyCode*>(keys) + groups[i];
      values_[i] = static_cast<const Code8*>(values) + groups[i];
      values_after_[i] = static_cast<const KeyCode*>(values) + groups[i];
      __builtin_memcpy(key_scales_ + i * kGroupTokens, keys_[i] + size, kGroupTokens * kScaleBytes);
      __builtin_memcpy(value_scales_ + i * kGroupTokens, values_[i] + size, kGroupTokens * kScaleBytes);
    }
  }

  // Computes sums of products of the rows from `first` to `end` and keys, [rows, kChunkTokens].
  void compute_scores(size_t first, size_t end, float* scores) {
    Product<KeyCode> product(end - first, q_ + first * dim_, keys_, num_groups_, dim_, scores + first * kChunkTokens);
    product.c_stride = kChunkTokens;
    product.c_panel = kPanelWidth;
    product.next = values_after_;
    multiply(product);
  }

  // Turns sixteen integer sums of a row, from token `i` of the chunk on, into scores without the scale of the query:
  // multiplies them by the scales of the keys, stores and returns them.
  Floats finish_scores(size_t row, size_t i, float* scores) const {
    const Floats result = integers(scores, q_offset_[row]) * load(key_scales_ + i);
    store(scores, result);
    return result;
  }

  float query_scale(size_t row) const { return q_scale_[row]; }

  // Sets the largest scores of at most sixteen rows in the current chunk, and the references of their weights; called
  // before weights are computed.
  void set_largest(size_t row, size_t count, Floats of_chunk, Floats reference) {
    store_first(largest_ + row, zero_if_minus_infinity(of_chunk), count);
    store_first(share_ + row, exp2(of_chunk - reference), count);
  }

  // Called before the weights of rows that see the same tokens; `keep(value, i, other)` keeps the visible lanes from
  // token i on and sets the others to `other`.
  template <class Keep>
  void see(Keep keep) {
    for (size_t i = 0; i < kChunkTokens; i += kLanes) {
      store(seen_ + i, i < num_groups_ * kGroupTokens ? keep(load(value_scales_ + i), i, 0.0f) : zeros());
    }
    has_nan_ = largest_bits(seen_, kChunkTokens) > 0x7f800000;
  }

  // Computes the weights of a row from its scores of the current chunk, which are in units of log 2 after `scale`.
  // `total`, the sum of the weights so far, is multiplied by `factor` first.
  template <class Keep>
  void weigh(size_t row, const float* scores, float scale, Keep keep, float factor, float* total) {
    const Floats largest = broadcast(largest_[row]);
    Floats sum = zeros(), most = zeros(), scaled[kChunkTokens / kLanes];
#pragma GCC unroll 4
    for (size_t i = 0; i < kChunkTokens; i += kLanes) {
      const Floats exponent = load(scores + i) * broadcast(scale) - largest;  // not fused: the largest gets zero
      const Floats weight = coarse_exp2(keep(exponent, i, -__builtin_inff()));
      scaled[i / kLanes] = weight * load(seen_ + i);
      most = maximum(most, scaled[i / kLanes]);
      sum = sum + weight;
    }
    const float unit = (has_nan_ ? __builtin_nanf("") : max_lane(most)) / kMaxWeight;
    const Floats per_unit = broadcast(unit < kSmallest ? 0.0f : 1.0f / unit);
#pragma GCC unroll 4
    for (size_t i = 0; i < kChunkTokens; i += kLanes) {
      scaled[i / kLanes] = keep(multiply_add(scaled[i / kLanes], per_unit, load(kDither.of_token + i)), i, 0.0f);
    }
    // All stores come last: a byte that is stored could be a part of the scores, so they would be loaded again.
    Weight* weights = weights_ + row * kChunkTokens;
#pragma GCC unroll 4
    for (size_t i = 0; i < kChunkTokens; i += kLanes) store_unsigned_qvalues(weights + i, scaled[i / kLanes]);
    store(total, multiply_add(load(total), broadcast(factor), sum * broadcast(share_[row])));
    share_[row] *= unit;
  }

  // Adds the weighted values to the `sums` [rows, dim] of rows from `first` to `end`, which are multiplied by
  // factor[row] first. The keys of the next chunk are prefetched.
  void add_values(size_t first, size_t end, const float* factor, float* sums) {
    const Code8* panels[kChunkGroups * kPassPanels];
    const Code8* next[kChunkGroups * kPassPanels];
    for (size_t dim = 0; dim < dim_; dim += kPassPanels * kPanelWidth) {
      const size_t left = (dim_ - dim) / kPanelWidth;
      const size_t width = left < kPassPanels ? left : kPassPanels;
      for (size_t i = 0; i < num_groups_; i++) {
        for (size_t p = 0; p < width; p++) {
          const size_t offset = (dim + p * kPanelWidth) * kGroupTokens;
          panels[i * width + p] = values_[i] + offset;
          next[i * width + p] = next_keys_[i] + offset;
        }
      }
      Product<Code8> product(end - first, weights_ + first * kChunkTokens, panels, width, kGroupTokens,
                             sums_ + first * dim_ + dim);
      product.segments = num_groups_;
      product.a_stride = kChunkTokens;
      product.c_stride = dim_;
      product.c_panel = kPanelWidth;
      product.next = next;
      multiply(product);
    }
    for (size_t row = first; row < end; row++) {
      const float* found = sums_ + row * dim_;
      const Floats step = broadcast(share_[row]), before = broadcast(factor[row]);
      for (size_t i = 0; i < dim_; i += kLanes) {
        float* target = sums + row * dim_ + i;
        store(target, multiply_add(load(target), before, integers(found + i, 0) * step));
      }
    }
  }

 private:
  static constexpr size_t kPassPanels = 8;  // panels of values in one product
  static constexpr float kMaxWeight = 255.0f;
  static constexpr float kSmallest = 0x1p-126f;  // normal number

  // Sixteen exact sums minus an offset.
  static LLM_INLINE Floats integers(const float* sums, int32_t offset) {
    Floats result;
    LLM_FOR_PARTS {
      NativeInt sum;
      __builtin_memcpy(&sum, sums + i * kNative, sizeof(sum));
      result.part[i] = __builtin_convertvector(sum - offset, NativeFloat);
    }
    return result;
  }

  size_t rows_ = 0, dim_ = 0;
  Query* q_ = nullptr;           // [rows, dim]
  float* q_scale_ = nullptr;     // [rows]
  int32_t* q_offset_ = nullptr;  // [rows], added by products with keys
  Weight* weights_ = nullptr;    // [rows, 2, kChunkTokens], high bytes and low ones
  float* sums_ = nullptr;        // [rows, 2, dim], 32-bit integers with another type
  float* largest_ = nullptr;     // [rows], largest score of the current chunk
  float* share_ = nullptr;       // [rows], its weights relative to the reference; then the factor of its sums
  float* rotated_ = nullptr;     // [dim], a query
  // Groups of the current chunk.
  size_t num_groups_ = 0;
  const KeyCode* keys_[kChunkGroups];
  const Code8* values_[kChunkGroups];
  const KeyCode* values_after_[kChunkGroups];  // groups to be prefetched
  const Code8* next_keys_[kChunkGroups];
  bool has_nan_ = false;  // whether a scale of a visible value is NaN
  alignas(64) float key_scales_[kChunkTokens];
  alignas(64) float value_scales_[kChunkTokens];
  alignas(64) float seen_[kChunkTokens];  // scales of visible values, others zero
};

}  // namespace llm::LLM_ISA
