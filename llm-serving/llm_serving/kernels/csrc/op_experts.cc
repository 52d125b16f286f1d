// MoeGatingTopKSoftmax, MoeInitRoutingV2, GroupedMatmulV4 and MoeTokenUnpermute: route rows to their experts, multiply
// them by the experts' weights, and sum the results.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "parts.h"
#include "quantized_product.h"
#include "thread_pool.h"

// x, finished (absent), k | the k largest scores of each row, their experts, and the index of each in the order of all
// rows' best, then all rows' second, ..
LLM_OPERATOR(MoeGatingTopKSoftmax) {
  using namespace llm;
  if (call.count() < 6) return call.fail("expects 6 parameters, got %d", call.count());
  if (call.present(1)) return call.fail("finished must be None");
  if (call.dtype(0) != DType::kFloat32 || call.dtype(3) != DType::kFloat32 || call.rank(0) != 2) {
    return call.fail("x must be float32 [rows, experts]");
  }
  const size_t rows = call.dim(0, 0), experts = call.dim(0, 1);
  const int64_t k = call.integer(2);
  if (k < 1 || static_cast<size_t>(k) > experts) {
    return call.fail("k must be between 1 and %zu, is %lld", experts, static_cast<long long>(k));
  }
  const size_t top_k = static_cast<size_t>(k);
  for (int y = 3; y < 6; y++) {
    if (call.elements(y) != rows * top_k) return call.fail("result %d must be [%zu, %zu]", y - 3, rows, top_k);
  }
  const auto* x = call.data<const float>(0);
  std::vector<float> scores(x, x + rows * experts);
  kernels().route({scores.data(), nullptr, nullptr, call.data<float>(3), call.data<int32_t>(4), rows, experts, top_k,
                   top_k, top_k, false, false, 1.0f, 1, 1});
  for (size_t i = 0; i < rows * top_k; i++) {
    call.data<int32_t>(5)[i] = static_cast<int32_t>(i % top_k * rows + i / top_k);
  }
  return 0;
}

namespace llm {
namespace {

constexpr int64_t kSums = 1, kCounts = 2;  // output for each expert: the end of its rows, or their number

}  // namespace
}  // namespace llm

// x, experts, active_num, capacity, number of experts, drop_pad_mode, kind of output for experts, before capacity | the
// rows of each expert one after another, the new index of each row, the output for experts, the same before dropping
LLM_OPERATOR(MoeInitRoutingV2) {
  using namespace llm;
  if (call.count() < 12) return call.fail("expects 12 parameters, got %d", call.count());
  if (call.rank(0) != 2 || call.rank(1) != 2 || call.dim(1, 0) != call.dim(0, 0) || call.dtype(1) != DType::kInt32) {
    return call.fail("x must be [rows, size] and experts int32 [rows, k]");
  }
  if (call.integer(2) != 0 || call.integer(5) != 0) return call.fail("rows are dropped by no mode of this kernel");
  const int64_t told = call.integer(6);
  const size_t k = call.dim(1, 1), topk_ids = call.elements(1), experts = static_cast<size_t>(call.integer(4));
  const size_t bytes = call.dim(0, 1) * call.element_bytes(0);
  if (told != kSums && told != kCounts) return call.fail("rows of experts must be told as 1 or 2");
  if (call.elements(8) * call.element_bytes(8) != topk_ids * bytes || call.elements(9) != topk_ids ||
      call.elements(10) != experts) {
    return call.fail("the results do not fit %zu rows of %zu experts", topk_ids, experts);
  }
  if (const int status = call.check_within(1, "experts", 0, experts, "experts")) return status;
  auto* counts = call.data<int32_t>(10);
  std::fill_n(counts, experts, 0);
  for (size_t i = 0; i < topk_ids; i++) counts[call.integer(1, i)]++;
  std::vector<int32_t> next(experts);
  std::exclusive_scan(counts, counts + experts, next.begin(), 0);
  auto* position = call.data<int32_t>(9);
  for (size_t i = 0; i < topk_ids; i++) position[i] = next[static_cast<size_t>(call.integer(1, i))]++;
  if (call.elements(11) == experts) std::copy_n(counts, experts, call.data<int32_t>(11));
  if (told == kSums) std::partial_sum(counts, counts + experts, counts);
  auto body = [&](size_t i) {
    std::memcpy(call.data<char>(8) + static_cast<size_t>(position[i]) * bytes, call.data<char>(0) + i / k * bytes,
                bytes);
  };
  parallel_for(topk_ids, body);
  return 0;
}

