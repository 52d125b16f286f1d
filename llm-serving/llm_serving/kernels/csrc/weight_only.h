// W8A16 and W4A16: qvalues of 8 or 4 bits with a scale for each column and group of inputs, times unquantized rows.
//
// y = sum over groups, in ascending order, of scale * (sum over the group's inputs of x * (qvalue - zero))
//
// Every element type holds qvalue - zero exactly, so a group's sum has the order and the bits of a product with
// elements. Qvalues are widened either in registers by the products themselves (grouped.h), or a few panels and inputs
// at a time into the first-level cache, to be multiplied like any weight.
#pragma once

#include "grouped.h"
#include "pair_products.h"
#include "qvalues.h"
#include "rotation.h"

namespace llm::LLM_ISA {

// A byte of qvalues (packed_qvalues.h).
struct WideCode {
  uint8_t bits;
};

constexpr size_t kBlockBytes = 64;
constexpr size_t kBlockWords = 32;
constexpr size_t kInputsOfWords = 8;  // most inputs of a block
constexpr int kByteZero = 128;        // an 8-bit qvalue that represents 0
// Inputs that are widened together: as bfloat16, four panels of them fill 16 KB or, if many rows use them, 128 KB, so
// that sums are stored and loaded less often.
constexpr size_t weight_only_inputs(size_t rows) { return rows > (kTilePanels - 1) * kTileRows ? 1024 : 128; }

template <class Element>
struct WideRows : Activations<Element> {
  using Packed = WideCode;
  using Multiplied = WideCode;
};

// Panels are whole in memory, with inputs padded to blocks of any type.
inline const WideCode* whole_panel(const LinearArgs& args, size_t panel, size_t, WideCode*) {
  const size_t bytes = panel_bytes(WeightFormat::kWeightOnly, args.qvalues->bits, args.k);
  return static_cast<const WideCode*>(args.weight) + panel * bytes;
}

// ---- Numbers out of qvalues, in registers ---------------------------------------------------------------------------

#if defined(__AVX512BW__)
// Table from the lowest five bits of a word to a number: a 4-bit qvalue minus 8 or, for a qvalue moved by its zero
// point, 5 bits minus 15; as bfloat16: sign, eight bits of exponent, seven of fraction.
template <bool kZeros>
struct HalfNumbers {
  uint16_t bits[kBlockWords];

  constexpr HalfNumbers() : bits() {
    for (int i = 0; i < static_cast<int>(kBlockWords); i++) {
      const int number = kZeros ? i - 15 : i % 16 - 8, magnitude = number < 0 ? -number : number;
      int exponent = 0;
      while (magnitude >> (exponent + 1) > 0) exponent++;
      const int positive = (exponent + 127) << 7 | (magnitude << (7 - exponent) & 127);
      bits[i] = static_cast<uint16_t>(magnitude == 0 ? 0 : number < 0 ? positive | 0x8000 : positive);
    }
  }
};

template <bool kZeros>
alignas(64) constexpr HalfNumbers<kZeros> kHalfNumbers;

// Widens a word of four qvalues by that table.
template <bool kZeros>
struct Halves {
  static constexpr size_t kBits = 4;
  using Zero = __m512i;

  static LLM_INLINE Zero zero_of(const uint8_t* zero) {
    if constexpr (!kZeros) return _mm512_setzero_si512();
    const __m512i columns = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zero)));
    return _mm512_sub_epi16(_mm512_set1_epi16(15), _mm512_or_si512(columns, _mm512_slli_epi32(columns, 16)));
  }

  // The numbers of the table in float32. Without zero points, vpermps looks them up.
  static LLM_INLINE FloatPairs numbers(const uint8_t* qvalues, size_t part, Zero zero) {
    if constexpr (!kZeros) {
      const __m512i lanes = _mm512_loadu_si512(qvalues);
      const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      const auto even = static_cast<unsigned>(kBits * part), odd = 16 + even;
      return {_mm512_permutexvar_ps(_mm512_srli_epi32(lanes, even), table),
              _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, odd), table)};
    }
    return widened_pairs(weight_only(qvalues, part, zero));
  }

  static LLM_INLINE __m512i weight_only(const uint8_t* qvalues, size_t part, Zero zero) {
    __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(qvalues), static_cast<unsigned>(kBits * part));
    if constexpr (kZeros) words = _mm512_add_epi16(_mm512_and_si512(words, _mm512_set1_epi16(15)), zero);
    return _mm512_permutexvar_epi16(words, _mm512_load_si512(kHalfNumbers<kZeros>.bits));
  }
};

