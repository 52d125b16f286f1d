// Measures the peak arithmetic of an instruction set, for benchmarks to compare with: multiply-adds on registers only.
#include <atomic>

#include "call.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llm {
namespace {

// Runs `rounds` rounds in one thread; returns the number of multiplications and additions.
using Rounds = double (*)(size_t rounds, float* result);

constexpr size_t kTasksPerThread = 8;
constexpr float kFactor = 0.999f;
constexpr float kTerm = 0.37f;

#if defined(__x86_64__)
// Enough sums to hide the latency of an instruction, few enough to stay in registers.
constexpr size_t kSums512 = 24;
constexpr size_t kSums256 = 12;

__attribute__((target("avx512f"))) double avx512(size_t rounds, float* result) {
  const __m512 factor = _mm512_set1_ps(kFactor);
  const __m512 term = _mm512_set1_ps(kTerm);
  __m512 sums[kSums512];
  for (size_t i = 0; i < kSums512; i++) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
    for (size_t i = 0; i < kSums512; i++) sums[i] = _mm512_fmadd_ps(sums[i], factor, term);
  }
  for (size_t i = 1; i < kSums512; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  *result = _mm512_cvtss_f32(sums[0]);
  return 2.0 * 16 * kSums512 * static_cast<double>(rounds);
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) double avx512_bf16(size_t rounds, float* result) {
  const __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f7f);
  const __m512bh term = (__m512bh)_mm512_set1_epi16(static_cast<int16_t>(0xbebd));
  __m512 sums[kSums512];
  for (size_t i = 0; i < kSums512; i++) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
    for (size_t i = 0; i < kSums512; i++) sums[i] = _mm512_dpbf16_ps(sums[i], factor, term);
  }
  for (size_t i = 1; i < kSums512; i++) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  *result = _mm512_cvtss_f32(sums[0]);
  return 2.0 * 32 * kSums512 * static_cast<double>(rounds);
}

__attribute__((target("avx512f,avx512vnni"))) double avx512_vnni(size_t rounds, float* result) {
  typedef int32_t Integers __attribute__((vector_size(64)));
  const __m512i factor = _mm512_set1_epi16(0x3a7);
  const __m512i term = _mm512_set1_epi16(-0x5d3);
  Integers sums[kSums512];
  for (size_t i = 0; i < kSums512; i++) sums[i] = Integers{} + static_cast<int32_t>(i);
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
    for (size_t i = 0; i < kSums512; i++) sums[i] = (Integers)_mm512_dpwssd_epi32((__m512i)sums[i], factor, term);
  }
  for (size_t i = 1; i < kSums512; i++) sums[0] += sums[i];
  *result = static_cast<float>(sums[0][0]);
  return 2.0 * 32 * kSums512 * static_cast<double>(rounds);
}

__attribute__((target("avx512f,avx512vnni"))) double avx512_int8(size_t rounds, float* result) {
  const __m512i factor = _mm512_set1_epi8(static_cast<char>(0xa7));
  const __m512i term = _mm512_set1_epi8(-0x5d);
  typedef int32_t Integers __attribute__((vector_size(64)));
  Integers sums[kSums512];
  for (size_t i = 0; i < kSums512; i++) sums[i] = Integers{} + static_cast<int32_t>(i);
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 24
    for (size_t i = 0; i < kSums512; i++) sums[i] = (Integers)_mm512_dpbusd_epi32((__m512i)sums[i], factor, term);
  }
  for (size_t i = 1; i < kSums512; i++) sums[0] ^= sums[i];
  *result = static_cast<float>(sums[0][0]);
  return 2.0 * 64 * kSums512 * static_cast<double>(rounds);
}

__attribute__((target("avx2,fma"))) double avx2(size_t rounds, float* result) {
  const __m256 factor = _mm256_set1_ps(kFactor);
  const __m256 term = _mm256_set1_ps(kTerm);
  __m256 sums[kSums256];
  for (size_t i = 0; i < kSums256; i++) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (size_t i = 0; i < kSums256; i++) sums[i] = _mm256_fmadd_ps(sums[i], factor, term);
  }
  for (size_t i = 1; i < kSums256; i++) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  *result = _mm256_cvtss_f32(sums[0]);
  return 2.0 * 8 * kSums256 * static_cast<double>(rounds);
}

// 8-bit integers, widened to 16 bits in advance.
__attribute__((target("avx2"))) double avx2_int8(size_t rounds, float* result) {
  const __m256i factor = _mm256_set1_epi16(-89);
  const __m256i term = _mm256_set1_epi16(93);
  typedef int32_t Integers __attribute__((vector_size(32)));
  Integers sums[kSums256];
  for (size_t i = 0; i < kSums256; i++) sums[i] = Integers{} + static_cast<int32_t>(i);
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (size_t i = 0; i < kSums256; i++) {
      __m256i product;
      asm volatile("vpmaddwd %1, %2, %0" : "=x"(product) : "x"(factor), "x"(term));  // not once for all sums
      sums[i] += (Integers)product;
    }
  }
  for (size_t i = 1; i < kSums256; i++) sums[0] ^= sums[i];
  *result = static_cast<float>(sums[0][0]);
  return 2.0 * 16 * kSums256 * static_cast<double>(rounds);
}

