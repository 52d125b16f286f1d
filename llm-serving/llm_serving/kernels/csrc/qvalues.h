// Products of 8-bit qvalues: four inputs at a time, added in 32 bits, exact.
//
// vpdpbusd has one unsigned operand, so one of two signed ones is moved by 128, and the excess is subtracted from the
// sum. It adds in 32 bits without saturation, unlike vpmaddubsw in 16. Without this instruction, qvalues are widened to
// 16 bits first. The sums are the same numbers.
#pragma once

#include "tile.h"

namespace llm::LLM_ISA {

// A qvalue of a weight, a value or a key.
struct Code8 {
  int8_t value;
};

// A qvalue of a key, multiplied by signed queries: products add kOffset times the sum of a query's qvalues.
struct KeyCode {
  int8_t value;
};

// A qvalue of a value, the sums of which an `Ending` uses.
struct ValueCode {
  int8_t value;
};

// Offset that makes qvalues unsigned.
constexpr int32_t kCodeOffset = 128;

#if defined(__AVX512VNNI__)
#define LLM_ADD_FOURS "vpdpbusd"
#elif defined(LLM_AVX_VNNI)
#define LLM_ADD_FOURS LLM_AVX_VNNI " vpdpbusd"
#endif

// Four qvalues of a byte each in every lane.
struct CodeFactor {
  NativeInt part[kParts];
};

LLM_INLINE CodeFactor load_qvalues(const void* qvalues) {
  CodeFactor result;
  // One load for each part: gcc copies all parts at once through memory, in pieces that the CPU cannot forward.
  LLM_FOR_PARTS {
    __builtin_memcpy(&result.part[i], static_cast<const uint8_t*>(qvalues) + i * sizeof(NativeInt), sizeof(NativeInt));
  }
  return result;
}

// Subtracts kCodeOffset, modulo 256, which turns unsigned qvalues into signed ones and the reverse.
LLM_INLINE CodeFactor minus_offset(CodeFactor qvalues) {
  LLM_FOR_PARTS qvalues.part[i] ^= static_cast<int32_t>(0x80808080);
  return qvalues;
}

// The upper 16 bits of each 32.
LLM_INLINE CodeFactor high_halves(CodeFactor qvalues) {
  LLM_FOR_PARTS qvalues.part[i] = (NativeInt)((NativeUint)qvalues.part[i] >> 16);
  return qvalues;
}

// Returns the bits `kMask << kFrom` of each 32 as a number, minus `zero`. No bit of the mask is above bit 15. The bits
// are written into the fraction of the float32 kLeast, where the lowest of them counts as 1. Subtracting kLeast leaves
// the number.
template <int kFrom, int32_t kMask>
LLM_INLINE Floats numbers_of(const CodeFactor& qvalues, float zero) {
  constexpr float kLeast = static_cast<float>(1 << (23 - kFrom));
  constexpr int32_t kLeastBits = (127 + 23 - kFrom) << 23;
  Floats result;
  LLM_FOR_PARTS {
#if defined(__AVX512F__)
    const __m512i mask = _mm512_set1_epi32(kMask << kFrom), least = _mm512_set1_epi32(kLeastBits);
    result.part[i] = (NativeFloat)_mm512_ternarylogic_epi32((__m512i)qvalues.part[i], mask, least, 0xea);
#else
    result.part[i] = (NativeFloat)((qvalues.part[i] & (kMask << kFrom)) | kLeastBits);
#endif
  }
  return result - broadcast(kLeast + zero);
}

LLM_INLINE CodeFactor broadcast_qvalues(const void* four_qvalues) {
  int32_t four;
  __builtin_memcpy(&four, four_qvalues, sizeof(four));
  CodeFactor result;
#if defined(__AVX512F__)
  result.part[0] = (NativeInt)_mm512_set1_epi32(four);
#else
  LLM_FOR_PARTS result.part[i] = NativeInt{} + four;
#endif
  return result;
}

// Sums are 32-bit integers with a float type, because gcc 12 spills some of 24 integer vectors to the stack.
LLM_INLINE Floats broadcast_sum(int32_t sum) {
  float bits;
  __builtin_memcpy(&bits, &sum, sizeof(bits));
  return broadcast(bits);
}

LLM_INLINE Floats add_sums(Floats a, const Floats& b) {
  LLM_FOR_PARTS a.part[i] = (NativeFloat)((NativeInt)a.part[i] + (NativeInt)b.part[i]);
  return a;
}

LLM_INLINE Floats to_numbers(Floats sums) {
  LLM_FOR_PARTS sums.part[i] = __builtin_convertvector((NativeInt)sums.part[i], NativeFloat);
  return sums;
}

#if !defined(LLM_ADD_FOURS)
typedef int16_t NativeHalves __attribute__((vector_size(kNative * 4)));

// The products of two pairs of 16-bit numbers in each lane, added.
LLM_INLINE NativeInt multiply_pairs(NativeHalves a, NativeHalves b) {
#if defined(__AVX512BW__)
  return (NativeInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (NativeInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (NativeInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const NativeInt x = (NativeInt)a, y = (NativeInt)b;
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

#if defined(__AVX2__)
#define LLM_BYTE_PAIRS 1
// The products of unsigned and signed bytes, each two of them added in 16 bits.
LLM_INLINE NativeHalves multiply_bytes(NativeInt unsigned_bytes, NativeInt bytes) {
#if defined(__AVX512BW__)
  return (NativeHalves)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)bytes);
#else
  return (NativeHalves)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)bytes);
#endif
}

// The two 16-bit numbers of each lane, added.
LLM_INLINE NativeInt add_halves(NativeHalves halves) { return multiply_pairs(halves, NativeHalves{} + 1); }
#endif

// The products of unsigned and signed qvalues, four in each lane, added. `kIsByte`: the unsigned ones need more than
// the 7 bits with which vpmaddubsw cannot overflow.
template <bool kIsByte>
LLM_INLINE NativeInt multiply_fours(NativeInt unsigned_qvalues, NativeInt qvalues) {
#if defined(LLM_BYTE_PAIRS)
  if constexpr (!kIsByte) return add_halves(multiply_bytes(unsigned_qvalues, qvalues));
#endif
  const NativeHalves a = (NativeHalves)unsigned_qvalues, b = (NativeHalves)qvalues;
  return multiply_pairs(a & 0xff, b << 8 >> 8) + multiply_pairs(a >> 8 & 0xff, b >> 8);
}
#endif

// Adds products of unsigned and signed qvalues, four in each lane. `kIsByte`: as of multiply_fours.
template <bool kIsByte = true>
LLM_INLINE Floats add_fours(const CodeFactor& unsigned_qvalues, const CodeFactor& qvalues, Floats sum) {
  LLM_FOR_PARTS {
#if defined(LLM_ADD_FOURS)
    asm(LLM_ADD_FOURS " %2, %1, %0" : "+v"(sum.part[i]) : "v"(unsigned_qvalues.part[i]), "v"(qvalues.part[i]));
#else
    const NativeInt added = multiply_fours<kIsByte>(unsigned_qvalues.part[i], qvalues.part[i]);
    sum.part[i] = (NativeFloat)((NativeInt)sum.part[i] + added);
#endif
  }
  return sum;
}

#if defined(LLM_ADD_FOURS)
template <>
struct Operand<Code8> {
  using Activation = uint8_t;
  static constexpr int32_t kOffset = kCodeOffset;
  using Factor = CodeFactor;
  using Sum = Floats;
  static constexpr size_t kInputs = 4;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = kInputs;
#if defined(__AVX512VNNI__) && !defined(LLM_AMX)
  static constexpr bool kQuick = true;
#else
  static constexpr bool kQuick = false;
#endif