// Widens a word of two qvalues.
struct Bytes {
  static constexpr size_t kBits = 8;
  using Zero = int;

  static LLM_INLINE Zero zero_of(const uint8_t*) { return 0; }

  static LLM_INLINE FloatPairs numbers(const uint8_t* qvalues, size_t part, Zero) {
    const CodeFactor even = load_qvalues(qvalues), odd = high_halves(even);
    auto number = [part](const CodeFactor& words) {
      return (__m512)(part == 0 ? numbers_of<0, 0xff>(words, kByteZero) : numbers_of<8, 0xff>(words, kByteZero))
          .part[0];
    };
    return {number(even), number(odd)};
  }

  static LLM_INLINE __m512i weight_only(const uint8_t* qvalues, size_t part, Zero zero) {
    const FloatPairs found = numbers(qvalues, part, zero);
    return _mm512_or_si512((__m512i)found.odd, _mm512_srli_epi32((__m512i)found.even, 16));  // low halves are zeros
  }
};
#endif

// The zero points of a panel's columns; null: those of all columns are in the middle.
LLM_INLINE Floats zeros_of(size_t bits, const uint8_t* zero) {
  return zero == nullptr ? broadcast(static_cast<float>(1 << (bits - 1))) : load(zero);
}

#if LLM_AVX2_ONLY
#define LLM_WIDENS_IN_REGISTERS
// Qvalues as float32, of one input at a time: a lane of 32 bits has two words, of the even inputs and the odd ones.
template <size_t kQBits>
struct WeightOnlyProduct {
  using Activation = float;
  using Factor = Floats;
  using Sum = Floats;
  using Zero = Floats;
  static constexpr size_t kBits = kQBits;
  static constexpr size_t kFactors = 32 / kBits;
  static constexpr size_t kInputs = kFactors;
  static constexpr bool kIsExact = false;

  static LLM_INLINE Zero zero_of(const uint8_t* zero) { return zeros_of(kBits, zero); }
  static LLM_INLINE Sum begin(const int32_t*) { return zeros(); }
  static LLM_INLINE Factor load_panel(const uint8_t* qvalues, size_t factor, const Zero& zero) {
    const int shift = static_cast<int>(factor % 2 * 16 + factor / 2 * kBits);
    const CodeFactor lanes = load_qvalues(qvalues);
    Factor result;
    LLM_FOR_PARTS {
      const NativeInt numbers = (NativeInt)((NativeUint)lanes.part[i] >> shift) & ((1 << kBits) - 1);
      result.part[i] = __builtin_convertvector(numbers, NativeFloat);
    }
    return result - zero;
  }
  static LLM_INLINE Factor load_activation(const Activation* a, size_t factor) { return broadcast(a[factor]); }
  static LLM_INLINE Sum accumulate(Factor a, Factor b, Sum sum) { return Operand<BFloat16>::accumulate(a, b, sum); }
  static LLM_INLINE Floats finish(Sum sum, Floats scale, Floats before, const uint8_t*, const int32_t*) {
    return multiply_add(sum, scale, before);
  }
};
#elif defined(LLM_PAIR_PRODUCTS)
#define LLM_WIDENS_IN_REGISTERS
template <class QValues>
struct WeightOnlyProduct : QValues, PairProduct {
  static constexpr size_t kFactors = 16 / QValues::kBits;
  static constexpr size_t kInputs = 2 * kFactors;

