// A tile of attention over keys and values that are qvalues, as products of qvalues.
//
// scores   queries, rotated as keys are (rotation.h), quantized to 8 bits with a scale for each head
//          (quantized_rows.h), times qvalues of keys; exact sums, multiplied by both scales
// weights  of a chunk, times the scales of values, relative to the largest of these products: quantized to unsigned 8
//          bits, of which 255 is the largest, with an ordered dither; exact sums of their products with qvalues of
//          values are added to the sums so far
// The scale of a value is a term of the exponent of its weight: the logarithm of the scale is added to the score. The
// sum of the weights is that of the products divided by the scales.
// So a chunk is read at half the bytes of bfloat16, and multiplied with half as many instructions.
#pragma once

#include "attention_weights.h"
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

// Exponents are in this unit, which is that of the bits of a float32: its exponent, followed by its fraction.
constexpr float kExponentUnit = 0x1p23f;

// The tokens of a chunk that a row sees. Scales of other tokens are zero.
struct alignas(64) VisibleTokens {
  float key_scale[kChunkTokens];
  float exponent[kChunkTokens];    // logarithm of the scale of the value; -infinity for others
  float added[kChunkTokens];       // to scores: the same; zero if scores are modified first
  float reciprocal[kChunkTokens];  // of the scale of the value; zero for others
  float nan;                       // zero; NaN if a scale is NaN
};

// Constants of `QValueWeigher`. They are read from memory, because tiles have no registers left.
struct WeigherConstants {
  int32_t fraction = 0x7fffff, one = 0x3f800000, smallest = -126 * (1 << 23);
  // kMaxWeight * 2^(x-1) for x from 1 to 2 within 2^-13.5 of its magnitude, exactly kMaxWeight for 1.
  float cubic = 19.6521011f, square = -0.906829318f, linear = 120.11213f, constant = 116.142598f;
};
constexpr WeigherConstants kWeigherConstants;
constexpr float kMaxWeight = 255.0f;

// Computes weights from exponents.
struct QValueWeigher {
  using Weight = ActivationOf<Code8>;

  const VisibleTokens* const* visible;  // [rows]
  const float* exponents;               // [rows, kChunkTokens]
  const float* largest;                 // [rows], largest exponent
  const float* share;                   // [rows], factor of the sum of the weights
  const float* factor;                  // [rows], factor of earlier sums
  float* total;                         // [rows][16], sums of weights so far
  Weight* weights;                      // [rows, kChunkTokens]

  LLM_INLINE void weigh(size_t row) const {
    const VisibleTokens& tokens = *visible[row];
    const Floats of_row = broadcast(largest[row]);
    const WeigherConstants* constants = &kWeigherConstants;
    asm volatile("" : "+r"(constants));  // hides their values, so that gcc does not keep all of them in registers
    const NativeInt fraction = NativeInt{} + constants->fraction;
    Floats sum = broadcast(tokens.nan), rounded[kChunkTokens / kLanes];
#pragma GCC unroll 4
    for (size_t token = 0; token < kChunkTokens; token += kLanes) {
      asm volatile("" : "+r"(constants));
      Floats weight = load(exponents + row * kChunkTokens + token) - of_row;
      LLM_FOR_PARTS weight.part[i] = weight_of(weight.part[i], fraction, *constants);
      sum = multiply_add(weight, load(tokens.reciprocal + token), sum);
      rounded[token / kLanes] = weight + load(kDither.of_token + token);
    }
    store_unsigned_qvalues(weights + row * kChunkTokens, rounded);
    float* target = total + row * kLanes;
    store(target, multiply_add(load(target), broadcast(factor[row]), sum * broadcast(share[row])));
  }

  // For x of at most zero: kMaxWeight * 2^x within 2^-13.5 of its magnitude, exactly kMaxWeight for zero; below 2^-126
  // as 2^-126; for NaN a small number.
  static LLM_INLINE NativeFloat weight_of(NativeFloat x, NativeInt fraction, const WeigherConstants& constants) {
    NativeInt bits = __builtin_convertvector(x, NativeInt);
#if defined(__AVX512F__)
    constexpr int kAndOr = 0xea;
    bits = (NativeInt)_mm512_max_epi32((__m512i)bits, _mm512_set1_epi32(constants.smallest));
    const auto whole = (NativeInt)_mm512_andnot_si512((__m512i)fraction, (__m512i)bits);
    const auto m = (NativeFloat)_mm512_ternarylogic_epi32((__m512i)bits, (__m512i)fraction,
                                                          _mm512_set1_epi32(constants.one), kAndOr);
#else
    bits = bits > constants.smallest ? bits : NativeInt{} + constants.smallest;
    const NativeInt whole = bits & ~fraction;
    const auto m = (NativeFloat)((bits & fraction) | constants.one);
#endif
    NativeFloat p = native_broadcast(constants.cubic);
    p = native_multiply_add(p, m, native_broadcast(constants.square));
    p = native_multiply_add(p, m, native_broadcast(constants.linear));
    p = native_multiply_add(p, m, native_broadcast(constants.constant));
    return (NativeFloat)((NativeInt)p + whole);
  }
};

