// Operations of experts: route, experts.
#include <algorithm>
#include <cstring>
#include <vector>

#include "program.h"
#include "thread_pool.h"

namespace llm {
namespace {

// route: topk_weights topk_ids | x | weight bias correction factors | top_k score normalise scale groups top_groups
// margin. Logits are not rounded; score 0 is a softmax, 1 a sigmoid of each, 2 SparseMixer with that margin.

enum RouteAttribute { kTopK, kScore, kNormalise, kRouteScale, kGroups, kTopGroups, kMargin };

int check_route(const Instruction& in) {
  const Operand *topk_weights = in.output(0), *topk_ids = in.output(1), *x = in.input(0);
  if (x == nullptr) return in.fail("x is absent");
  if (const int status = in.check_rows("x", x, x->selected)) return status;
  if (const int status = in.check_rows("topk_weights", topk_weights, DType::kFloat32, x->selected)) return status;
  if (const int status = in.check_rows("topk_ids", topk_ids, DType::kInt32, x->selected)) return status;
  if (!in.has_weight(0)) return in.fail("weight is absent");
  const int parameter = in.parameter(0);
  const size_t experts = in.call().rank(parameter) == 2 ? in.call().dim(parameter, 0) : 0;
  if (const int status = in.check_product("weight", 0, experts, x->width)) return status;
  const int64_t groups = in.integer(kGroups), top_groups = in.integer(kTopGroups), top_k = in.integer(kTopK);
  if (groups < 1 || experts % static_cast<size_t>(groups) != 0 || top_groups < 1 || top_groups > groups) {
    return in.fail("%zu experts cannot be of %lld groups, %lld of them chosen", experts, static_cast<long long>(groups),
                   static_cast<long long>(top_groups));
  }
  const int64_t most = static_cast<int64_t>(experts) / groups * top_groups;
  if (top_k < 1 || top_k > most) {
    return in.fail("top_k must be between 1 and %lld, is %lld", static_cast<long long>(most),
                   static_cast<long long>(top_k));
  }
  if (const int status = in.check_width("topk_weights", *topk_weights, static_cast<size_t>(top_k))) return status;
  if (const int status = in.check_width("topk_ids", *topk_ids, static_cast<size_t>(top_k))) return status;
  if (in.integer(kScore) < 0 || in.integer(kScore) > 2) {
    return in.fail("score must be from 0 to 2, is %d", in.integer(kScore));
  }
  for (const int weight : {1, 2, 3}) {
    if (in.has_weight(weight) && (in.call().dtype(in.parameter(weight)) != DType::kFloat32 ||
                                  in.call().elements(in.parameter(weight)) != experts)) {
      constexpr const char* kNames[] = {"bias", "correction", "factors"};
      return in.fail("%s must be float32, one for each of %zu experts", kNames[weight - 1], experts);
    }
  }
  return 0;
}

int run_route(const Instruction& in) {
  const Rows x = in.rows(in.input(0)), topk_weights = in.rows(in.output(0)), topk_ids = in.rows(in.output(1));
  const Weight& weight = in.weight(0);
  const size_t experts = weight.rows();
  auto* logits = static_cast<float*>(scratch(Scratch::kScores, x.count * experts * sizeof(float) + 1));
  LinearArgs product = weight.product(x.layout(), x.data, logits);
  product.y_dtype = DType::kFloat32;
  multiply(product);
  static OperatorClock clock("Route");
  const Timed timed(clock);
  auto size = [&](int attribute) { return static_cast<size_t>(in.integer(attribute)); };
  kernels().route({logits, reinterpret_cast<const float*>(in.weight_data(1)),
                   reinterpret_cast<const float*>(in.weight_data(2)), reinterpret_cast<float*>(topk_weights.data),
                   reinterpret_cast<int32_t*>(topk_ids.data), x.count, experts, size(kTopK), topk_weights.stride,
                   topk_ids.stride, in.integer(kScore) == 1, in.integer(kNormalise) != 0, in.number(kRouteScale),
                   size(kGroups), size(kTopGroups), reinterpret_cast<const float*>(in.weight_data(3)),
                   in.integer(kScore) == 2, in.number(kMargin)});
  return 0;
}

// experts: y | x topk_weights topk_ids residual | gate_up down gate_up_bias down_bias | function scale experts
// scales_input. Each
// row is the sum over its experts, in ascending order and in float32, of topk_weight * down(function(gate) * up), whose
// products are rounded as in linear; then `residual` as in linear. Rows of an expert are multiplied together, and only
// selected experts are read. With scales_input, the weight multiplies x instead, rounded. If the function is a squared
// ReLU, an expert has no gate.

constexpr int32_t kSquaredRelu = 8;

struct ExpertSizes {
  size_t experts, hidden, inner, first;  // first: rows of the first product of an expert