namespace llm {
namespace {

// Returns the weight [k, n] of an expert as [n, k].
std::vector<char> transposed(const char* source, size_t bytes, size_t n, size_t k) {
  std::vector<char> rows(n * k * bytes);
  for (size_t input = 0; input < k; input++) {
    for (size_t column = 0; column < n; column++) {
      std::memcpy(rows.data() + (column * k + input) * bytes, source + (input * n + column) * bytes, bytes);
    }
  }
  return rows;
}

// Multiplies the rows of an expert by its weight, packed or [k, n].
void multiply_expert(const Weight& all, const char* weight, size_t expert, LinearArgs args) {
  const size_t n = args.n, k = args.k, bytes = element_size(args.dtype, nullptr);
  if (all.is_packed()) {
    return multiply_counted(all.part(expert * n, n).product({args.m, k}, args.x, args.y));
  }
  const std::vector<char> rows = transposed(weight + expert * k * n * bytes, bytes, n, k);
  std::vector<char> packed(rows.size());
  pack_weight(rows.data(), packed.data(), args.dtype, n, k);
  args.weight = packed.data();
  kernels().linear(args);
}

// The same for qvalues, with int32 results.
void sum_expert(const Weight& all, const char* weight, size_t expert, LinearArgs args) {
  const size_t n = args.n, k = args.k;
  const auto* x = static_cast<const int8_t*>(args.x);
  auto* y = static_cast<int32_t*>(args.y);
  if (all.is_packed()) return sum_qvalues(x, args.m, all.part(expert * n, n), y);
  const std::vector<char> rows = transposed(weight + expert * k * n, 1, n, k);
  sum_qvalues(x, args.m, reinterpret_cast<const uint8_t*>(rows.data()), n, k, y);
}

int check_grouped(const Call& call) {
  for (int i : {2, 3, 4, 5, 6, 7, 9, 10, 11}) {
    if (call.present(i)) return call.fail("parameter %d must be None", i);
  }
  if (call.integer(12) != 3 || call.integer(13) != 0 || call.integer(15) != 0) {
    return call.fail("split_item must be 3, group_type and act_type 0");
  }
  if (call.integer(14) < 0 || call.integer(14) > 1) return call.fail("group_list_type must be 0 or 1");
  if (call.rank(0) != 2 || call.rank(1) != 3 || call.rank(17) != 2) {
    return call.fail("x and the result must have two dimensions, the weight three");
  }
  const size_t experts = call.dim(1, 0), k = call.dim(1, 1), n = call.dim(1, 2);
  const bool is_quantized = call.dtype(0) == DType::kInt8;
  const DType result = is_quantized ? DType::kInt32 : call.dtype(0);
  if ((!is_quantized && !is_float(call.dtype(0))) || call.dtype(17) != result) {
    return call.fail("x must be of floats and y of its type, or x int8 and y int32");
  }
  if (is_quantized && k > kMaxQuantizedInputs) {
    return call.fail("at most %zu inputs can be added up, not %zu", kMaxQuantizedInputs, k);
  }
  if (call.dim(0, 1) != k || call.dim(17, 0) != call.dim(0, 0) || call.dim(17, 1) != n) {
    return call.fail("shapes [%zu, %zu] x [%zu, %zu] do not fit", call.dim(0, 0), call.dim(0, 1), k, n);
  }
  if (!call.present(8) || !call.is_integer(8) || call.elements(8) != experts) {
    return call.fail("group_list must tell of %zu experts", experts);
  }
  return 0;
}

}  // namespace
}  // namespace llm

