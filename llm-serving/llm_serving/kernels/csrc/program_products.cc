// Operations that multiply by a weight: linear, lm_head.
#include <array>

#include "program.h"
#include "ranks.h"
#include "thread_pool.h"

namespace llm {
namespace {

// linear: y | x residual | weight bias a b ranks parts | function scale tiled consumer heads. z = x * weight^T + bias;
// y = z, or function(first half of z) * second half, or residual + scale * z. Each head of x has its own rows of the
// weight. With a, b, ranks and parts, which AdapterArgs describes, a row with an adapter has x * weight^T + B A x in
// place of x * weight^T.

struct LinearSizes {
  size_t heads, n, k;  // sizes of a head

  explicit LinearSizes(const Instruction& in)
      : heads(static_cast<size_t>(in.integer(4))), n(in.weight(0).rows() / heads), k(in.weight(0).columns()) {}
};

int check_added(const Instruction& in, const Operand& y) {
  const Operand* residual = in.input(1);
  if (residual == nullptr) return in.number(1) == 1.0f ? 0 : in.fail("scale is of what is added to something");
  if (in.integer(0) != 0) return in.fail("a gated product is added to nothing");
  if (const int status = in.check_rows("residual", residual, y.selected)) return status;
  return in.check_width("residual", *residual, y.width);
}

int check_tiled(const Instruction& in, const Operand& x, int attribute) {
  const int32_t tiled = in.integer(attribute);
  if (tiled != 0 && tiled != 1) return in.fail("tiled must be 0 or 1, is %d", tiled);
  return tiled == 0 || in.program().has_room(x) ? 0 : in.fail("x has no room for the order in which it is read");
}

// Checks the weights of adapters, which are all absent or all present.
int check_adapters(const Instruction& in, size_t n, size_t k) {
  const size_t slots = in.program().num_adapter_slots();
  if (!in.has_weight(2) && !in.has_weight(3) && !in.has_weight(4) && !in.has_weight(5)) return 0;
  for (int i = 2; i < 6; i++) {
    if (!in.has_weight(i)) return in.fail("a, b, ranks and parts go together");
  }
  if (slots == 0 || in.integer(4) != 1) return in.fail("adapters need slots, and a weight without heads");
  const Call& call = in.call();
  const int a = in.parameter(2), b = in.parameter(3), ranks = in.parameter(4), parts = in.parameter(5);
  const DType dtype = in.program().dtype();
  if (call.dtype(a) != dtype || call.dtype(b) != dtype || call.rank(a) != 4 || call.rank(b) != 4) {
    return in.fail("a and b must be of the model's type, of four dimensions");
  }
  if (call.rank(ranks) != 2 || call.dim(ranks, 1) == 0) return in.fail("ranks must be [%zu, parts]", slots);
  const size_t panels = TiledLayout::padded(n, kPanelWidth) / kPanelWidth, inputs = TiledLayout::padded(k, kPanelWidth);
  const size_t num_parts = call.dim(ranks, 1), max_rank = call.dim(b, 2);
  auto has = [&](int parameter, std::array<size_t, 4> sizes) {
    for (int i = 0; i < 4; i++) {
      if (call.dim(parameter, i) != sizes[static_cast<size_t>(i)]) return false;
    }
    return true;
  };
  if (max_rank % kPanelWidth != 0 || !has(b, {slots, panels, max_rank, kPanelWidth}) ||
      !has(a, {slots, num_parts * max_rank / kPanelWidth, inputs, kPanelWidth})) {
    return in.fail("a must be [%zu, parts * R / 16, %zu, 16], b [%zu, %zu, R, 16]", slots, inputs, slots, panels);
  }
  auto check = [&](const char* name, int parameter, size_t size, size_t most) {
    if (call.dtype(parameter) != DType::kFloat32 || call.elements(parameter) != size) {
      return in.fail("%s must be float32, %zu elements", name, size);
    }
    const float* values = call.data<const float>(parameter);
    for (size_t i = 0; i < size; i++) {
      if (!(values[i] >= 0.0f && values[i] <= static_cast<float>(most))) {
        return in.fail("%s must be from 0 to %zu", name, most);
      }
    }
    return 0;
  };
  if (const int status = check("ranks", ranks, slots * num_parts, max_rank)) return status;
  return check("parts", parts, panels, num_parts - 1);
}

int check_linear(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  const int32_t function = in.integer(0);
  if (function != 0 && !is_gate(function)) return in.fail("function must be from 0 to 4, is %d", function);
  const int32_t heads = in.integer(4);
  if (heads < 1 || x->width % static_cast<size_t>(heads) != 0) {
    return in.fail("%zu columns of x are not %d heads", x->width, heads);
  }
  const size_t n = is_gate(function) ? 2 * y->width : y->width;
  if (const int status = in.check_product("weight", 0, n, x->width / static_cast<size_t>(heads))) return status;
  if (heads > 1 && (n % (static_cast<size_t>(heads) * kPanelWidth) != 0 || in.integer(2) != 0 || is_gate(function))) {
    return in.fail("the rows of each of %d heads must be a multiple of 16, neither ordered nor gated", heads);
  }
  if (is_gate(function) && y->width % kPanelWidth != 0) {
    return in.fail("a product that is gated must have a multiple of 16 columns, has %zu", y->width);
  }
  if (const int status = in.check_vector("bias", 1, n, false)) return status;
  if (const int status = check_added(in, *y)) return status;
  if (const int status = check_tiled(in, *x, 2)) return status;
  if (in.integer(3) != -1 && !is_gate(function)) return in.fail("a product that is not gated lies as rows");
  if (const int status = check_adapters(in, n, x->width)) return status;
  return in.check_consumer(3, *y);
}

// Reads the matrices of adapters. Returns whether a row has an adapter.
bool read_adapters(const Instruction& in, AdapterArgs& adapters) {
  const Operand& y = *in.output(0);
  if (!in.has_weight(2)) return false;
  adapters.rows = in.program().adapter_rows(y.selected);
  if (adapters.rows.num_spans == 0) return false;
  adapters.a = in.weight_data(2);
  adapters.b = in.weight_data(3);
  adapters.ranks = in.call().data<const float>(in.parameter(4));
  adapters.parts = in.call().data<const float>(in.parameter(5));
  adapters.num_parts = in.call().dim(in.parameter(4), 1);
  adapters.max_rank = in.call().dim(in.parameter(3), 2);
  const size_t elements = in.program().count(y.selected) * adapters.num_parts * adapters.max_rank;
  adapters.r = scratch(Scratch::kAdapters, elements * sizeof(float));
  return true;
}

int run_linear(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  const size_t bytes = in.program().element_bytes();
  const LinearSizes sizes(in);
  AdapterArgs adapters;
  const bool has_adapters = read_adapters(in, adapters);
  for (size_t head = 0; head < sizes.heads; head++) {
    const Weight weight = sizes.heads == 1 ? in.weight(0) : in.weight(0).part(head * sizes.n, sizes.n);
    const size_t column = head * sizes.n;
    TiledLayout layout = in.integer(2) == 1 ? weight.layout(x.count) : x.layout();
    if (sizes.heads > 1 && x.count == 1) layout.width = sizes.k;
    LinearArgs args = weight.product(layout, x.data + head * sizes.k * bytes, y.data + column * bytes);
    if (in.has_weight(1)) args.bias = in.weight_data(1) + column * bytes;
    if (in.input(1) != nullptr) {
      const Rows residual = in.rows(in.input(1));
      args.residual = residual.data + column * bytes;
      args.residual_stride = residual.stride;
      args.scale = in.number(1);
    }
    args.gate = gate_of(in.integer(0));
    if (has_adapters) args.adapters = &adapters;
    args.y_layout = in.consumer(3) == nullptr ? TiledLayout{y.count, y.stride} : in.consumer(3)->layout(y.count);
    multiply(args);
  }
  return 0;
}

// lm_head: | x | weight bias | scale cap tiled first rows. The result: scale * (x * weight^T + bias) or, with a cap,
// cap * tanh(that / cap). If rows is not 0, the weight has the rows from `first` on of `rows`, and the result is
// gathered from all ranks.

// Checks the rows of the weight.
int check_share(const Instruction& in, size_t here) {
  const int64_t first = in.integer(3), rows = in.integer(4);
  const auto width = static_cast<int64_t>(in.program().result_width());
  if (rows == 0 && first == 0) return 0;
  if (rows != width)
    return in.fail("the result has %lld columns, the head %lld rows", static_cast<long long>(width),
                   static_cast<long long>(rows));
  const Ranks* ranks = ranks_in_use();
  if (ranks == nullptr) return in.fail("this process computes with no other");
  const int64_t last = first + static_cast<int64_t>(here);
  if (ranks->has(in.program().result_width(), first, last)) return 0;
  return in.fail("rows %lld to %lld of %lld are not those of this rank", static_cast<long long>(first),
                 static_cast<long long>(last), static_cast<long long>(rows));
}

int check_lm_head(const Instruction& in) {
  const Operand* x = in.input(0);
  if (const int status = in.check_rows("x", x, true)) return status;
  if (!in.has_weight(0)) return in.fail("weight is absent");
  const bool is_part = in.integer(4) != 0;
  const size_t here = is_part ? in.call().dim(in.parameter(0), 0) : in.program().result_width();
  if (const int status = in.check_product("weight", 0, here, x->width)) return status;
  if (const int status = check_share(in, here)) return status;
  if (in.has_weight(1) &&
      (in.call().dtype(in.parameter(1)) != DType::kFloat32 || in.call().elements(in.parameter(1)) != here)) {
    return in.fail("bias must be float32, %zu elements", here);
  }
  if (!(in.number(1) >= 0.0f)) return in.fail("cap must be 0 or more, is %g", static_cast<double>(in.number(1)));
  return check_tiled(in, *x, 2);
}

int run_lm_head(const Instruction& in) {
  const Rows x = in.rows(in.input(0));
  const Weight& weight = in.weight(0);
  const size_t rows = in.program().result_width();
  auto* logits = in.call().data<float>(in.program().result());
  LinearArgs args =
      weight.product(in.integer(2) == 1 ? weight.layout(x.count) : x.layout(), x.data, logits + in.integer(3));
  args.y_dtype = DType::kFloat32;
  args.y_layout = {x.count, rows};
  multiply(args);
  if (in.has_weight(1) && x.count > 0) {
    float* here = logits + in.integer(3);
    kernels().add({in.weight_data(1), here, here, DType::kFloat32, weight.rows(), 1.0f, x.count, 0, rows, rows});
  }
  if (in.integer(4) != 0 && !ranks_in_use()->all_gather(logits, x.count, rows)) {
    return in.fail("%s", ranks_in_use()->error());
  }
  const float scale = in.number(0), cap = in.number(1);
  if (scale != 1.0f || cap > 0.0f) kernels().cap({logits, x.count * rows, scale, cap});
  return 0;
}

}  // namespace

const Operation kLinear = {{"linear", 1, 2, 6, 5}, check_linear, run_linear};
const Operation kLmHead = {{"lm_head", 0, 1, 2, 5}, check_lm_head, run_lm_head};

}  // namespace llm
