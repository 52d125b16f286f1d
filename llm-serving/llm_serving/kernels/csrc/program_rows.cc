// Operations on single rows: embedding, rms_norm, gated_activation, add, multiply, select_rows, sigmoid_gate,
// hidden_states, activation.
#include <cstring>

#include "program.h"
#include "thread_pool.h"

namespace llm {
namespace {

// embedding: y | | table | scale first rows of_positions. y = scale * table[token_ids or positions], rounded once. If
// rows is not 0, the table is a shard that starts at row `first` of `rows`; tokens outside of it get zeros.

int embedded(const Instruction& in) { return in.integer(3) == 0 ? kTokenIds : kPositions; }

int check_embedding(const Instruction& in) {
  const Operand* y = in.output(0);
  if (const int status = in.check_rows("y", y, false)) return status;
  if (!in.has_weight(0)) return in.fail("table is absent");
  const int table = in.parameter(0);
  const Weight* packed = in.program().weight(static_cast<size_t>(in.weight_number(0)));
  if (in.call().rank(table) != 2 || (packed == nullptr && in.call().dtype(table) != in.program().dtype()) ||
      (packed == nullptr ? in.call().dim(table, 1) : packed->columns()) != y->width) {
    return in.fail("table must be [V, %zu] of the model's type", y->width);
  }
  const int32_t first = in.integer(1), rows = in.integer(2);
  if (first < 0 || rows < 0) return in.fail("the table has rows from %d on of %d", first, rows);
  return check_indices(in.call(), embedded(in), rows == 0 ? in.call().dim(table, 0) : static_cast<size_t>(rows));
}

int run_embedding(const Instruction& in) {
  const Rows y = in.rows(in.output(0));
  const size_t bytes = in.program().element_bytes();
  const size_t first = static_cast<size_t>(in.integer(1)), rows = static_cast<size_t>(in.integer(2));
  if (const int status =
          gather_blocks(in.call(), in.parameter(0), embedded(in), y.data, y.stride * bytes, first, rows)) {
    return status;
  }
  const float scale = in.number(0);
  if (scale == 1.0f || y.count == 0) return 0;
  kernels().add({nullptr, y.data, y.data, in.program().dtype(), y.width, scale, y.count, y.stride, y.stride, y.stride});
  return 0;
}

// rms_norm: y residual_out | x residual | gamma beta | eps group centred consumer. residual_out = x + residual; y = its
// root mean square norm, of all columns or of each `group` of them.

int check_rms_norm(const Instruction& in) {
  const Operand *y = in.output(0), *sum = in.output(1), *x = in.input(0), *residual = in.input(1);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_width("x", *x, y->width)) return status;
  if (sum != nullptr && residual == nullptr) return in.fail("residual_out needs a residual");
  if (residual != nullptr) {
    if (const int status = in.check_rows("residual", residual, y->selected)) return status;
    if (const int status = in.check_width("residual", *residual, y->width)) return status;
  }
  if (sum != nullptr) {
    if (const int status = in.check_rows("residual_out", sum, y->selected)) return status;
    if (const int status = in.check_width("residual_out", *sum, y->width)) return status;
  }
  const int32_t group = in.integer(1);
  if (group < 0 || (group > 0 && y->width % static_cast<size_t>(group) != 0)) {
    return in.fail("groups of %d do not make %zu columns", group, y->width);
  }
  if (!in.has_weight(0)) return in.fail("gamma is absent");
  const bool of_row = in.call().elements(in.parameter(0)) == y->width;
  const size_t size = group > 0 && !of_row ? static_cast<size_t>(group) : y->width;
  if (const int status = in.check_vector("gamma", 0, size, true)) return status;
  if (const int status = in.check_vector("beta", 1, size, true)) return status;
  if (in.has_weight(1) && in.call().dtype(in.parameter(1)) != in.call().dtype(in.parameter(0))) {
    return in.fail("gamma and beta must be of one type");
  }
  return in.check_consumer(3, *y);
}

int run_rms_norm(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  const DType dtype = in.program().dtype();
  RmsNormArgs args = {x.data,  nullptr, nullptr, in.weight_data(0), y.data,
                      nullptr, dtype,   y.count, y.width,           in.number(0)};
  args.y_layout = passes_for(in.consumer(3), y);
  args.centred = in.integer(2) != 0;
  args.beta = in.weight_data(1);
  args.of_row = in.call().elements(in.parameter(0)) == y.width;
  args.gamma_dtype = in.call().dtype(in.parameter(0));
  args.group = static_cast<size_t>(in.integer(1));
  args.x_stride = x.stride;
  if (in.input(1) != nullptr) {
    const Rows residual = in.rows(in.input(1));
    args.residual = residual.data;
    args.residual_stride = residual.stride;
    if (in.output(1) != nullptr) {
      const Rows sum = in.rows(in.output(1));
      args.sum = sum.data;
      args.sum_stride = sum.stride;
    } else {
      args.sum = scratch(Scratch::kActivations, y.count * y.width * in.program().element_bytes() + 1);
    }
  }
  normalize(args);
  return 0;
}

// gated_activation: y | x | | function. y = function(first half of x) * second half.

int check_gated_activation(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_width("x", *x, 2 * y->width)) return status;
  return is_gate(in.integer(0)) ? 0 : in.fail("function must be from 1 to 4, is %d", in.integer(0));
}

