// bfloat16 products in 16-bit integers (vpdpwssd), which do twice the work of float32 on CPUs without bfloat16 units.
//
// A bfloat16 has eight significant bits. Numbers that are multiples of one power of two, their unit, keep all of them
// in 16 bits unless they are much smaller than the largest; those are rounded to a whole number of units:
//   weights      share a unit along a column: 2^-14 of the power of two of the largest, so that weights down to 2^-7 of
//   that keep every bit; they are stored as multiples, in the memory and order of the bfloat16
//   activations  share a unit within a row and a block of 128 inputs: the smallest for which any sum of a block fits in
//   32 bits. By Cauchy and Schwarz such a sum is at most the norm of the activations times that of the weights; the
//   largest norm of any column and block is measured once for a weight
// Sums of a block are exact in any order; blocks are added in float32, in ascending order. So the bits of a row do not
// depend on the other rows. A row with infinity or NaN becomes NaN; a weight with one is left unchanged and multiplied
// in float32. tests/support/kernels/fixed_point.py defines the same in NumPy, bit by bit.
#pragma once

#include "linear.h"

// Not used on CPUs with bfloat16 units or AMX.
#if defined(__AVX512VNNI__) && !defined(__AVX512BF16__) && !defined(LLM_AMX)
#define LLM_FIXED_POINT
namespace llm::LLM_ISA {

constexpr size_t kUnitInputs = 128;  // inputs of a row that share a unit
constexpr int kUnitBits = 14;
// Exponent of the largest number of a column, or of a row's block, below which units would be too small.
constexpr int kMinExponent = -90;
// Part of the allowed norm reserved for rounding: half a unit for each of 128 activations, and a little more.
constexpr float kRoundingNorm = 6.0f;

// A multiple of a unit.
struct Fixed16 {
  int16_t multiple;
};

// Sums of products in integers, converted to float32 by the unit of their row.
template <>
struct Operand<Fixed16> {
  using Activation = Fixed16;
  using Factor = __m512i;
  using Sum = NativeInt;
  static constexpr size_t kInputs = 2;
  static constexpr size_t kFactors = 1;
  static constexpr size_t kMultiple = kInputs;
  static constexpr bool kQuick = true;

  static LLM_INLINE Factor load_panel(const Fixed16* panel, size_t) { return _mm512_loadu_si512(panel); }