// Converts the sums of products with keys to exponents of weights: multiplies them by the scales of key and query, and
// adds the logarithm of the value's scale. Finds the largest exponents in each lane.
template <>
constexpr bool kHasEnding<KeyCode> = true;
template <>
struct Ending<KeyCode> {
  const int32_t* offset;                // [rows], is subtracted from sums
  const float* scale;                   // [rows]
  const VisibleTokens* const* visible;  // [rows]
  float* exponents;                     // [rows, kChunkTokens]
  float* largest;                       // [rows][16]

  LLM_INLINE void before_tile(size_t) const {}
  LLM_INLINE void between(size_t, size_t) const {}
  LLM_INLINE Floats begin(size_t row, size_t) const { return broadcast_sum(-offset[row]); }

  template <size_t kPanels>
  LLM_INLINE void end(size_t row, size_t panel, const Floats (&sums)[kPanels]) const {
    const VisibleTokens& tokens = *visible[row];
    const Floats of_row = broadcast(scale[row]);
    Floats most = panel == 0 ? broadcast(-__builtin_inff()) : load(largest + row * kLanes);
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      const size_t token = (panel + p) * kPanelWidth;
      const Floats score = to_numbers(sums[p]) * load(tokens.key_scale + token);
      const Floats exponent = multiply_add(score, of_row, load(tokens.added + token));
      store(exponents + row * kChunkTokens + token, exponent);
      most = maximum(most, exponent);
    }
    store(largest + row * kLanes, most);
  }
};

// Adds the sums of products with values, times the factor of their weights, to the sums of earlier chunks. Weights are
// computed while earlier rows are multiplied: conversions and additions hardly delay products.
template <>
constexpr bool kHasEnding<ValueCode> = true;
template <>
struct Ending<ValueCode> : WeighedRows<QValueWeigher> {
  const float* share;   // [rows]
  const float* factor;  // [rows], factor of earlier chunks
  float* sums;          // [rows, dim]
  size_t dim;

  LLM_INLINE Floats begin(size_t, size_t) const { return zeros(); }

  template <size_t kPanels>
  LLM_INLINE void end(size_t row, size_t panel, const Floats (&found)[kPanels]) const {
    const Floats of_chunk = broadcast(share[row]), of_earlier = broadcast(factor[row]);
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; p++) {
      float* target = sums + row * dim + (panel + p) * kPanelWidth;
      store(target, multiply_add(load(target), of_earlier, to_numbers(found[p]) * of_chunk));
    }
  }
};

class QuantizedTile {
 public:
  using Query = ActivationOf<KeyCode>;
  using Weight = ActivationOf<Code8>;

  static size_t bytes(size_t rows, size_t dim) {
    return rows * ((dim + kChunkTokens) * sizeof(Weight) + 5 * sizeof(float) + sizeof(VisibleTokens) + sizeof(void*)) +
           dim * sizeof(float) + 10 * 64;
  }

  QuantizedTile() = default;
  QuantizedTile(char*& memory, size_t rows, size_t dim) : dim_(dim) {
    q_ = take<Query>(memory, rows * dim);
    q_scale_ = take<float>(memory, rows);
    q_offset_ = take<int32_t>(memory, rows);
    weights_ = take<Weight>(memory, rows * kChunkTokens);
    score_scale_ = take<float>(memory, rows);
    largest_ = take<float>(memory, rows);
    share_ = take<float>(memory, rows);
    rotated_ = take<float>(memory, dim);
    sets_ = take<VisibleTokens>(memory, rows);
    visible_ = take<const VisibleTokens*>(memory, rows);
  }

  // `scale`: the factor of scores, in units of log 2 unless scores are modified.
  template <class Element>
  void load_query(size_t row, const Element* q, float scale, bool has_score_mod) {
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
    const float of_scores = q_scale_[row] * scale * (has_score_mod ? 1.0f : kExponentUnit);
    score_scale_[row] = of_scores + (of_scores - of_scores);  // NaN if it overflows
  }