int run_gated_activation(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  gate({x.data, y.data, in.program().dtype(), y.count, y.width, gate_of(in.integer(0)), x.stride, y.stride});
  return 0;
}

// activation: y | x | | function. y = function(x).

int check_activation(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_width("x", *x, y->width)) return status;
  const int32_t function = in.integer(0);
  const bool is_known = (function >= 1 && function <= 3) || function == static_cast<int32_t>(Gate::kTanh);
  return is_known ? 0 : in.fail("function must be from 1 to 3, or 6, is %d", function);
}

int run_activation(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  gate({x.data, y.data, in.program().dtype(), y.count, y.width, static_cast<Gate>(in.integer(0)), x.stride, y.stride,
        false});
  return 0;
}

// Checks that y, a and b have the same rows and columns.
int check_pair(const Instruction& in) {
  const Operand* y = in.output(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  for (int i = 0; i < 2; i++) {
    const char* name = i == 0 ? "a" : "b";
    if (const int status = in.check_rows(name, in.input(i), y->selected)) return status;
    if (const int status = in.check_width(name, *in.input(i), y->width)) return status;
  }
  return 0;
}

AddArgs pair_args(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), a = in.rows(in.input(0)), b = in.rows(in.input(1));
  return {a.data, b.data, y.data, in.program().dtype(), y.width, 1.0f, y.count, a.stride, b.stride, y.stride};
}

// add: y | a b | | scale. y = a + scale * b, rounded once.

int run_add(const Instruction& in) {
  static OperatorClock clock("AddExt");
  const Timed timed(clock);
  AddArgs args = pair_args(in);
  args.scale = in.number(0);
  if (args.rows > 0) kernels().add(args);
  return 0;
}

// multiply: y | a b | gamma | function. y = a * function(b), rounded once; function: 0 none, 1 silu, 5 sigmoid, 7 relu.
// With gamma, which is a row, y = a * gamma.

// Returns false if `function` is none of these.
bool read_factor(int32_t function, Factor& factor) {
  switch (function) {
    case 0:
      factor = Factor::kItself;
      return true;
    case 1:
      factor = Factor::kSilu;
      return true;
    case 5:
      factor = Factor::kSigmoid;
      return true;
    case 7:
      factor = Factor::kRelu;
      return true;
    default:
      return false;
  }
}