  static LLM_INLINE Factor load_panel(const void* panel, size_t) { return load_qvalues(panel); }
  static LLM_INLINE Factor load_activation(const Activation* a, size_t) { return broadcast_qvalues(a); }
  static LLM_INLINE Sum accumulate(const Factor& a, const Factor& b, Sum sum) { return add_fours(a, b, sum); }
  static LLM_INLINE Sum begin(const float* c, bool add_to_c) { return add_to_c ? load(c) : zeros(); }
  static LLM_INLINE void end(Sum sum, float* c, bool, const float*) { store(c, sum); }
};

template <>
struct Operand<KeyCode> : Operand<Code8> {
  using Activation = int8_t;

  static LLM_INLINE Factor load_panel(const KeyCode* panel, size_t) { return minus_offset(load_qvalues(panel)); }
  static LLM_INLINE Factor load_activation(const Activation* a, size_t) { return broadcast_qvalues(a); }
  static LLM_INLINE Sum accumulate(const Factor& a, const Factor& b, Sum sum) { return add_fours(b, a, sum); }
};
#else
// Qvalues in 16 bits: of four inputs, the even ones are a factor, then the odd ones. Activations are stored in this
// order; each tile widens the qvalues of weights.
template <>
struct Operand<Code8> {
  struct Factor {
    NativeHalves part[kParts];
  };
  using Sum = Floats;
  using Activation = int16_t;
  static constexpr int32_t kOffset = 0;
  static constexpr size_t kInputs = 4;
  static constexpr size_t kFactors = 2;
  static constexpr size_t kMultiple = kInputs;
  static constexpr bool kQuick = false;

