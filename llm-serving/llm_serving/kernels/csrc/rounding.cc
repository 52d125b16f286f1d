#include "rounding.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "floating_mode.h"
#include "thread_pool.h"

namespace llm {
namespace {

constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, as long as there are few bits
constexpr size_t kAtOnce = 4096;           // elements

// Magnitudes of finite numbers are ordered like their bits without the sign.
uint32_t largest_bits(const float* values, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7fffffff);
  }
  return largest;
}

float scale_of(float largest, size_t bits) {
  const float scale = largest / (bits == 8 ? 127.0f : 7.5f);
  return scale < std::numeric_limits<float>::min() ? 1.0f : scale;
}

void round_values(const float* values, size_t count, float scale, size_t bits, uint8_t* qvalues) {
  const float least = bits == 8 ? -127.0f : -8.0f, most = bits == 8 ? 127.0f : 7.0f;
  const int zero = bits == 8 ? 0 : 8;
  for (size_t i = 0; i < count; i++) {
    const float rounded = values[i] / scale + kToInteger - kToInteger;
    qvalues[i] = static_cast<uint8_t>(static_cast<int>(std::min(std::max(rounded, least), most)) + zero);
  }
}

// Rounds one group of a row; `values` has room for kAtOnce. Returns false as round_to_qvalues does.
bool round_group(const char* elements, DType dtype, size_t count, size_t bits, float* values, uint8_t* qvalues,
                 float* scale) {
  const size_t bytes = element_size(dtype, nullptr);
  uint32_t largest = 0;
  for (size_t i = 0; i < count; i += kAtOnce) {
    const size_t some = std::min(kAtOnce, count - i);
    widen(elements + i * bytes, some, dtype, values);
    largest = std::max(largest, largest_bits(values, some));
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof(magnitude));
  if (!std::isfinite(magnitude)) return false;
  *scale = scale_of(magnitude, bits);
  for (size_t i = 0; i < count; i += kAtOnce) {
    const size_t some = std::min(kAtOnce, count - i);
    if (count > kAtOnce) widen(elements + i * bytes, some, dtype, values);
    round_values(values, some, *scale, bits, qvalues + i);
  }
  return true;
}

}  // namespace

bool round_to_qvalues(const void* rows, DType dtype, size_t n, size_t k, size_t bits, size_t group, uint8_t* qvalues,
                      float* scale) {
  const size_t bytes = element_size(dtype, nullptr), groups = k == 0 ? 1 : k / group;
  std::atomic<bool> finite{true};
  auto body = [&](size_t row) {
    const SubnormalsKept mode;
    auto* values = static_cast<float*>(scratch(Scratch::kPanel, kAtOnce * sizeof(float)));
    for (size_t g = 0; g < groups; g++) {
      const size_t at = row * k + g * group, count = std::min(group, k);
      const auto* elements = static_cast<const char*>(rows) + at * bytes;
      if (!round_group(elements, dtype, count, bits, values, qvalues + at, scale + row * groups + g)) finite = false;
    }
  };
  parallel_for(n, body);
  return finite;
}

}  // namespace llm
