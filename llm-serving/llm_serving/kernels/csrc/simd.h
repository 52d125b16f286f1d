// Sixteen float32 lanes on any instruction set: one register of AVX-512, two of AVX2, four of SSE2 or NEON.
//
// Compiled once for each instruction set, in a namespace of its own (LLM_ISA), and without contraction of a * b + c: a
// sum is fused exactly where `multiply_add` is written, so that every instance of a template rounds alike. Templates of
// the standard library are not used in these files, because the linker could keep an instance that another CPU cannot
// run.
#pragma once

#include "dtype.h"

#if defined(__x86_64__)
// gcc 12 warns of the deliberately undefined registers in its own header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

// Whether the instruction set has AVX2 and no AVX-512.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define LLM_AVX2_ONLY 1
#else
#define LLM_AVX2_ONLY 0
#endif

namespace llm::LLM_ISA {

constexpr size_t kLanes = 16;

#if defined(__AVX512F__)
constexpr size_t kNative = 16;
#elif defined(__AVX2__)
constexpr size_t kNative = 8;
#else
constexpr size_t kNative = 4;
#endif
constexpr size_t kParts = kLanes / kNative;

typedef float NativeFloat __attribute__((vector_size(kNative * 4)));
typedef int32_t NativeInt __attribute__((vector_size(kNative * 4)));
typedef uint32_t NativeUint __attribute__((vector_size(kNative * 4)));
typedef uint16_t NativeShort __attribute__((vector_size(kNative * 2)));

struct Floats {
  NativeFloat part[kParts];
};

#define LLM_FOR_PARTS _Pragma("GCC unroll 4") for (size_t i = 0; i < kParts; i++)

// Not `NativeFloat{} + value`: an addition would change -0.0f.
LLM_INLINE NativeFloat native_broadcast(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#elif defined(__AVX2__)
  return _mm256_set1_ps(value);
#else
  return NativeFloat{value, value, value, value};
#endif
}

LLM_INLINE Floats broadcast(float value) {
  Floats result;
  LLM_FOR_PARTS result.part[i] = native_broadcast(value);
  return result;
}

LLM_INLINE Floats zeros() { return broadcast(0.0f); }

LLM_INLINE NativeFloat native_multiply_add(NativeFloat a, NativeFloat b, NativeFloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// a * b + c; fused if the instruction set supports it, otherwise rounded twice.
LLM_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  LLM_FOR_PARTS c.part[i] = native_multiply_add(a.part[i], b.part[i], c.part[i]);
  return c;
}

// The same, for sums that stay in registers: gcc 12 would write the result of vfmadd132ps over a factor and store some
// of twelve sums on the stack.
LLM_INLINE Floats accumulate_product(const Floats& a, const Floats& b, Floats sum) {
#if LLM_AVX2_ONLY
  LLM_FOR_PARTS asm("vfmadd231ps %2, %1, %0" : "+x"(sum.part[i]) : "x"(a.part[i]), "x"(b.part[i]));
  return sum;
#else
  return multiply_add(a, b, sum);
#endif
}

LLM_INLINE Floats operator+(Floats a, Floats b) {
  LLM_FOR_PARTS a.part[i] += b.part[i];
  return a;
}

LLM_INLINE Floats operator-(Floats a, Floats b) {
  LLM_FOR_PARTS a.part[i] -= b.part[i];
  return a;
}

LLM_INLINE Floats operator*(Floats a, Floats b) {
  LLM_FOR_PARTS a.part[i] *= b.part[i];
  return a;
}

LLM_INLINE Floats operator/(Floats a, Floats b) {
  LLM_FOR_PARTS a.part[i] /= b.part[i];
  return a;
}

// The larger of each pair; b where either is NaN.
LLM_INLINE Floats maximum(Floats a, Floats b) {
  LLM_FOR_PARTS a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}

// The same numbers, but 0 in place of -inf.
LLM_INLINE Floats zero_if_minus_infinity(Floats a) {
  const NativeFloat infinity = native_broadcast(__builtin_inff());
  LLM_FOR_PARTS a.part[i] = a.part[i] == -infinity ? NativeFloat{} : a.part[i];
  return a;
}

// The index of each lane.
LLM_INLINE Floats lane_numbers() {
  Floats result;
  LLM_FOR_PARTS {
    for (size_t j = 0; j < kNative; j++) result.part[i][j] = static_cast<float>(i * kNative + j);
  }
  return result;
}

// Keeps the lanes of `value` from `count` on, and sets those below to `other`.
LLM_INLINE Floats keep_from(Floats value, size_t count, float other) {
  const int32_t limit = static_cast<int32_t>(count < kLanes ? count : kLanes);
  LLM_FOR_PARTS {
    NativeInt index;
    for (size_t j = 0; j < kNative; j++) index[j] = static_cast<int32_t>(i * kNative + j);
    value.part[i] = index >= limit ? value.part[i] : native_broadcast(other);
  }
  return value;
}

// Keeps the lanes of `value` below `count`, and sets the rest to `other`.
LLM_INLINE Floats keep_first(Floats value, size_t count, float other) {
  const int32_t limit = static_cast<int32_t>(count < kLanes ? count : kLanes);
  LLM_FOR_PARTS {
    NativeInt index;
    for (size_t j = 0; j < kNative; j++) index[j] = static_cast<int32_t>(i * kNative + j);
    value.part[i] = index < limit ? value.part[i] : native_broadcast(other);
  }
  return value;
}

// The lanes summed in a fixed tree: lane j with lane j + 8, then + 4, + 2, + 1.
LLM_INLINE float sum_lanes(Floats value) {
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
  return _mm512_reduce_add_ps(value.part[0]);  // this very tree
#else
  alignas(64) float lane[kLanes];
  __builtin_memcpy(lane, &value, sizeof(lane));
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; j++) lane[j] += lane[j + half];
  }
  return lane[0];
