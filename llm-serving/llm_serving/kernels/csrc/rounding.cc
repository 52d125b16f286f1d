#include "rounding.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>

#include "floating_mode.h"
#include "kernels.h"
#include "thread_pool.h"

namespace llm {
namespace {

constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, as long as there are few bits
constexpr size_t kLanes = 16;              // partial sums of a group, added in the order of formats/quantized_tensor.py

// Scales of 4 bits that are tried: the largest element divided by these numbers. Larger scales represent the largest
// element better, smaller ones the others.
constexpr float kSteps[] = {-8.0f, -7.5f, -8.5f, -9.25f, -10.0f, -11.0f};

constexpr float kLargestChanged = 0x1p100f;  // a larger scale could make a value infinite

float usable(float scale) { return std::fabs(scale) < std::numeric_limits<float>::min() ? 1.0f : scale; }

float rounded(float value, float factor, float least, float most) {
  return std::min(std::max(value * factor + kToInteger - kToInteger, least), most);
}

// Sum of a term for each value.
template <class Term>
float sum_of(const float* values, size_t count, Term term) {
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; lane++) lanes[lane] += term(values[i + lane]);
  }
  for (size_t lane = 0; i + lane < count; lane++) lanes[lane] += term(values[i + lane]);
  for (size_t apart = kLanes / 2; apart > 0; apart /= 2) {
    for (size_t lane = 0; lane < apart; lane++) lanes[lane] += lanes[lane + apart];
  }
  return lanes[0];
}

// Sum of the squared errors of 4-bit values with a scale.
float squared_error(const float* values, size_t count, float scale) {
  const float factor = 1.0f / scale;
  return sum_of(values, count, [&](float value) {
    const float error = value - rounded(value, factor, -8.0f, 7.0f) * scale;
    return error * error;
  });
}

// Returns the scale for numbers that were rounded with `scale`, with which the product of the values and the rounded
// values is the square of the values. With the scale of the smallest error, results are 0.7 % too small on average.
float unshrunk(const float* values, size_t count, float scale) {
  const float factor = 1.0f / scale;
  const float squares = sum_of(values, count, [&](float value) { return value * factor * (value * factor); });
  const float products =
      sum_of(values, count, [&](float value) { return value * factor * rounded(value, factor, -8.0f, 7.0f); });
  return products > 0.0f && std::fabs(scale) < kLargestChanged ? scale * (squares / products) : scale;
}

float scale_of(const float* values, size_t count, float least, float most, size_t bits) {
  if (bits == 8) return usable(std::max(most, -least) / 127.0f);
  const float largest = most >= -least ? most : least;
  float best = usable(largest / kSteps[0]), error = squared_error(values, count, best);
  for (size_t i = 1; i < std::size(kSteps); i++) {
    const float scale = usable(largest / kSteps[i]), other = squared_error(values, count, scale);
    if (other >= error) continue;
    best = scale;
    error = other;
  }
  return best;
}

// Rounds one group of a row. Returns false as round_to_qvalues does.
bool round_group(const float* values, size_t count, size_t bits, uint8_t* qvalues, float* scale) {
  float least = 0.0f, most = 0.0f;
  bool finite = true;
  for (size_t i = 0; i < count; i++) {
    least = std::min(least, values[i]);
    most = std::max(most, values[i]);
    finite &= std::isfinite(values[i]);
  }
  if (!finite) return false;
  *scale = scale_of(values, count, least, most, bits);
  const float factor = 1.0f / *scale, bottom = bits == 8 ? -127.0f : -8.0f, top = bits == 8 ? 127.0f : 7.0f;
  const int zero = bits == 8 ? 0 : 8;
  for (size_t i = 0; i < count; i++) {
    const float found =
        bits == 8 ? values[i] / *scale + kToInteger - kToInteger : rounded(values[i], factor, bottom, top);
    qvalues[i] = static_cast<uint8_t>(static_cast<int>(std::min(std::max(found, bottom), top)) + zero);
  }
  if (bits == 4) *scale = unshrunk(values, count, *scale);
  return true;
}

}  // namespace

bool round_to_qvalues(const void* rows, DType dtype, size_t n, size_t k, size_t bits, size_t group, bool rotates,
                      uint8_t* qvalues, float* scale) {
  const size_t bytes = element_size(dtype, nullptr), groups = k == 0 ? 1 : k / group;
  const size_t block = rotation_block(k);
  std::atomic<bool> finite{true};
  auto body = [&](size_t row) {
    const SubnormalsKept mode;
    auto* values = static_cast<float*>(scratch(Scratch::kPanel, k * sizeof(float) + 1));
    widen(static_cast<const char*>(rows) + row * k * bytes, k, dtype, values);
    if (rotates) {
      const SubnormalsAsZero flushed;
      kernels().rotate(values, k);
    }
    if (rotates) {
      for (size_t i = 0; i < k; i++) values[i] /= static_cast<float>(block);
    }
    for (size_t g = 0; g < groups; g++) {
      const size_t at = g * group, count = std::min(group, k);
      if (!round_group(values + at, count, bits, qvalues + row * k + at, scale + row * groups + g)) finite = false;
    }
  };
  parallel_for(n, body);
  return finite;
}

}  // namespace llm