  // Collects pointers to the `count` groups of a chunk, and to those of the next one, which are prefetched.
  void gather_blocks(const void* keys, const void* values, const size_t* groups, size_t count, const size_t* next,
                     size_t next_count) {
    constexpr int kLocality = kFirstLevelIsNarrow ? 2 : 3;
    const size_t size = kGroupTokens * dim_;
    num_groups_ = count;
    num_sets_ = 0;
    for (size_t i = 0; i < kChunkGroups; i++) {
      const size_t at = i < next_count ? i : next_count > 0 ? next_count - 1 : 0;
      const auto* next_keys = static_cast<const ValueCode*>(keys) + next[at];
      next_keys_[i] = next_keys;
      __builtin_prefetch(next_keys + size, 0, kLocality);
      __builtin_prefetch(static_cast<const ValueCode*>(values) + next[at] + size, 0, kLocality);
    }
    for (size_t i = 0; i < count; i++) {
      keys_[i] = static_cast<const KeyCode*>(keys) + groups[i];
      values_[i] = static_cast<const ValueCode*>(values) + groups[i];
      values_after_[i] = static_cast<const KeyCode*>(values) + groups[i];
      __builtin_memcpy(key_scales_ + i * kGroupTokens, keys_[i] + size, kGroupTokens * kScaleBytes);
      __builtin_memcpy(value_scales_ + i * kGroupTokens, values_[i] + size, kGroupTokens * kScaleBytes);
    }
  }

  // Records that the rows from `first` to `end` see the tokens from `first_token` to `end_token` of the chunk; called
  // for all rows before their scores are computed.
  void see(size_t first, size_t end, size_t first_token, size_t end_token, bool has_score_mod) {
    if (num_sets_ == 0 || first_token != first_token_ || end_token != end_token_) {
      first_token_ = first_token;
      end_token_ = end_token;
      VisibleTokens& tokens = sets_[num_sets_++];
      const bool is_whole = num_groups_ == kChunkGroups && first_token == 0 && end_token == kChunkTokens;
      is_whole ? find_visible<true>(tokens, has_score_mod) : find_visible<false>(tokens, has_score_mod);
    }
    for (size_t row = first; row < end; row++) visible_[row] = &sets_[num_sets_ - 1];
  }

  // Computes the exponents of the weights of the rows from `first` to `end`, [rows, kChunkTokens], or scores that are
  // still to be modified, and finds the largest of them in each lane, [rows][16].
  void compute_scores(size_t first, size_t end, float* exponents, float* largest) {
    for (size_t row = first; row < end && num_groups_ < kChunkGroups; row++) {
      for (size_t i = num_groups_ * kGroupTokens; i < kChunkTokens; i += kLanes) {
        store(exponents + row * kChunkTokens + i, broadcast(-__builtin_inff()));
      }
    }
    Product<KeyCode> product(end - first, q_ + first * dim_, keys_, num_groups_, dim_, nullptr);
    product.next = values_after_;
    const Ending<KeyCode> ending = {q_offset_ + first, score_scale_ + first, visible_ + first,
                                    exponents + first * kChunkTokens, largest + first * kLanes};
    product.ending = &ending;
    multiply(product);
  }

  // Converts modified scores of a row to exponents of its weights, and returns the largest exponents in each lane.
  Floats finish_scores(size_t row, float* scores) const {
    const Floats scale = broadcast(1.44269504f * kExponentUnit);
    Floats most = broadcast(-__builtin_inff());
    for (size_t i = 0; i < num_groups_ * kGroupTokens; i += kLanes) {
      const Floats exponent = multiply_add(load(scores + i), scale, load(visible_[row]->exponent + i));
      store(scores + i, exponent);
      most = maximum(most, exponent);
    }
    return most;
  }

  // Sets the largest exponents of at most sixteen rows in the current chunk, in units of log 2, and the references of
  // their sums.
  void set_largest(size_t row, size_t count, Floats of_chunk, Floats reference) {
    store_first(largest_ + row, zero_if_minus_infinity(of_chunk) * broadcast(kExponentUnit), count);
    store_first(share_ + row, exp2(of_chunk - reference) * broadcast(1.0f / kMaxWeight), count);
  }