  explicit ExpertSizes(const Instruction& in)
      : experts(static_cast<size_t>(in.integer(2))),
        hidden(in.weight(1).rows() / experts),
        inner(in.weight(1).columns()),
        first(in.integer(0) == kSquaredRelu ? inner : 2 * inner) {}
};

int check_experts(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0), *topk_weights = in.input(1), *topk_ids = in.input(2),
                *residual = in.input(3);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_rows("topk_weights", topk_weights, DType::kFloat32, y->selected)) return status;
  if (const int status = in.check_rows("topk_ids", topk_ids, DType::kInt32, y->selected)) return status;
  if (const int status = in.check_width("topk_ids", *topk_ids, topk_weights->width)) return status;
  if (residual != nullptr) {
    if (const int status = in.check_rows("residual", residual, y->selected)) return status;
    if (const int status = in.check_width("residual", *residual, y->width)) return status;
  } else if (in.number(1) != 1.0f) {
    return in.fail("scale is of what is added to something");
  }
  if (!is_gate(in.integer(0)) && in.integer(0) != kSquaredRelu) {
    return in.fail("function must be from 1 to 4, or 8, is %d", in.integer(0));
  }
  if (in.integer(2) < 1) return in.fail("there must be an expert, not %d", in.integer(2));
  const size_t experts = static_cast<size_t>(in.integer(2));
  if (!in.has_weight(1)) return in.fail("down is absent");
  const Weight* down = in.program().weight(static_cast<size_t>(in.weight_number(1)));
  const size_t inner = down == nullptr ? 0 : down->columns();
  if (inner == 0 || inner % kPanelWidth != 0 || y->width % kPanelWidth != 0) {
    return in.fail("%zu columns and %zu inner ones must be multiples of 16", y->width, inner);
  }
  const size_t first = in.integer(0) == kSquaredRelu ? inner : 2 * inner;
  if (const int status = in.check_vector("gate_up_bias", 2, experts * first, false)) return status;
  if (const int status = in.check_vector("down_bias", 3, experts * y->width, false)) return status;
  if (const int status = in.check_product("gate_up", 0, experts * first, x->width)) return status;
  return in.check_product("down", 1, experts * y->width, inner);
}

// Rows in the order of their experts; entries first[e] to first[e + 1] belong to expert e.
struct Assignment {
  std::vector<uint32_t> first, row;
  std::vector<float> share;

  // Sorts the rows; returns an expert id that does not exist, or -1.
  int64_t sort(const Rows& topk_weights, const Rows& topk_ids, size_t experts) {
    first.assign(experts + 1, 0);
    auto expert_of = [&](size_t i, size_t k) {
      return reinterpret_cast<const int32_t*>(topk_ids.data)[i * topk_ids.stride + k];
    };
    for (size_t i = 0; i < topk_ids.count; i++) {
      for (size_t k = 0; k < topk_ids.width; k++) {
        const int32_t expert = expert_of(i, k);
        if (expert < 0 || static_cast<size_t>(expert) >= experts) return static_cast<uint32_t>(expert);
        first[static_cast<size_t>(expert) + 1]++;
      }
    }
    for (size_t e = 0; e < experts; e++) first[e + 1] += first[e];
    row.resize(topk_ids.count * topk_ids.width);
    share.resize(row.size());
    std::vector<uint32_t> next(first.begin(), first.end() - 1);
    for (size_t i = 0; i < topk_ids.count; i++) {
      for (size_t k = 0; k < topk_ids.width; k++) {
        const uint32_t at = next[static_cast<size_t>(expert_of(i, k))]++;
        row[at] = static_cast<uint32_t>(i);
        share[at] = reinterpret_cast<const float*>(topk_weights.data)[i * topk_weights.stride + k];
      }
    }
    return -1;
  }

  size_t max_of_an_expert() const {
    uint32_t most = 0;
    for (size_t e = 0; e + 1 < first.size(); e++) most = std::max(most, first[e + 1] - first[e]);
    return most;
  }
};