// x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, pre_token_scale, group_list, activation_input,
// activation_quant_scale, activation_quant_offset, split_item, group_type, group_list_type, act_type, output_dtype | y:
// the rows of each expert, one expert after another, times its weight [k, n]; of qvalues without scales, sums in int32
LLM_OPERATOR(GroupedMatmulV4) {
  using namespace llm;
  if (call.count() != 18) return call.fail("expects 18 parameters, got %d", call.count());
  if (const int status = check_grouped(call)) return status;
  const size_t experts = call.dim(1, 0), k = call.dim(1, 1), n = call.dim(1, 2), rows = call.dim(0, 0);
  const DType dtype = call.dtype(0);
  const bool is_quantized = dtype == DType::kInt8;
  const Weight all(call.data<void>(1), call.dtype(1), experts * n, k);
  if (is_quantized ? call.dtype(1) != dtype : all.dtype() != dtype) {
    return call.fail("x and the weight must be of one type");
  }
  if (is_quantized && all.is_packed() && all.qvalues()->format != WeightFormat::kW8A8) {
    return call.fail("the weight is not kept as W8A8");
  }
  if (all.is_packed() && n % kPanelWidth != 0) return call.fail("%zu columns must be a multiple of 16", n);
  if (all.is_packed() && !can_multiply(all.qvalues())) return call.fail("%s", kOtherKernels);
  size_t begin = 0;
  for (size_t expert = 0; expert < experts; expert++) {
    const int64_t told = call.integer(8, expert);
    const int64_t end = call.integer(14) == 1 ? static_cast<int64_t>(begin) + told : told;
    if (end < static_cast<int64_t>(begin) || end > static_cast<int64_t>(rows)) {
      return call.fail("group_list[%zu] = %lld does not fit %zu rows", expert, static_cast<long long>(told), rows);
    }
    const size_t count = static_cast<size_t>(end) - begin;
    const char* x = call.data<char>(0) + begin * k * call.element_bytes(0);
    char* y = call.data<char>(17) + begin * n * call.element_bytes(17);
    begin = static_cast<size_t>(end);
    if (count == 0) continue;
    const LinearArgs args = {x, nullptr, y, dtype, dtype, count, n, k};
    (is_quantized ? sum_expert : multiply_expert)(all, call.data<char>(1), expert, args);
  }
  return 0;
}

// rows of experts, new index of each row, weights, padded_mode, restore_shape (absent) | the weighted sum of each row's
// results, in the order of the rows of experts
LLM_OPERATOR(InnerMoeTokenUnpermute) {
  using namespace llm;
  if (call.count() < 6) return call.fail("expects 6 parameters, got %d", call.count());
  if (call.boolean(3) || call.present(4)) return call.fail("padded_mode must be False and restore_shape None");
  if (call.rank(0) != 2 || !call.present(2) || call.rank(2) != 2 || call.rank(5) != 2) {
    return call.fail("rows, shares and result must have two dimensions");
  }
  const size_t rows = call.dim(2, 0), k = call.dim(2, 1), size = call.dim(0, 1);
  const DType dtype = call.dtype(0);
  if (!is_float(dtype) || call.dtype(5) != dtype || !is_float(call.dtype(2))) {
    return call.fail("rows, shares and result must be floats");
  }
  if (call.dim(0, 0) != rows * k || call.elements(1) != rows * k || call.dtype(1) != DType::kInt32 ||
      call.dim(5, 0) != rows || call.dim(5, 1) != size) {
    return call.fail("%zu rows and the result do not fit shares [%zu, %zu]", call.dim(0, 0), rows, k);
  }
  if (const int status = call.check_within(1, "sorted_indices", 0, rows * k, "rows")) return status;
  std::vector<float> topk_weights(rows * k), sums(rows * size, 0.0f), share(rows);
  widen(call.data<void>(2), topk_weights.size(), call.dtype(2), topk_weights.data());
  const auto* position = call.data<const int32_t>(1);
  std::vector<uint32_t> order(rows * k), from(rows), index(rows);
  std::iota(order.begin(), order.end(), 0u);
  std::iota(index.begin(), index.end(), 0u);
  for (size_t row = 0; row < rows; row++) {
    std::sort(order.begin() + static_cast<ptrdiff_t>(row * k), order.begin() + static_cast<ptrdiff_t>((row + 1) * k),
              [&](uint32_t a, uint32_t b) { return position[a] < position[b]; });
  }
  for (size_t rank = 0; rank < k; rank++) {
    for (size_t row = 0; row < rows; row++) {
      const uint32_t at = order[row * k + rank];
      from[row] = static_cast<uint32_t>(position[at]);
      share[row] = topk_weights[at];
    }
    kernels().gather_sum({call.data<void>(0), from.data(), index.data(), share.data(), sums.data(), dtype, rows, size});
  }
  kernels().round({sums.data(), nullptr, call.data<void>(5), dtype, rows, size, 0, size, 1.0f});
  return 0;
}