  // Computes the weights of the rows from `first` to `end` from their exponents, and adds them and the weighted values
  // to the totals [rows][16] and sums [rows, dim], which are multiplied by factor[row] first. The keys of the next
  // chunk are prefetched.
  void add_values(size_t first, size_t end, const float* exponents, const float* factor, const AttentionSums& result) {
    const size_t rows = end - first;
    size_t weighed = 0;
    const QValueWeigher weigher = {visible_ + first,
                                   exponents + first * kChunkTokens,
                                   largest_ + first,
                                   share_ + first,
                                   factor + first,
                                   result.total + first * kLanes,
                                   weights_ + first * kChunkTokens};
    const WeighedRows<QValueWeigher> in_turn = {weigher, &weighed, rows};
    if (kNative < kLanes) in_turn.weigh_until(rows);
    const ValueCode* panels[kChunkGroups * kPassPanels];
    const ValueCode* next[kChunkGroups * kPassPanels];
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
      Product<ValueCode> product(rows, weights_ + first * kChunkTokens, panels, width, kGroupTokens, nullptr);
      product.segments = num_groups_;
      product.a_stride = kChunkTokens;
      product.next = next;
      const Ending<ValueCode> ending = {in_turn, share_ + first, factor + first, result.sums + first * dim_ + dim,
                                        dim_};
      product.ending = &ending;
      multiply(product);
    }
  }

 private:
  static constexpr size_t kPassPanels = 8;  // panels of values in one product
  // Smallest scale of a value, relative to the largest one of a row and chunk, and in all. Smaller ones, such as that
  // of a value of zeros, count as these, so that weights divided by scales are finite.
  static constexpr float kSmallestShare = 0x1p-96f, kSmallestScale = 0x1p-110f;

  // For positive numbers, log2(x) in exponent units within 2^-15.9 * kExponentUnit.
  static LLM_INLINE Floats exponent_of(Floats x) {
    LLM_FOR_PARTS {
      const NativeInt bits = (NativeInt)x.part[i];
      const NativeFloat whole = __builtin_convertvector((bits >> 23) - 127, NativeFloat);
      const NativeFloat r = (NativeFloat)((bits & 0x7fffff) | 0x3f800000) - native_broadcast(1.0f);
      NativeFloat p = native_broadcast(0.0451505648f);
      p = native_multiply_add(p, r, native_broadcast(-0.193579187f));
      p = native_multiply_add(p, r, native_broadcast(0.415608682f));
      p = native_multiply_add(p, r, native_broadcast(-0.709097138f));
      p = native_multiply_add(p, r, native_broadcast(1.44191708f));
      x.part[i] = native_multiply_add(p, r, whole) * native_broadcast(kExponentUnit);
    }
    return x;
  }

  template <bool kIsWhole>
  void find_visible(VisibleTokens& tokens, bool has_score_mod) const {
    auto keep = [&](Floats value, size_t at, float other) {
      if (kIsWhole) return value;
      if (at >= num_groups_ * kGroupTokens || at >= end_token_) return broadcast(other);
      value = keep_first(value, end_token_ - at, other);
      return first_token_ > at ? keep_from(value, first_token_ - at, other) : value;
    };
    Floats nan = zeros(), most = zeros(), scales[kChunkTokens / kLanes];
#pragma GCC unroll 4
    for (size_t i = 0; i < kChunkTokens; i += kLanes) {
      const Floats of_key = keep(load(key_scales_ + i), i, 0.0f), of_value = keep(load(value_scales_ + i), i, 0.0f);
      store(tokens.key_scale + i, of_key);
      scales[i / kLanes] = of_value;
      nan = nan + (of_key - of_key) + (of_value - of_value);
      most = maximum(of_value, most);
    }
    tokens.nan = sum_lanes(nan);
    const float share = max_lane(most) * kSmallestShare;
    const Floats smallest = broadcast(share > kSmallestScale ? share : kSmallestScale);
#pragma GCC unroll 4
    for (size_t i = 0; i < kChunkTokens; i += kLanes) {
      const Floats scale = maximum(scales[i / kLanes], smallest);
      const Floats exponent = keep(exponent_of(scale), i, -__builtin_inff());
      store(tokens.exponent + i, exponent);
      store(tokens.added + i, has_score_mod ? zeros() : exponent);
      store(tokens.reciprocal + i, keep(broadcast(1.0f) / scale, i, 0.0f));
    }
  }

  size_t dim_ = 0;
  Query* q_ = nullptr;                       // [rows, dim]
  float* q_scale_ = nullptr;                 // [rows]
  int32_t* q_offset_ = nullptr;              // [rows], added by products with keys
  Weight* weights_ = nullptr;                // [rows, kChunkTokens]
  float* score_scale_ = nullptr;             // [rows], factor of scores, in exponent units unless they are modified
  float* largest_ = nullptr;                 // [rows], largest exponent of the current chunk
  float* share_ = nullptr;                   // [rows], its weight relative to the reference, divided by kMaxWeight
  float* rotated_ = nullptr;                 // [dim], a query
  VisibleTokens* sets_ = nullptr;            // of the current chunk; rows that see the same tokens share one
  const VisibleTokens** visible_ = nullptr;  // [rows]
  // Groups of the current chunk.
  size_t num_groups_ = 0, num_sets_ = 0;
  size_t first_token_ = 0, end_token_ = 0;  // of the last set
  const KeyCode* keys_[kChunkGroups];
  const ValueCode* values_[kChunkGroups];
  const KeyCode* values_after_[kChunkGroups];  // groups to be prefetched
  const ValueCode* next_keys_[kChunkGroups];
  alignas(64) float key_scales_[kChunkTokens];
  alignas(64) float value_scales_[kChunkTokens];
};

}  // namespace llm::LLM_ISA