// Memory for the sums of all rows, and for the intermediate rows of one expert.
struct ExpertRows {
  float* sums;   // [rows, hidden]
  char* result;  // [most, hidden]
  char* x;       // [most, columns of x]
  char* inner;   // in the layout that `down` reads

  ExpertRows(const ExpertSizes& sizes, size_t rows, size_t most, size_t columns, size_t bytes) {
    auto whole_lines = [](size_t size) { return TiledLayout::padded(size, 64); };
    const size_t sums_bytes = whole_lines(rows * sizes.hidden * sizeof(float));
    const size_t result_bytes = whole_lines(most * sizes.hidden * bytes);
    const size_t x_bytes = whole_lines(most * columns * bytes);
    const size_t inner_bytes = TiledLayout::max_elements(most, sizes.inner) * bytes;
    char* memory = static_cast<char*>(scratch(Scratch::kScores, sums_bytes + result_bytes + x_bytes + inner_bytes + 1));
    sums = reinterpret_cast<float*>(memory);
    result = memory + sums_bytes;
    x = memory + sums_bytes + result_bytes;
    inner = x + x_bytes;
    std::memset(sums, 0, sums_bytes);
  }
};

int run_experts(const Instruction& in) {
  static OperatorClock clock("Experts");
  const Timed timed(clock);
  const Rows x = in.rows(in.input(0)), y = in.rows(in.output(0));
  const ExpertSizes sizes(in);
  const size_t bytes = in.program().element_bytes();
  const bool scales_input = in.integer(3) != 0;
  Assignment assignment;
  const int64_t unknown = assignment.sort(in.rows(in.input(1)), in.rows(in.input(2)), sizes.experts);
  if (unknown >= 0) return in.fail("there is no expert %d", static_cast<int>(unknown));
  const ExpertRows rows(sizes, x.count, assignment.max_of_an_expert(), x.width, bytes);
  for (size_t expert = 0; expert < sizes.experts; expert++) {
    const size_t begin = assignment.first[expert];
    const size_t count = assignment.first[expert + 1] - begin;
    if (count == 0) continue;
    for (size_t i = 0; i < count; i++) {
      const char* row = x.data + assignment.row[begin + i] * x.stride * bytes;
      char* copy = rows.x + i * x.width * bytes;
      if (scales_input) {
        kernels().add({nullptr, row, copy, in.program().dtype(), x.width, assignment.share[begin + i]});
        assignment.share[begin + i] = 1.0f;
      } else {
        std::memcpy(copy, row, x.width * bytes);
      }
    }
    const Weight gate_up = in.weight(0).part(expert * sizes.first, sizes.first);
    const Weight down = in.weight(1).part(expert * sizes.hidden, sizes.hidden);
    LinearArgs first = gate_up.product({count, x.width}, rows.x, rows.inner);
    first.gate = gate_of(in.integer(0));
    const bool is_gated = sizes.first > sizes.inner;
    first.y_layout = is_gated ? down.layout(count) : TiledLayout{count, sizes.inner};
    if (in.has_weight(2)) first.bias = in.weight_data(2) + expert * sizes.first * bytes;
    multiply(first);
    if (!is_gated) {
      kernels().multiply({rows.inner, rows.inner, rows.inner, in.program().dtype(), sizes.inner, 1.0f, count,
                          sizes.inner, sizes.inner, sizes.inner, Factor::kRelu});
    }
    LinearArgs second = down.product(first.y_layout, rows.inner, rows.result);
    if (in.has_weight(3)) second.bias = in.weight_data(3) + expert * sizes.hidden * bytes;
    multiply(second);
    kernels().gather_sum({rows.result, nullptr, assignment.row.data() + begin, assignment.share.data() + begin,
                          rows.sums, in.program().dtype(), count, sizes.hidden});
  }
  RoundArgs round = {rows.sums, nullptr, y.data, in.program().dtype(), y.count, y.width, 0, y.stride, in.number(1)};
  if (in.input(3) != nullptr) {
    const Rows residual = in.rows(in.input(3));
    round.residual = residual.data;
    round.residual_stride = residual.stride;
  }
  kernels().round(round);
  return 0;
}

}  // namespace

const Operation kRoute = {{"route", 2, 1, 4, 7}, check_route, run_route};
const Operation kExperts = {{"experts", 1, 4, 4, 4}, check_experts, run_experts};

}  // namespace llm