__attribute__((target("avx2,avxvnni"))) double avx_vnni(size_t rounds, float* result) {
  const __m256i factor = _mm256_set1_epi8(static_cast<char>(0xa7));
  const __m256i term = _mm256_set1_epi8(-0x5d);
  typedef int32_t Integers __attribute__((vector_size(32)));
  Integers sums[kSums256];
  for (size_t i = 0; i < kSums256; i++) sums[i] = Integers{} + static_cast<int32_t>(i);
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
    for (size_t i = 0; i < kSums256; i++) {
      sums[i] = (Integers)_mm256_dpbusd_avx_epi32((__m256i)sums[i], factor, term);
    }
  }
  for (size_t i = 1; i < kSums256; i++) sums[0] ^= sums[i];
  *result = static_cast<float>(sums[0][0]);
  return 2.0 * 32 * kSums256 * static_cast<double>(rounds);
}

// Four sums of 16 x 16 from two tiles of activations and two of weights, as in products. The tiles hold irregular
// numbers: with zeros the units use less power and run faster than in any product.
template <bool kQValues>
double amx(size_t rounds, float* result) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  alignas(64) uint16_t elements[512];
  alignas(64) float sums[256];
  for (size_t i = 0; i < 512; i++) elements[i] = static_cast<uint16_t>(0x3f00 + i * 37 % 128 + i % 2 * 0x8000);
  const int64_t stride = 64;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
  asm volatile(
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%0,%1,1), %%tmm5\n\t"
      "tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm7" ::"r"(elements),
      "r"(stride)
      : "memory");
  for (size_t round = 0; round < rounds; round++) {
    if constexpr (kQValues) {
      asm volatile(
          "tdpbusd %tmm6, %tmm4, %tmm0\n\ttdpbusd %tmm7, %tmm4, %tmm1\n\t"
          "tdpbusd %tmm6, %tmm5, %tmm2\n\ttdpbusd %tmm7, %tmm5, %tmm3");
    } else {
      asm volatile(
          "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
          "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    }
  }
  asm volatile("tilestored %%tmm0, (%0,%1,1)\n\ttilerelease" ::"r"(sums), "r"(stride) : "memory");
  *result = sums[0];
  return 4.0 * 2 * 16 * 16 * (kQValues ? 64 : 32) * static_cast<double>(rounds);
}
#endif

// Four floats at a time, as the compiler vectorises plain loops on the baseline instruction set.
double plain(size_t rounds, float* result) {
  typedef float Four __attribute__((vector_size(16)));
  constexpr size_t kSums = 8;
  Four sums[kSums];
  for (size_t i = 0; i < kSums; i++) sums[i] = Four{} + static_cast<float>(i);
  for (size_t round = 0; round < rounds; round++) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kSums; i++) sums[i] = sums[i] * kFactor + kTerm;
  }
  *result = 0.0f;
  for (size_t i = 0; i < kSums; i++) *result += sums[i][0];
  return 2.0 * 4 * kSums * static_cast<double>(rounds);
}

// Returns the instruction that the products of `isa` use for elements of `dtype`.
Rounds rounds_of(const char* isa, DType dtype) {
#if defined(__x86_64__)
  const bool is_vnni = std::strcmp(isa, "avx512_bf16") == 0 || std::strcmp(isa, "avx512_vnni") == 0;
  if (dtype == DType::kInt8 && std::strcmp(isa, "amx") == 0) return amx<true>;
  if (dtype == DType::kInt8 && is_vnni) return avx512_int8;
  if (dtype == DType::kBFloat16 && std::strcmp(isa, "amx") == 0) return amx<false>;
  if (dtype == DType::kBFloat16 && std::strcmp(isa, "avx512_bf16") == 0) return avx512_bf16;
  if (dtype == DType::kBFloat16 && std::strcmp(isa, "avx512_vnni") == 0) return avx512_vnni;
  if (std::strncmp(isa, "avx512", 6) == 0 || std::strcmp(isa, "amx") == 0) return avx512;
  if (dtype == DType::kInt8 && std::strcmp(isa, "avx_vnni") == 0) return avx_vnni;
  if (dtype == DType::kInt8 && std::strcmp(isa, "avx2") == 0) return avx2_int8;
  if (std::strncmp(isa, "avx", 3) == 0) return avx2;
#endif
  (void)isa;
  (void)dtype;
  return plain;
}

}  // namespace
}  // namespace llm

// Multiplies and adds with all threads of the kernels, with the instructions of a set that this CPU must support;
// returns the number of multiplications and additions.
LLM_EXPORT double llm_multiply_add(const char* isa, const char* dtype, int64_t rounds) {
  using namespace llm;
  const Rounds run = rounds_of(isa, parse_dtype(dtype));
  const size_t tasks = kTasksPerThread * num_threads();
  std::atomic<double> operations{0.0};
  std::atomic<float> kept{0.0f};  // keeps the compiler from removing the arithmetic
  auto task = [&](size_t) {
    float result;
    double seen = operations.load();
    const double done = run(static_cast<size_t>(rounds) / kTasksPerThread, &result);
    while (!operations.compare_exchange_weak(seen, seen + done)) {
    }
    kept.store(result);
  };
  parallel_for(tasks, task);
  return operations.load();
}