#endif
}

LLM_INLINE float max_lane(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(value.part[0]);
#else
  alignas(64) float lane[kLanes];
  __builtin_memcpy(lane, &value, sizeof(lane));
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; j++) lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
  }
  return lane[0];
#endif
}

// ---- Memory --------------------------------------------------------------------------------------------------------

LLM_INLINE NativeFloat native_load(const float* source) {
  NativeFloat result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}

LLM_INLINE NativeFloat native_load(const BFloat16* source) {
  NativeShort bits;
  __builtin_memcpy(&bits, source, sizeof(bits));
  return (NativeFloat)(__builtin_convertvector(bits, NativeUint) << 16);
}

LLM_INLINE NativeFloat native_load(const Float16* source) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
  NativeShort half;
  __builtin_memcpy(&half, source, sizeof(half));
  const NativeUint bits = __builtin_convertvector(half, NativeUint);
  const NativeUint magnitude = (bits & 0x7fff) << 13;
  const NativeUint normal = magnitude + 0x38000000;  // moves the bias of the exponent from 15 to 127
  const NativeUint subnormal = (NativeUint)(__builtin_convertvector((NativeInt)(bits & 0x3ff), NativeFloat) * 0x1p-24f);
  NativeUint chosen = magnitude < 0x00800000 ? subnormal : normal;
  chosen = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : chosen;  // infinity and NaN
  return (NativeFloat)(chosen | (bits & 0x8000) << 16);
#endif
}

LLM_INLINE NativeFloat native_load(const int8_t* source) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  typedef int8_t NativeCode __attribute__((vector_size(kNative)));
  NativeCode qvalues;
  __builtin_memcpy(&qvalues, source, sizeof(qvalues));
  return __builtin_convertvector(__builtin_convertvector(qvalues, NativeInt), NativeFloat);
#endif
}

LLM_INLINE NativeFloat native_load(const uint8_t* source) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  typedef uint8_t NativeByte __attribute__((vector_size(kNative)));
  NativeByte bytes;
  __builtin_memcpy(&bytes, source, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, NativeInt), NativeFloat);
#endif
}

LLM_INLINE void native_store(float* target, NativeFloat value) { __builtin_memcpy(target, &value, sizeof(value)); }

// The bits of numbers rounded to bfloat16.
LLM_INLINE NativeUint bfloat16_bits(NativeFloat value) {
  const NativeUint bits = (NativeUint)value;
  const NativeUint rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const NativeUint quiet = bits >> 16 | 0x40;
  return (bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded;
}

LLM_INLINE void native_store(BFloat16* target, NativeFloat value) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh(value);  // subnormals become zero
  __builtin_memcpy(target, &rounded, sizeof(rounded));
#else
  const NativeShort narrow = __builtin_convertvector(bfloat16_bits(value), NativeShort);
  __builtin_memcpy(target, &narrow, sizeof(narrow));
#endif
}