  static LLM_INLINE Factor load_panel(const uint8_t* qvalues, size_t factor, typename QValues::Zero zero) {
#if defined(LLM_AMX)
    return QValues::numbers(qvalues, factor, zero);
#else
    return of_pairs(QValues::weight_only(qvalues, factor, zero));
#endif
  }
  static LLM_INLINE Factor load_activation(const Activation* a, size_t factor) {
    return broadcast_pair(a + 2 * factor);
  }
  static LLM_INLINE Floats finish(const Sum& sum, Floats scale, Floats before, const uint8_t*, const int32_t*) {
    return multiply_add(total(sum), scale, before);
  }
};

template <class QValues>
constexpr size_t kStepInputs<WeightOnlyProduct<QValues>> = kPairSteps;
template <class QValues>
constexpr size_t kGroupedRows<WeightOnlyProduct<QValues>> = kPairRows;
#endif

#if defined(LLM_WIDENS_IN_REGISTERS)
template <class Op>
void multiply_in_registers(const LinearArgs& args, const WideRows<BFloat16>& x, size_t row, size_t rows,
                           const UnitPanels<WideCode>& panels, float* sums) {
  auto product = grouped_product<Op>(args, panels, rows, sums);
  product.a = x.at(row, 0);
  product.a_stride = x.layout.width;
  product.inputs = x.inputs;
  multiply_grouped(product);
}
#endif

// AVX-512 with bfloat16, without AMX: up to this number of rows, each tile widens 8-bit qvalues in registers. With more
// rows, they are widened once, in the first-level cache.
constexpr size_t kMaxRowsOfBytes = 2 * kTileRows;

// Whether vector instructions widen qvalues in registers as they multiply; rows are then read in row-major layout.
template <class Element>
bool widens_in_registers(const LinearArgs& args) {
#if defined(LLM_WIDENS_IN_REGISTERS)
#if LLM_AVX2_ONLY
  const bool is_quick = args.m <= (args.qvalues->bits == 8 ? kTileRows : kTileRows - 1);
#elif defined(LLM_AMX)
  const bool is_quick = args.m <= kPairRows && args.k % Operand<BFloat16>::kMultiple == 0;  // without padding
#else
  const bool is_quick = args.qvalues->bits == 4 || args.m <= kMaxRowsOfBytes;
#endif
  return std::is_same<Element, BFloat16>::value && is_quick && args.k > 0 && args.k % kInputsOfWords == 0;
#else
  return false && args.m > 0;
#endif
}

// ---- Elements out of qvalues, in memory --------------------------------------------------------------------------

template <class Element>
void widen_blocks(const uint8_t* qvalues, size_t bits, size_t blocks, size_t ahead, const uint8_t* zero,
                  Element* target) {
  const Floats zeros = zeros_of(bits, zero);
  const int mask = (1 << bits) - 1;
  for (size_t block = 0; block < blocks; block++, qvalues += kBlockBytes) {
    __builtin_prefetch(qvalues + ahead);
    for (size_t shift = 0; shift < 16; shift += bits, target += kBlockWords) {
      if constexpr (std::is_same<Element, BFloat16>::value) {  // a lane has an even input and an odd one
        const CodeFactor lanes = load_qvalues(qvalues);
        LLM_FOR_PARTS {
          const NativeUint lane = (NativeUint)lanes.part[i];
          const NativeInt even = (NativeInt)(lane >> shift) & mask, odd = (NativeInt)(lane >> (16 + shift)) & mask;
          const NativeFloat first = __builtin_convertvector(even, NativeFloat) - zeros.part[i];
          const NativeFloat second = __builtin_convertvector(odd, NativeFloat) - zeros.part[i];
          // bfloat16 holds these numbers exactly: the low bits are zeros.
          const NativeUint pairs = (NativeUint)first >> 16 | (NativeUint)second;
          __builtin_memcpy(static_cast<void*>(target + 2 * i * kNative), &pairs, sizeof(pairs));
        }
      } else {
        for (size_t input = 0; input < 2; input++) {
          Floats numbers;
          LLM_FOR_PARTS {
            NativeShort words;
            __builtin_memcpy(&words, qvalues + (input * kLanes + i * kNative) * sizeof(uint16_t), sizeof(words));
            const NativeInt fields = __builtin_convertvector(words, NativeInt) >> static_cast<int>(shift) & mask;
            numbers.part[i] = __builtin_convertvector(fields, NativeFloat) - zeros.part[i];
          }
          store(target + input * kLanes, numbers);
        }
      }
    }
  }
}

