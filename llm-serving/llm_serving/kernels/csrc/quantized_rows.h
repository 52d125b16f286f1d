// Rows quantized to 8 bits with a scale each, to be multiplied by weights of qvalues.
//
// scale = largest magnitude / 127; qvalue = x * (127 / largest), rounded to the nearest even integer
// A row with infinity or NaN has qvalues of zero and a scale of NaN. The bits are those of `row_qvalues` in
// tests/support/kernels/quantized_products.py on every instruction set.
#pragma once

#include "linear.h"
#include "qvalues.h"
#include "rotation.h"

namespace llm::LLM_ISA {

// Rows without a larger number count as zeros, so that 127 / largest cannot overflow.
constexpr float kMinLargest = 0x1p-100f;

// Rows as qvalues and their scales [rows], for a weight of qvalues of type `Code`: activations are the qvalues plus
// Operand<Code>::kOffset.
template <class Code>
struct QuantizedRows : Activations<Code> {
  const float* scale;
};

// The largest of the lanes.
LLM_INLINE uint32_t largest_lane(const NativeInt (&lanes)[kParts]) {
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_reduce_max_epi32((__m512i)lanes[0]));
#else
  uint32_t result = 0;
  for (size_t p = 0; p < kParts; p++) {
    for (size_t j = 0; j < kNative; j++) {
      const uint32_t bits = static_cast<uint32_t>(lanes[p][j]);
      result = bits > result ? bits : result;
    }
  }
  return result;
#endif
}

// Returns the bits of the largest magnitude among `count` numbers, as float32; NaN is larger than all numbers.
template <class Element>
LLM_INLINE uint32_t largest_bits(const Element* x, size_t count) {
  NativeInt largest[kParts] = {};
  size_t i = 0;
  if constexpr (sizeof(Element) == 2) {
    // Magnitudes of two-byte types are ordered like their bits, so they are compared without conversion to float32.
    typedef int16_t Halves __attribute__((vector_size(kNative * 4)));
    Halves halves[kParts] = {};
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      for (size_t p = 0; p < kParts; p++) {
        Halves magnitude;
        __builtin_memcpy(&magnitude, x + i + 2 * kNative * p, sizeof(magnitude));
        magnitude &= 0x7fff;
        halves[p] = magnitude > halves[p] ? magnitude : halves[p];
      }
    }
    for (size_t p = 0; p < kParts; p++) {
      const NativeInt low = (NativeInt)halves[p] & 0xffff, high = (NativeInt)halves[p] >> 16;
      largest[p] = low > high ? low : high;
    }
    const auto bits = static_cast<uint16_t>(largest_lane(largest));
    Element lanes[kLanes];  // all alike: reading sixteen is faster than reading one
    for (Element& lane : lanes) __builtin_memcpy(&lane, &bits, sizeof(bits));
    LLM_FOR_PARTS largest[i] = (NativeInt)load(lanes).part[i];
  }
  for (; i < count; i += kLanes) {
    const Floats value = load_first(x + i, count - i);
    for (size_t p = 0; p < kParts; p++) {
      const NativeInt magnitude = (NativeInt)value.part[p] & 0x7fffffff;
      largest[p] = magnitude > largest[p] ? magnitude : largest[p];
    }
  }
  return largest_lane(largest);
}

// Returns the factor from a row to its qvalues; sets `scale` to the factor from qvalues to the row.
LLM_INLINE float code_factor(uint32_t largest_bits, float* scale) {
  constexpr uint32_t kInfinity = 0x7f800000;
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof(largest));
  const bool is_finite = largest_bits < kInfinity;
  const bool is_zero = is_finite && largest < kMinLargest;
  *scale = is_zero ? 0.0f : is_finite ? largest / 127.0f : __builtin_nanf("");
  return is_zero || !is_finite ? 0.0f : 127.0f / largest;
}

// Stores sixteen qvalues plus an offset.
LLM_INLINE void store_qvalues(uint8_t* target, Floats value, int32_t offset) {
  typedef uint8_t NativeByte __attribute__((vector_size(kNative)));
  // Adding 1.5 * 2^23 rounds to an integer in the low bits of the sum.
  const Floats rounded = value + broadcast(12582912.0f);
  LLM_FOR_PARTS {
    const NativeByte qvalues = __builtin_convertvector(((NativeUint)rounded.part[i] + offset) & 0xff, NativeByte);
    __builtin_memcpy(target + i * kNative, &qvalues, sizeof(qvalues));
  }
}

LLM_INLINE void store_qvalues(int8_t* target, Floats value, int32_t offset) {
  store_qvalues(reinterpret_cast<uint8_t*>(target), value, offset);
}

LLM_INLINE void store_qvalues(int16_t* target, Floats value, int32_t offset) {
  alignas(kLanes) int8_t bytes[kLanes];
  store_qvalues(bytes, value, offset);
  store_in_16_bits(bytes, target);
}

// Rounds sixteen numbers from 0 to 255, and stores them as unsigned bytes.
LLM_INLINE void store_unsigned_qvalues(uint8_t* target, Floats value) { store_qvalues(target, value, 0); }