LLM_INLINE void native_store(Float16* target, NativeFloat value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
  const NativeUint bits = (NativeUint)value;
  const NativeUint magnitude = bits & 0x7fffffff;
  const NativeUint rebased = magnitude - 0x38000000;
  const NativeUint normal = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
  // Adding 0.5 leaves a subnormal half in the low bits, rounded by the adder.
  const NativeUint subnormal = (NativeUint)((NativeFloat)magnitude + 0.5f) - 0x3f000000;
  NativeUint half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? NativeUint{} + 0x7c00 : half;  // rounds to 2^16 or more
  half = magnitude > 0x7f800000 ? (magnitude >> 13 & 0x1ff) | 0x7e00 : half;
  const NativeShort narrow = __builtin_convertvector(half | (bits >> 16 & 0x8000), NativeShort);
  __builtin_memcpy(target, &narrow, sizeof(narrow));
#endif
}

template <class Element>
LLM_INLINE Floats load(const Element* source) {
  Floats result;
  LLM_FOR_PARTS result.part[i] = native_load(source + i * kNative);
  return result;
}

template <class Element>
LLM_INLINE void store(Element* target, Floats value) {
  LLM_FOR_PARTS native_store(target + i * kNative, value.part[i]);
}

#if defined(__AVX512F__)
// Writes 32 elements, a whole line, past the caches; `_mm_sfence` makes them visible to other threads.
LLM_INLINE void stream_line(BFloat16* target, Floats low, Floats high) {
#if defined(__AVX512BF16__)
  const __m512i line = (__m512i)_mm512_cvtne2ps_pbh(high.part[0], low.part[0]);  // subnormals become zero
#else
  BFloat16 line[2 * kLanes];
  store(line, low);
  store(line + kLanes, high);
#endif
  __m512i bits;
  __builtin_memcpy(&bits, &line, sizeof(bits));
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), bits);
}
#endif

// Stores two times sixteen elements consecutively.
template <class Element>
LLM_INLINE void store_pair(Element* target, Floats low, Floats high) {
  store(target, low);
  store(target + kLanes, high);
}

#if defined(__AVX512BF16__)
LLM_INLINE void store_pair(BFloat16* target, Floats low, Floats high) {
  const __m512bh elements = _mm512_cvtne2ps_pbh(high.part[0], low.part[0]);  // subnormals become zero
  __builtin_memcpy(target, &elements, sizeof(elements));
}
#endif

// Rounds values to the type in memory.
template <class Element>
LLM_INLINE Floats rounded(Floats value) {
  Element elements[kLanes];
  store(elements, value);
  return load(elements);
}

#if defined(__AVX512F__)
LLM_INLINE __mmask16 first_lanes(size_t count) { return static_cast<__mmask16>((1u << count) - 1); }

LLM_INLINE NativeFloat native_load_first(const float* source, size_t count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), source);
}

// Loads two-byte elements; missing ones have zero bits, whose value is zero.
template <class Element>
LLM_INLINE NativeFloat native_load_first(const Element* source, size_t count) {
  const __m256i bits = _mm256_maskz_loadu_epi16(first_lanes(count), source);
  Element elements[kLanes];
  __builtin_memcpy(elements, &bits, sizeof(bits));
  return native_load(elements);
}

LLM_INLINE void native_store_first(float* target, NativeFloat value, size_t count) {
  _mm512_mask_storeu_ps(target, first_lanes(count), value);
}

template <class Element>
LLM_INLINE void native_store_first(Element* target, NativeFloat value, size_t count) {
  Element elements[kLanes];
  native_store(elements, value);
  __m256i bits;
  __builtin_memcpy(&bits, elements, sizeof(bits));
  _mm256_mask_storeu_epi16(target, first_lanes(count), bits);
}
#endif

// Loads the first `count` (at most 16) elements, followed by zeros.
template <class Element>
LLM_INLINE Floats load_first(const Element* source, size_t count) {
  if (count >= kLanes) return load(source);
#if defined(__AVX512F__)
  return {{native_load_first(source, count)}};
#else
  Element padded[kLanes] = {};
  __builtin_memcpy(padded, source, count * sizeof(Element));
  return load(padded);
#endif
}