  static LLM_INLINE Factor load_activation(const Activation* a, size_t) {
    int32_t pair;
    __builtin_memcpy(&pair, a, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }

  static LLM_INLINE Sum accumulate(Factor a, Factor b, Sum sum) { return (Sum)_mm512_dpwssd_epi32((__m512i)sum, a, b); }

  static LLM_INLINE Sum begin(const float*, bool) { return Sum{}; }

  static LLM_INLINE void end(Sum sum, float* c, bool add_to_c, const float* row_unit) {
    const Floats before = add_to_c ? load(c) : zeros();
    store(c, multiply_add({{_mm512_cvtepi32_ps((__m512i)sum)}}, broadcast(*row_unit), before));
  }
};

LLM_INLINE float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

// Returns the largest power of two that is not above a positive normal number.
LLM_INLINE float floor_to_power_of_two(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits &= 0x7f800000;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

// Returns the larger magnitude of each pair of bfloat16, as bits.
LLM_INLINE __m512i larger_of_pairs(__m512i pairs) {
  const __m512i magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff));
  return _mm512_max_epu32(_mm512_srli_epi32(magnitudes, 16), _mm512_and_si512(magnitudes, _mm512_set1_epi32(0xffff)));
}

constexpr uint32_t kInfinityBits = 0x7f80;

LLM_INLINE int exponent_of(uint32_t magnitude_bits) {
  const int exponent = static_cast<int>(magnitude_bits >> 7) - 127;
  return exponent > kMinExponent ? exponent : kMinExponent;
}

// ---- Weights -------------------------------------------------------------------------------------------------------

// Calls body(panel, inputs) with each whole panel of a packed weight, and writes the changed panel back.
template <class Body>
void change_panel(const LinearArgs& args, size_t panel, Body body) {
  const size_t inputs = (args.k + 1) / 2 * 2;
  const size_t bytes = inputs * kPanelWidth * sizeof(BFloat16) + 1;
  auto* padded = static_cast<BFloat16*>(scratch(Scratch::kPanel, bytes));
  const BFloat16* whole = whole_panel(args, panel, inputs, padded);
  body(const_cast<BFloat16*>(whole), inputs);
  if (whole != padded) return;
  auto* packed = static_cast<BFloat16*>(const_cast<void*>(args.weight)) + panel * kPanelWidth * args.k;
  for_panel_runs<BFloat16>(args, panel, [&](size_t at, size_t packed_at, size_t count) {
    __builtin_memcpy(packed + packed_at, padded + at, count * sizeof(BFloat16));
  });
}

// Measures the units of a panel's columns, times 2^14; returns false if a column has infinity or NaN.
inline bool measure_columns(const BFloat16* panel, size_t inputs, float* unit) {
  __m512i largest = _mm512_setzero_si512();
  for (size_t k = 0; k < inputs; k += 2) {
    largest = _mm512_max_epu32(largest, larger_of_pairs(_mm512_loadu_si512(panel + k * kPanelWidth)));
  }
  alignas(64) uint32_t magnitudes[kPanelWidth];
  _mm512_store_si512(magnitudes, largest);
  bool finite = true;
  for (size_t column = 0; column < kPanelWidth; column++) {
    unit[column] = power_of_two(exponent_of(magnitudes[column]));
    finite = finite && magnitudes[column] < kInfinityBits;
  }
  return finite;
}

// Converts a panel to multiples of its columns' units; returns the largest squared norm of a column's block.
inline uint64_t to_fixed16(BFloat16* panel, size_t inputs, const float* unit) {
  const __m512 units = _mm512_div_ps(_mm512_set1_ps(power_of_two(kUnitBits)), _mm512_loadu_ps(unit));
  __m512i largest = _mm512_setzero_si512();
  for (size_t first = 0; first < inputs; first += kUnitInputs) {
    const size_t last = first + kUnitInputs < inputs ? first + kUnitInputs : inputs;
    __m512i low = _mm512_setzero_si512();
    __m512i high = _mm512_setzero_si512();
    for (size_t k = first; k < last; k += 2) {
      const __m512i pairs = _mm512_loadu_si512(panel + k * kPanelWidth);
      const __m512 even = (__m512)_mm512_slli_epi32(pairs, 16);
      const __m512 odd = (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
      const __m512i even_units = _mm512_cvtps_epi32(_mm512_mul_ps(even, units));
      const __m512i odd_units = _mm512_cvtps_epi32(_mm512_mul_ps(odd, units));
      const __m512i multiples = _mm512_mask_blend_epi16(0xaaaaaaaa, even_units, _mm512_slli_epi32(odd_units, 16));
      _mm512_storeu_si512(panel + k * kPanelWidth, multiples);
      const __m512i squares = _mm512_dpwssd_epi32(_mm512_setzero_si512(), multiples, multiples);
      low = _mm512_add_epi64(low, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(squares)));
      high = _mm512_add_epi64(high, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(squares, 1)));
    }
    largest = _mm512_max_epu64(largest, _mm512_max_epu64(low, high));
  }
  return _mm512_reduce_max_epu64(largest);
}