LLM_INLINE void store_unsigned_qvalues(int16_t* target, Floats value) {
  alignas(kLanes) uint8_t bytes[kLanes];
  store_qvalues(bytes, value, 0);
  store_in_16_bits(bytes, target);
}

// The same for 64 numbers.
template <class Activation>
LLM_INLINE void store_unsigned_qvalues(Activation* target, const Floats (&values)[4]) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(Activation) == 1) {
    auto pair = [&](size_t i) {
      return _mm512_packus_epi32(_mm512_cvtps_epi32(values[i].part[0]), _mm512_cvtps_epi32(values[i + 1].part[0]));
    };
    // Each 128 bits have four of each sixteen numbers.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(pair(0), pair(2)));
    return __builtin_memcpy(target, &bytes, sizeof(bytes)), void();
  }
#endif
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; i++) store_unsigned_qvalues(target + i * kLanes, values[i]);
}

// Computes the qvalues of `count` numbers of a row, plus an offset; for a row with infinity or NaN those of zero. In 16
// bits, the last inputs are filled up with zeros to four.
template <class Element, class Activation>
LLM_INLINE void encode(const Element* x, size_t count, Floats factor, bool is_finite, int32_t offset,
                       Activation* qvalues) {
  const size_t stored = TiledLayout::padded(count, kStoredTogether<Activation>);
  if (!is_finite) {
    for (size_t i = 0; i < stored; i++) qvalues[i] = static_cast<Activation>(offset);
    return;
  }
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_qvalues(qvalues + i, load(x + i) * factor, offset);
  if (i == count) return;
  alignas(16) Activation sixteen[kLanes];
  store_qvalues(sixteen, load_first(x + i, count - i) * factor, offset);
  __builtin_memcpy(qvalues + i, sixteen, (stored - i) * sizeof(Activation));
}

// Computes the qvalues of a row, in row layout, without an offset.
template <class Element>
LLM_INLINE void encode_row(const Element* x, size_t size, int8_t* qvalues, float* scale) {
  const Floats factor = broadcast(code_factor(largest_bits(x, size), scale));
  encode(x, size, factor, *scale == *scale, 0, reinterpret_cast<uint8_t*>(qvalues));
}

// Computes the qvalues of whole rows.
template <class Element>
void encode_rows(const EncodeArgs& args) {
  for_row_ranges(args.rows, args.size, [&](size_t first, size_t last) {
    const size_t bytes = args.rotates ? args.size * sizeof(float) : 0;
    auto* rotated = static_cast<float*>(scratch(Scratch::kPanel, bytes + 1));
    for (size_t row = first; row < last; row++) {
      const Element* x = static_cast<const Element*>(args.x) + row * args.size;
      int8_t* qvalues = args.qvalues + row * args.size;
      if (!args.rotates) {
        encode_row(x, args.size, qvalues, &args.scale[row]);
        continue;
      }
      rotate_row(x, args.size, rotated);
      encode_row(rotated, args.size, qvalues, &args.scale[row]);
    }
  });
}

// `form`: layout of the rows; `then(row, qvalues)` is called when a row is complete.
template <class Element, class Code, class Then>
QuantizedRows<Code> code_rows(const LinearArgs& args, const ActivationForm<Code>& form, Then then) {
  const size_t stride = args.x_layout.or_rows(args.m, args.k).width;
  using Activation = ActivationOf<Code>;
  const size_t bytes = TiledLayout::padded(form.bytes(args.m), sizeof(float));
  auto* memory = static_cast<char*>(scratch(Scratch::kActivations, bytes + args.m * sizeof(float)));
  auto* qvalues = reinterpret_cast<Activation*>(memory);
  auto* scale = reinterpret_cast<float*>(memory + bytes);
  auto code = [&](size_t row, const auto* x) {
    const Floats factor = broadcast(code_factor(largest_bits(x, args.k), &scale[row]));
    const bool is_finite = scale[row] == scale[row];
    form.layout.for_runs(row, 0, form.inputs, [&](size_t first, size_t last, size_t at) {
      // Inputs behind the last one are zeros.
      const size_t end = last < args.k ? last : args.k;
      encode(x + first, end - first, factor, is_finite, Operand<Code>::kOffset, qvalues + at);
      const size_t stored = TiledLayout::padded(end - first, kStoredTogether<Activation>);
      for (size_t i = stored; i < last - first; i++) qvalues[at + i] = static_cast<Activation>(Operand<Code>::kOffset);
    });
    then(row, static_cast<const Activation*>(qvalues));
  };
  for_rows_of_x(args, [&](size_t row) {
    const Element* x = static_cast<const Element*>(args.x) + row * stride;
    if (!args.qvalues->rotated) return code(row, x);
    auto* rotated = static_cast<float*>(scratch(Scratch::kPanel, args.k * sizeof(float) + 1));
    rotate_row(x, args.k, rotated);
    code(row, static_cast<const float*>(rotated));
  });
  return {{form, qvalues}, scale};
}

}  // namespace llm::LLM_ISA