#if defined(__AVX512BW__)
template <class QValues>
void widen_blocks(const uint8_t* qvalues, size_t blocks, size_t ahead, const uint8_t* zero, BFloat16* target) {
  const typename QValues::Zero zeros = QValues::zero_of(zero);
  for (size_t block = 0; block < blocks; block++, qvalues += kBlockBytes) {
    __builtin_prefetch(qvalues + ahead);
#pragma GCC unroll 4
    for (size_t part = 0; part < 16 / QValues::kBits; part++, target += kBlockWords) {
      _mm512_storeu_si512(target, QValues::weight_only(qvalues, part, zeros));
    }
  }
}
#endif

// Widens `inputs` of a panel from input `k` on, within one group; `zero` of the panel's columns may be null.
template <class Element>
void widen_panel(const WeightQValues& qvalues, const WideCode* panel, size_t k, size_t inputs, const uint8_t* zero,
                 Element* target) {
  const size_t block_qvalues = kBlockBytes * 8 / qvalues.bits;
  const size_t blocks = (inputs * kPanelWidth + block_qvalues - 1) / block_qvalues;
  const auto* from = reinterpret_cast<const uint8_t*>(panel) + k * kPanelWidth * qvalues.bits / 8;
  // The same panel's next inputs are read after those of the other panels.
  const size_t ahead = blocks * kBlockBytes;
#if defined(__AVX512BW__)
  if constexpr (std::is_same<Element, BFloat16>::value) {
    if (qvalues.bits == 8) return widen_blocks<Bytes>(from, blocks, ahead, zero, target);
    if (zero == nullptr) return widen_blocks<Halves<false>>(from, blocks, ahead, zero, target);
    return widen_blocks<Halves<true>>(from, blocks, ahead, zero, target);
  }
#endif
  widen_blocks<Element>(from, qvalues.bits, blocks, ahead, zero, target);
}

// Up to four panels of a unit.
template <class Element>
void sum_weight_only(const LinearArgs& args, const WideRows<Element>& x, size_t row, size_t rows,
                     const UnitPanels<WideCode>& panels, size_t first, float* totals) {
  const WeightQValues& qvalues = *args.qvalues;
  const size_t count = panels.count - first < kTilePanels ? panels.count - first : kTilePanels;
  const bool is_whole = qvalues.group >= args.k;
  const size_t group_inputs = is_whole ? x.inputs : qvalues.group;
  const size_t at_once = weight_only_inputs(rows);
  const size_t panel_elements = at_once * kPanelWidth;
  const size_t sums = count * rows * kPanelWidth;
  const size_t weight_only_bytes = count * panel_elements * sizeof(Element);
  auto* memory = static_cast<char*>(scratch(Scratch::kPanel, weight_only_bytes + sums * sizeof(float)));
  auto* weight_only = reinterpret_cast<Element*>(memory);
  // The sums of a single group are the totals.
  float* partial = is_whole ? totals : reinterpret_cast<float*>(memory + weight_only_bytes);
  const Element* now[kTilePanels];
  for (size_t p = 0; p < count; p++) now[p] = weight_only + p * panel_elements;
  if (x.inputs == 0) __builtin_memset(totals, 0, sums * sizeof(float));
  auto least = [](size_t a, size_t b) { return a < b ? a : b; };
  for (size_t k = 0; k < x.inputs;) {
    const size_t group = k / group_inputs;
    const size_t group_end = least((group + 1) * group_inputs, x.inputs);
    const size_t end = least(least(k + at_once, group_end), (k / x.pass + 1) * x.pass);
    for (size_t p = 0; p < count; p++) {
      const size_t at = qvalues.number_at(panels.index[first + p], group);
      const uint8_t* zero = qvalues.zero == nullptr ? nullptr : qvalues.zero + at;
      widen_panel(qvalues, panels.data[first + p], k, end - k, zero, weight_only + p * panel_elements);
    }
    Product<Element> product(rows, x.at(row, k), now, count, end - k, partial);
    product.a_stride = x.layout.width;
    product.a_tile = x.layout.tile;
    product.add_to_c = k > group * group_inputs;
    multiply(product);
    if (end == group_end) {
      for (size_t p = 0; p < count; p++) {
        const Floats scale = load(qvalues.scale + qvalues.number_at(panels.index[first + p], group));
        for (size_t r = 0; r < rows; r++) {
          const size_t at = (p * rows + r) * kPanelWidth;
          const Floats before = group == 0 ? zeros() : load(totals + at);
          store(totals + at, multiply_add(load(partial + at), scale, before));
        }
      }
    }
    k = end;
  }
}

