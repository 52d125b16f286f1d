#include "quantized_product.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "packed_weights.h"

namespace llm {
namespace {

// A weight as products read it: packed, or a packed copy made for one call.
struct QValues {
  WeightQValues qvalues;
  const void* data;
  std::vector<uint8_t> packed;
  std::vector<int32_t> sums;

  QValues(const WeightQValues& known, const void* weight) : qvalues(known), data(weight) {}

  QValues(const uint8_t* rows, size_t n, size_t k) : qvalues(), sums(TiledLayout::padded(n, kPanelWidth)) {
    const QuantizedWeight weight = {WeightFormat::kW8A8, DType::kFloat32, 8, rows, nullptr, nullptr, n, k,
                                    k == 0 ? 1 : k};
    packed.resize(TiledLayout::padded(n, kPanelWidth) / kPanelWidth * panel_bytes(weight.format, 8, k) + 1);
    pack_qvalues(weight, packed.data());
    for (size_t row = 0; row < n; row++) {
      const auto* first = reinterpret_cast<const int8_t*>(rows) + row * k;
      sums[row] = std::accumulate(first, first + k, int32_t{0});
    }
    qvalues.format = weight.format;
    qvalues.group = weight.group;
    qvalues.sums = sums.data();
    data = packed.data();
  }
};

void sum(const int8_t* x, size_t m, WeightQValues qvalues, const void* data, size_t n, size_t k, int32_t* y) {
  qvalues.scale = nullptr;
  LinearArgs args = {x, data, y, DType::kFloat32, DType::kInt32, m, n, k};
  args.qvalues = &qvalues;
  multiply_counted(args);
}

int check(const Call& call, const QValuesProduct& product) {
  const int x = product.x, weight = product.weight, y = product.y;
  if (call.rank(x) != 2 || call.rank(weight) != 2 || call.rank(y) != 2) {
    return call.fail("codes and result must have two dimensions");
  }
  if (call.dtype(x) != DType::kInt8 || call.dtype(weight) != DType::kInt8) return call.fail("codes must be int8");
  const size_t m = call.dim(x, 0), k = call.dim(x, 1), n = call.dim(weight, 0);
  if (call.dim(weight, 1) != k || call.dim(y, 0) != m || call.dim(y, 1) != n) {
    return call.fail("shapes [%zu, %zu] x [%zu, %zu] do not fit", m, k, n, call.dim(weight, 1));
  }
  if (k > kMaxQuantizedInputs) return call.fail("at most %zu inputs can be added up, not %zu", kMaxQuantizedInputs, k);
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

int multiply_qvalues(const Call& call, const QValuesProduct& product) {
  if (const int status = check(call, product)) return status;
  const size_t m = call.dim(product.x, 0), k = call.dim(product.x, 1), n = call.dim(product.weight, 0);
  const auto* weight = call.data<uint8_t>(product.weight);
  const PackedWeight packed(weight, DType::kInt8, n, k);
  const bool is_packed = packed.is_packed();
  if (is_packed && packed.qvalues()->format != WeightFormat::kW8A8) return call.fail("the weight is not kept as W8A8");
  QValues qvalues = is_packed ? QValues(*packed.qvalues(), weight) : QValues(weight, n, k);
  std::vector<float> scale(TiledLayout::padded(n, kPanelWidth), 1.0f), row_scale;
  if (product.scale >= 0) widen(call.data<void>(product.scale), n, call.dtype(product.scale), scale.data());
  if (product.row_scale < 0) row_scale.assign(m, 1.0f);
  qvalues.qvalues.scale = scale.data();
  const DType dtype = call.dtype(product.y);
  LinearArgs args = {call.data<void>(product.x), qvalues.data, call.data<void>(product.y), dtype, dtype, m, n, k};
  args.qvalues = &qvalues.qvalues;
  args.x_scale = product.row_scale < 0 ? row_scale.data() : call.data<const float>(product.row_scale);
  multiply_counted(args);
  return 0;
}

void sum_qvalues(const int8_t* x, size_t m, const Weight& weight, int32_t* y) {
  sum(x, m, *weight.qvalues(), weight.data(), weight.rows(), weight.columns(), y);
}

void sum_qvalues(const int8_t* x, size_t m, const uint8_t* rows, size_t n, size_t k, int32_t* y) {
  const QValues qvalues(rows, n, k);
  sum(x, m, qvalues.qvalues, qvalues.data, n, k, y);
}

}  // namespace llm
