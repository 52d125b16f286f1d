#include "codes_product.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "packed_weights.h"

namespace llm {
namespace {

// A weight as products read it, or what of one that is not packed is made for one call.
struct Codes {
  WeightCodes codes;
  const void* data;
  std::vector<uint8_t> packed;
  std::vector<int32_t> sums;

  Codes(const WeightCodes& known, const void* weight) : codes(known), data(weight) {}

  Codes(const uint8_t* rows, size_t n, size_t k) : codes(), sums(Passes::padded(n, kPanelWidth)) {
    const CodedWeight weight = {WeightFormat::kW8A8, DType::kFloat32, 8, rows, nullptr, nullptr, n, k, k == 0 ? 1 : k};
    packed.resize(Passes::padded(n, kPanelWidth) / kPanelWidth * panel_bytes(weight.format, 8, k) + 1);
    pack_codes(weight, packed.data());
    for (size_t row = 0; row < n; row++) {
      const auto* first = reinterpret_cast<const int8_t*>(rows) + row * k;
      sums[row] = std::accumulate(first, first + k, int32_t{0});
    }
    codes.format = weight.format;
    codes.group = weight.group;
    codes.sums = sums.data();
    data = packed.data();
  }
};

void sum(const int8_t* x, size_t m, WeightCodes codes, const void* data, size_t n, size_t k, int32_t* y) {
  codes.scale = nullptr;
  LinearArgs args = {x, data, y, DType::kFloat32, DType::kInt32, m, n, k};
  args.codes = &codes;
  multiply_counted(args);
}

int check(const Call& call, const CodesProduct& product) {
  const int x = product.x, weight = product.weight, y = product.y;
  if (call.rank(x) != 2 || call.rank(weight) != 2 || call.rank(y) != 2) {
    return call.fail("codes and result must have two dimensions");
  }
  if (call.dtype(x) != DType::kInt8 || call.dtype(weight) != DType::kInt8) return call.fail("codes must be int8");
  const size_t m = call.dim(x, 0), k = call.dim(x, 1), n = call.dim(weight, 0);
  if (call.dim(weight, 1) != k || call.dim(y, 0) != m || call.dim(y, 1) != n) {
    return call.fail("shapes [%zu, %zu] x [%zu, %zu] do not fit", m, k, n, call.dim(weight, 1));
  }
  if (k > kMostCodedInputs) return call.fail("at most %zu inputs can be added up, not %zu", kMostCodedInputs, k);
  if (!is_float(call.dtype(y))) return call.fail("the result must be float32, float16 or bfloat16");
  const int scale = product.scale, row_scale = product.row_scale;
  if (scale >= 0 && (!is_float(call.dtype(scale)) || call.elements(scale) != n)) {
    return call.fail("there must be a scale for each of %zu columns", n);
  }
  if (row_scale >= 0 && (call.dtype(row_scale) != DType::kFloat32 || call.elements(row_scale) != m)) {
    return call.fail("there must be a scale of float32 for each of %zu rows", m);
  }
  return 0;
}

}  // namespace

int multiply_codes(const Call& call, const CodesProduct& product) {
  if (const int status = check(call, product)) return status;
  const size_t m = call.dim(product.x, 0), k = call.dim(product.x, 1), n = call.dim(product.weight, 0);
  const auto* weight = call.data<uint8_t>(product.weight);
  const PackedWeight packed(weight, DType::kInt8, n, k);
  const bool is_packed = packed.is_packed();
  if (is_packed && packed.codes()->format != WeightFormat::kW8A8) return call.fail("the weight is not kept as W8A8");
  Codes codes = is_packed ? Codes(*packed.codes(), weight) : Codes(weight, n, k);
  std::vector<float> scale(Passes::padded(n, kPanelWidth), 1.0f), row_scale;
  if (product.scale >= 0) widen(call.data<void>(product.scale), n, call.dtype(product.scale), scale.data());
  if (product.row_scale < 0) row_scale.assign(m, 1.0f);
  codes.codes.scale = scale.data();
  const DType dtype = call.dtype(product.y);
  LinearArgs args = {call.data<void>(product.x), codes.data, call.data<void>(product.y), dtype, dtype, m, n, k};
  args.codes = &codes.codes;
  args.x_scale = product.row_scale < 0 ? row_scale.data() : call.data<const float>(product.row_scale);
  multiply_counted(args);
  return 0;
}

void sum_codes(const int8_t* x, size_t m, const Weight& weight, int32_t* y) {
  sum(x, m, *weight.codes(), weight.data(), weight.rows(), weight.columns(), y);
}

void sum_codes(const int8_t* x, size_t m, const uint8_t* rows, size_t n, size_t k, int32_t* y) {
  const Codes codes(rows, n, k);
  sum(x, m, codes.codes, codes.data, n, k, y);
}

}  // namespace llm