int check_multiply(const Instruction& in) {
  Factor factor;
  if (!read_factor(in.integer(0), factor)) return in.fail("function must be 0, 1, 5 or 7, is %d", in.integer(0));
  if (!in.has_weight(0)) return check_pair(in);
  const Operand *y = in.output(0), *a = in.input(0);
  if (y == nullptr) return in.fail("y is absent");
  if (in.integer(0) != 0 || in.input(1) != nullptr) return in.fail("gamma takes the place of b");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("a", a, y->selected)) return status;
  if (const int status = in.check_width("a", *a, y->width)) return status;
  return in.check_vector("gamma", 0, y->width, false);
}

int run_multiply(const Instruction& in) {
  static OperatorClock clock("Mul");
  const Timed timed(clock);
  if (in.has_weight(0)) {
    const Rows y = in.rows(in.output(0)), a = in.rows(in.input(0));
    const DType dtype = in.program().dtype();
    if (y.count > 0)
      kernels().multiply({a.data, in.weight_data(0), y.data, dtype, y.width, 1.0f, y.count, a.stride, 0, y.stride});
    return 0;
  }
  AddArgs args = pair_args(in);
  read_factor(in.integer(0), args.factor);
  if (args.rows > 0) kernels().multiply(args);
  return 0;
}

// select_rows: y | x | |. The sampled rows of x.

int check_select_rows(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (const int status = in.check_rows("y", y, true)) return status;
  if (const int status = in.check_rows("x", x, false)) return status;
  return in.check_width("x", *x, y->width);
}

int run_select_rows(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  const size_t bytes = in.program().element_bytes();
  for (size_t i = 0; i < y.count; i++) {
    const size_t row = static_cast<size_t>(in.call().integer(kSampleIndices, i));
    std::memcpy(y.data + i * y.stride * bytes, x.data + row * x.stride * bytes, y.width * bytes);
  }
  return 0;
}

// sigmoid_gate: y | x gate | |. y = x * sigmoid(gate), one gate a row.

int check_sigmoid_gate(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0), *gate = in.input(1);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_rows("gate", gate, y->selected)) return status;
  if (const int status = in.check_width("x", *x, y->width)) return status;
  return in.check_width("gate", *gate, 1);
}

int run_sigmoid_gate(const Instruction& in) {
  static OperatorClock clock("Weigh");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0)), gate = in.rows(in.input(1));
  kernels().sigmoid_gate(
      {x.data, gate.data, y.data, in.program().dtype(), y.count, y.width, x.stride, gate.stride, y.stride});
  return 0;
}

// hidden_states: | x | |. The result: the rows of x, in float32.

int check_hidden_states(const Instruction& in) {
  const Operand* x = in.input(0);
  if (const int status = in.check_rows("x", x, true)) return status;
  return in.check_width("x", *x, in.program().result_width());
}

int run_hidden_states(const Instruction& in) {
  const Rows x = in.rows(in.input(0));
  auto* result = in.call().data<float>(in.program().result());
  for (size_t i = 0; i < x.count; i++) {
    const char* row = x.data + i * x.stride * in.program().element_bytes();
    widen(row, x.width, in.program().dtype(), result + i * x.width);
  }
  return 0;
}

}  // namespace

const Operation kEmbedding = {{"embedding", 1, 0, 1, 4}, check_embedding, run_embedding};
const Operation kRmsNorm = {{"rms_norm", 2, 2, 2, 4}, check_rms_norm, run_rms_norm};
const Operation kGatedActivation = {{"gated_activation", 1, 1, 0, 1}, check_gated_activation, run_gated_activation};
const Operation kActivation = {{"activation", 1, 1, 0, 1}, check_activation, run_activation};
const Operation kAdd = {{"add", 1, 2, 0, 1}, check_pair, run_add};
const Operation kMultiply = {{"multiply", 1, 2, 1, 1}, check_multiply, run_multiply};
const Operation kSelectRows = {{"select_rows", 1, 1, 0, 0}, check_select_rows, run_select_rows};
const Operation kSigmoidGate = {{"sigmoid_gate", 1, 2, 0, 0}, check_sigmoid_gate, run_sigmoid_gate};
const Operation kHiddenStates = {{"hidden_states", 0, 1, 0, 0}, check_hidden_states, run_hidden_states};

}  // namespace llm