template <class Element>
LLM_INLINE void store_first(Element* target, Floats value, size_t count) {
  if (count >= kLanes) return store(target, value);
#if defined(__AVX512F__)
  native_store_first(target, value.part[0], count);
#else
  Element padded[kLanes];
  store(padded, value);
  __builtin_memcpy(target, padded, count * sizeof(Element));
#endif
}

// The largest element of each of sixteen rows [16][16]. NaN in a row may be ignored.
LLM_INLINE Floats max_of_rows(const float* rows) {
  Floats result;
#if defined(__AVX512F__)
  // Each step takes the larger of two lanes of a row, so that the rows of two vectors fit into one.
  __m512 fours[4];
  for (size_t i = 0; i < 4; i++) {
    const float* of = rows + 4 * i * kLanes;
    const __m512 a = _mm512_loadu_ps(of), b = _mm512_loadu_ps(of + kLanes);
    const __m512 c = _mm512_loadu_ps(of + 2 * kLanes), d = _mm512_loadu_ps(of + 3 * kLanes);
    const __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    fours[i] = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  __m512 eights[2];
  for (size_t i = 0; i < 2; i++) {
    const __m512 a = fours[2 * i], b = fours[2 * i + 1];
    eights[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  result.part[0] =
      _mm512_max_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88), _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
#else
  alignas(64) float largest[kLanes];
  for (size_t i = 0; i < kLanes; i++) largest[i] = max_lane(load(rows + i * kLanes));
  result = load(largest);
#endif
  return result;
}

// ---- Exponential ---------------------------------------------------------------------------------------------------

// e^x within 2 units in the last place; exactly 1 at 0, 0 below -87.3, infinity above 88.73, NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder below 2^-27).
LLM_INLINE NativeFloat native_exp(NativeFloat x) {
  const NativeFloat round = native_broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const NativeFloat low = native_broadcast(-87.3f);
  const NativeFloat high = native_broadcast(89.0f);
#if defined(__AVX512F__)
  const NativeFloat bounded = _mm512_min_ps(high, x);  // x where it is NaN
#else
  NativeFloat bounded = x > low ? x : low;
  bounded = bounded < high ? bounded : high;
#endif
  const NativeFloat n = native_multiply_add(bounded, native_broadcast(1.44269504f), round) - round;
  NativeFloat r = native_multiply_add(n, native_broadcast(-0.693359375f), bounded);
  r = native_multiply_add(n, native_broadcast(2.12194440e-4f), r);
  NativeFloat p = native_broadcast(1.0f / 5040);
  p = native_multiply_add(p, r, native_broadcast(1.0f / 720));
  p = native_multiply_add(p, r, native_broadcast(1.0f / 120));
  p = native_multiply_add(p, r, native_broadcast(1.0f / 24));
  p = native_multiply_add(p, r, native_broadcast(1.0f / 6));
  p = native_multiply_add(p, r, native_broadcast(0.5f));
  p = native_multiply_add(p, r, native_broadcast(1.0f));
  p = native_multiply_add(p, r, native_broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n);
#else
  // If n is 128, 2^n alone would overflow: use two factors.
  const NativeInt whole = __builtin_convertvector(n, NativeInt);
  const NativeInt part = whole >> 1;
  const NativeFloat scaled = p * (NativeFloat)((part + 127) << 23) * (NativeFloat)((whole - part + 127) << 23);
  const NativeFloat result = x < low ? NativeFloat{} : scaled;
  return x == x ? result : x;
#endif
}

LLM_INLINE Floats exp(Floats x) {
  LLM_FOR_PARTS x.part[i] = native_exp(x.part[i]);
  return x;
}

// 2^x within 3 units in the last place; exactly 1 at 0, at most 2^-126 below -126, NaN for NaN; for x below 128.
// x = n + r, 0 <= r < 1; 2^r by the polynomial of degree 5 whose relative error is least (below 2^-23.5), 1 at 0.
LLM_INLINE NativeFloat native_exp2(NativeFloat x) {
#if defined(__AVX512F__)
  const NativeFloat r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 for an infinity
#else
  const NativeFloat round = native_broadcast(12582912.0f);
  const NativeFloat low = native_broadcast(-126.0f);
  const NativeFloat bounded = x > low ? x : low;
  NativeFloat n = (bounded + round) - round;
  n = n > bounded ? n - native_broadcast(1.0f) : n;
  const NativeFloat r = bounded - n;
#endif
  NativeFloat p = native_broadcast(0x1.e974fcp-10f);
  p = native_multiply_add(p, r, native_broadcast(0x1.277854p-7f));
  p = native_multiply_add(p, r, native_broadcast(0x1.c91ce6p-5f));
  p = native_multiply_add(p, r, native_broadcast(0x1.ebdb56p-3f));
  p = native_multiply_add(p, r, native_broadcast(0x1.62e4bap-1f));
  p = native_multiply_add(p, r, native_broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);  // by the floor of x
#else
  const NativeFloat scaled = p * (NativeFloat)((__builtin_convertvector(n, NativeInt) + 127) << 23);
  const NativeFloat result = x < low ? NativeFloat{} : scaled;
  return x == x ? result : x;
#endif
}

LLM_INLINE Floats exp2(Floats x) {
  LLM_FOR_PARTS x.part[i] = native_exp2(x.part[i]);
  return x;
}

// 2^x within 2^-13 of its magnitude, exactly 1 for zero: for results that are rounded to bfloat16 or 8-bit
// integers; without AVX-512 as exp2.
LLM_INLINE Floats coarse_exp2(Floats x) {
#if defined(__AVX512F__)
  const NativeFloat r = _mm512_reduce_ps(x.part[0], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  NativeFloat p = native_broadcast(0x1.3baadcp-4f);
  p = native_multiply_add(p, r, native_broadcast(0x1.d23788p-3f));
  p = native_multiply_add(p, r, native_broadcast(0x1.63e654p-1f));
  p = native_multiply_add(p, r, native_broadcast(1.0f));
  x.part[0] = _mm512_scalef_ps(p, x.part[0]);
  return x;
#else
  return exp2(x);
#endif
}

#if defined(__AVX512F__)
// Stores two times sixteen elements consecutively, and returns `sum` plus the stored elements.
LLM_INLINE Floats store_and_add(BFloat16* target, Floats low, Floats high, Floats sum) {
#if defined(__AVX512BF16__)
  const __m512bh elements = _mm512_cvtne2ps_pbh(high.part[0], low.part[0]);  // subnormals become zero
  __builtin_memcpy(target, &elements, sizeof(elements));
  sum.part[0] = _mm512_dpbf16_ps(sum.part[0], elements, (__m512bh)_mm512_set1_epi16(0x3f80));  // times one
  return sum;
#else
  store_pair(target, low, high);
  return sum + load(target) + load(target + kLanes);
#endif
}
#endif

// ---- Hyperbolic tangent --------------------------------------------------------------------------------------------

// tanh x within 2^-22 of its magnitude; NaN for NaN. An odd polynomial below 0.625 (S. Moshier, Cephes), above
// 1 - 2 / (e^2x + 1) with the sign of x.
LLM_INLINE NativeFloat native_tanh(NativeFloat x) {
  const NativeFloat magnitude = (NativeFloat)((NativeUint)x & 0x7fffffff);
  const NativeFloat square = x * x;
  NativeFloat p = native_broadcast(-5.70498872745e-3f);
  p = native_multiply_add(p, square, native_broadcast(2.06390887954e-2f));
  p = native_multiply_add(p, square, native_broadcast(-5.37397155531e-2f));
  p = native_multiply_add(p, square, native_broadcast(1.33314422036e-1f));
  p = native_multiply_add(p, square, native_broadcast(-3.33332819422e-1f));
  const NativeFloat small = native_multiply_add(p * square, x, x);
  const NativeFloat one = native_broadcast(1.0f);
  const NativeFloat large = one - native_broadcast(2.0f) / (native_exp(magnitude + magnitude) + one);
  const NativeFloat with_sign = (NativeFloat)((NativeUint)large | ((NativeUint)x & 0x80000000));
  return magnitude < native_broadcast(0.625f) ? small : with_sign;
}

LLM_INLINE Floats tanh(Floats x) {
  LLM_FOR_PARTS x.part[i] = native_tanh(x.part[i]);
  return x;
}

// ---- Element types -------------------------------------------------------------------------------------------------

template <class Type>
struct Tag {
  using Element = Type;
};

// Calls body with the tag of the float type that `dtype` names.
template <class Body>
LLM_INLINE void with_element(DType dtype, Body body) {
  if (dtype == DType::kFloat32) {
    body(Tag<float>{});
  } else if (dtype == DType::kFloat16) {
    body(Tag<Float16>{});
  } else {
    body(Tag<BFloat16>{});
  }
}

}  // namespace llm::LLM_ISA