template <class Element>
void sum_products(const LinearArgs& args, const WideRows<Element>& x, size_t row, size_t rows,
                  const UnitPanels<WideCode>& panels, float* sums) {
#if defined(LLM_WIDENS_IN_REGISTERS)
  if constexpr (std::is_same<Element, BFloat16>::value) {
    if (widens_in_registers<Element>(args)) {
#if LLM_AVX2_ONLY
      if (args.qvalues->bits == 8) return multiply_in_registers<WeightOnlyProduct<8>>(args, x, row, rows, panels, sums);
      return multiply_in_registers<WeightOnlyProduct<4>>(args, x, row, rows, panels, sums);
#else
      if (args.qvalues->bits == 8)
        return multiply_in_registers<WeightOnlyProduct<Bytes>>(args, x, row, rows, panels, sums);
      if (args.qvalues->zero == nullptr)
        return multiply_in_registers<WeightOnlyProduct<Halves<false>>>(args, x, row, rows, panels, sums);
      return multiply_in_registers<WeightOnlyProduct<Halves<true>>>(args, x, row, rows, panels, sums);
#endif
    }
  }
#endif
  for (size_t first = 0; first < panels.count; first += kTilePanels) {
    sum_weight_only(args, x, row, rows, panels, first, sums + first * rows * kPanelWidth);
  }
}

// Returns rotated rows, rounded to the element type.
template <class Element>
LinearArgs with_rotated_rows(const LinearArgs& args) {
  const size_t stride = args.x_layout.or_rows(args.m, args.k).width;
  auto* rows = static_cast<Element*>(scratch(Scratch::kItems, args.m * args.k * sizeof(Element) + 1));
  for_rows_of_x(args, [&](size_t row) {
    auto* rotated = static_cast<float*>(scratch(Scratch::kPanel, args.k * sizeof(float) + 1));
    rotate_row(static_cast<const Element*>(args.x) + row * stride, args.k, rotated);
    for (size_t i = 0; i < args.k; i += kLanes) {
      store_first(rows + row * args.k + i, load_first(rotated + i, args.k - i), args.k - i);
    }
  });
  LinearArgs result = args;
  result.x = rows;
  result.x_layout = {};
  return result;
}

inline void weight_only_linear(const LinearArgs& given) {
  with_element(given.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    const LinearArgs args = given.qvalues->rotated ? with_rotated_rows<Element>(given) : given;
    if (widens_in_registers<Element>(args)) {
      ActivationForm<Element> form(args.m, args.k);
      form.pass = form.layout.width = args.k;
      form.layout.tile = 0;  // rows are read one by one, not by AMX tiles
      return linear_with<Element>(args, WideRows<Element>{prepare_activations<Element>(args, form)});
    }
    const ActivationForm<Element> form(args.m, args.k);
    linear_with<Element>(args, WideRows<Element>{prepare_activations<Element>(args, form)});
  });
}

}  // namespace llm::LLM_ISA
