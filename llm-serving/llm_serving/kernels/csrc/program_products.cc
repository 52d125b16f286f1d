// Operations that multiply by a weight: linear, lm_head.
#include "program.h"
#include "ranks.h"

namespace llm {
namespace {

// linear: y | x residual | weight bias | function scale tiled consumer heads. z = x * weight^T + bias; y = z, or
// function(first half of z) * second half, or residual + scale * z. Each head of x has its own rows of the weight.

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
  return in.check_consumer(3, *y);
}

int run_linear(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  const size_t bytes = in.program().element_bytes();
  const LinearSizes sizes(in);
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
    args.y_layout = in.consumer(3) == nullptr ? TiledLayout{y.count, y.stride} : in.consumer(3)->layout(y.count);
    multiply(args);
  }
  return 0;
}

// lm_head: | x | weight bias | scale cap tiled first rows. The result: scale * (x * weight^T + bias) or, with a cap,
// cap
// * tanh(that / cap). If rows is not 0, the weight has the rows from `first` on of `rows`, and the result is gathered
// from all ranks.

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

const Operation kLinear = {{"linear", 1, 2, 2, 5}, check_linear, run_linear};
const Operation kLmHead = {{"lm_head", 0, 1, 2, 5}, check_lm_head, run_lm_head};

}  // namespace llm