  static LLM_INLINE Factor load_panel(const void* panel, size_t factor) {
    Factor result;
    LLM_FOR_PARTS {
      NativeHalves qvalues;
      __builtin_memcpy(&qvalues, static_cast<const char*>(panel) + kInputs * i * kNative, sizeof(qvalues));
      result.part[i] = factor == 0 ? qvalues << 8 >> 8 : qvalues >> 8;
    }
    return result;
  }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t factor) {
    const CodeFactor pair = broadcast_qvalues(a + 2 * factor);
    Factor result;
    LLM_FOR_PARTS result.part[i] = (NativeHalves)pair.part[i];
    return result;
  }

  static LLM_INLINE Sum accumulate(const Factor& a, const Factor& b, Sum sum) {
    LLM_FOR_PARTS {
      const NativeInt product = multiply_pairs(a.part[i], b.part[i]);
#if LLM_AVX2_ONLY
      asm("vpaddd %1, %0, %0" : "+x"(sum.part[i]) : "x"(product));
#else
      sum.part[i] = (NativeFloat)((NativeInt)sum.part[i] + product);
#endif
    }
    return sum;
  }

  static LLM_INLINE Sum begin(const float* c, bool add_to_c) { return add_to_c ? load(c) : zeros(); }
  static LLM_INLINE void end(Sum sum, float* c, bool, const float*) { store(c, sum); }
};

template <>
struct Operand<KeyCode> : Operand<Code8> {};
#endif

template <>
struct Operand<ValueCode> : Operand<Code8> {};

// Inputs whose qvalues are stored together: in 16 bits, of each four the even ones come first.
template <class Activation>
constexpr size_t kStoredTogether = sizeof(Activation) == 1 ? 1 : kFourInputs;

// The position of the qvalue of input `i`.
template <class Activation>
constexpr size_t position_of(size_t i) {
  return sizeof(Activation) == 1 ? i : i / kFourInputs * kFourInputs + i % 2 * 2 + i / 2 % 2;
}

// Stores sixteen qvalues, signed or unsigned bytes, in 16 bits.
template <class Byte>
LLM_INLINE void store_in_16_bits(const Byte* qvalues, int16_t* target) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(qvalues));
  constexpr bool kSigned = std::is_same<Byte, int8_t>::value;
  const __m256i words = kSigned ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
  constexpr int kOrder = 0xd8;  // words 0, 2, 1, 3
  const __m256i ordered = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, kOrder), kOrder);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), ordered);
#else
  for (size_t i = 0; i < kLanes; i++) target[position_of<int16_t>(i)] = qvalues[i];
#endif
}

#if defined(LLM_AMX)
template <>
constexpr bool kMultipliesTiles<Code8> = true;

template <>
inline void multiply<Code8>(const Product<Code8>& product) {
  multiply_tiles(product);
}
#endif

}  // namespace llm::LLM_ISA