// `Kernels::to_fixed_point`
inline bool weight_to_fixed_point(void* packed, size_t n, size_t k, float* unit, float* activation_norm) {
  const LinearArgs args = {nullptr, packed, nullptr, DType::kBFloat16, DType::kBFloat16, 0, n, k};
  const size_t panels = (n + kPanelWidth - 1) / kPanelWidth;
  bool finite = true;
  auto measure = [&](size_t panel) {
    change_panel(args, panel, [&](const BFloat16* columns, size_t inputs) {
      if (!measure_columns(columns, inputs, unit + panel * kPanelWidth)) {
        __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
      }
    });
  };
  parallel_for(panels, measure);
  if (!finite) return false;
  uint64_t largest = 1;
  auto convert = [&](size_t panel) {
    change_panel(args, panel, [&](BFloat16* columns, size_t inputs) {
      const uint64_t norm = to_fixed16(columns, inputs, unit + panel * kPanelWidth);
      uint64_t seen = __atomic_load_n(&largest, __ATOMIC_RELAXED);
      while (seen < norm &&
             !__atomic_compare_exchange_n(&largest, &seen, norm, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
    });
  };
  parallel_for(panels, convert);
  *activation_norm = static_cast<float>(0x1p31 * 0.999 / __builtin_sqrt(static_cast<double>(largest)));
  return true;
}

// ---- Activations ---------------------------------------------------------------------------------------------------

// Activations as multiples: a block of every row, then the next block of every row.
struct FixedActivations {
  using Packed = BFloat16;
  using Multiplied = BFloat16;

  const Fixed16* data;
  const float* unit;  // [blocks][rows], times 2^-14: for products with weights whose unit is the power of two alone
  size_t inputs;
  TiledLayout layout;

  const Fixed16* at(size_t row, size_t k) const { return data + layout.at(row, k); }
};

// Converts a block of a row to multiples, padded with a zero to an even number; returns the unit, NaN if there is none.
inline float to_fixed16(const BFloat16* x, size_t count, float max_norm, Fixed16* target) {
  __m512i largest = _mm512_setzero_si512();
  for (size_t k = 0; k < count; k += 32) {
    const __mmask32 present = count - k < 32 ? (1u << (count - k)) - 1 : 0xffffffff;
    largest = _mm512_max_epu32(largest, larger_of_pairs(_mm512_maskz_loadu_epi16(present, x + k)));
  }
  const uint32_t magnitude = _mm512_reduce_max_epu32(largest);
  const int exponent = exponent_of(magnitude);
  // Two factors, because the reciprocal of the largest powers of two is subnormal.
  const Floats half_way = broadcast(power_of_two(-(exponent / 2)));
  const Floats rest = broadcast(power_of_two(exponent / 2 - exponent));
  Floats squares = zeros();
  for (size_t k = 0; k < count; k += kLanes) {
    const Floats value = load_first(x + k, count - k) * half_way * rest;
    squares = multiply_add(value, value, squares);
  }
  const float allowed = (max_norm - kRoundingNorm) / __builtin_sqrtf(sum_lanes(squares));
  const float most = power_of_two(kUnitBits);
  const float units_per_one = allowed < most ? floor_to_power_of_two(allowed) : most;
  for (size_t k = 0; k < count; k += kLanes) {
    const Floats value = load_first(x + k, count - k) * half_way * rest * broadcast(units_per_one);
    const __m256i multiples = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(value.part[0]));
    const size_t left = count - k + count % 2;
    _mm256_mask_storeu_epi16(target + k, left < kLanes ? first_lanes(left) : 0xffff, multiples);
  }
  if (magnitude >= kInfinityBits) return __builtin_nanf("");
  return power_of_two(exponent - kUnitBits) / units_per_one;
}

inline FixedActivations prepare_fixed_activations(const LinearArgs& args) {
  const size_t inputs = (args.k + 1) / 2 * 2;
  const TiledLayout layout = {args.m, inputs < kUnitInputs ? inputs : kUnitInputs};
  const size_t blocks = (inputs + kUnitInputs - 1) / kUnitInputs;
  const size_t stride = args.x_layout.or_rows(args.m, args.k).width;
  const size_t units_at = args.m * blocks * layout.width * sizeof(Fixed16);
  char* memory = static_cast<char*>(scratch(Scratch::kActivations, units_at + args.m * blocks * sizeof(float) + 1));
  auto* data = reinterpret_cast<Fixed16*>(memory);
  auto* unit = reinterpret_cast<float*>(memory + units_at);
  for_rows_of_x(args, [&](size_t row) {
    for (size_t block = 0; block < blocks; block++) {
      const size_t k = block * kUnitInputs;
      const size_t count = args.k - k < kUnitInputs ? args.k - k : kUnitInputs;
      const BFloat16* x = static_cast<const BFloat16*>(args.x) + row * stride + k;
      unit[block * args.m + row] = to_fixed16(x, count, args.qvalues->activation_norm, data + layout.at(row, k));
    }
  });
  return {data, unit, inputs, layout};
}

// ---- Products ------------------------------------------------------------------------------------------------------

// Computes the sums [count][rows][16] of a block of rows with the panels of a unit of work.
inline void sum_products(const LinearArgs& args, const FixedActivations& x, size_t row, size_t rows,
                         const UnitPanels<BFloat16>& panels, float* sums) {
  if (x.inputs == 0) __builtin_memset(sums, 0, panels.count * rows * kPanelWidth * sizeof(float));
  for (size_t k = 0; k < x.inputs; k += kUnitInputs) {
    const size_t inputs = x.inputs - k < kUnitInputs ? x.inputs - k : kUnitInputs;
    const PassPanels<Fixed16> pass(panels, k, inputs, spreads_prefetches<Fixed16>(rows));
    Product<Fixed16> product(rows, x.at(row, k), pass.now, panels.count, inputs, sums);
    product.a_stride = x.layout.width;
    product.add_to_c = k > 0;
    product.next = pass.next;
    product.row_scales = x.unit + k / kUnitInputs * x.layout.rows + row;
    multiply(product);
  }
  for (size_t p = 0; p < panels.count; p++) {
    const Floats units = load(args.qvalues->scale + panels.index[p] * kPanelWidth);
    for (size_t r = 0; r < rows; r++) {
      float* target = sums + (p * rows + r) * kPanelWidth;
      store(target, load(target) * units);
    }
  }
}

inline void fixed_point_linear(const LinearArgs& args) { linear_with<BFloat16>(args, prepare_fixed_activations(args)); }

}  // namespace llm::LLM_ISA
#endif
