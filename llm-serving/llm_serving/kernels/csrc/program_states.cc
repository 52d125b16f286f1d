// Operations that keep a state of each sequence: causal_conv.
#include "program.h"

namespace llm {
namespace {

// Checks that attribute i is the number of a state whose slots have `rows` times `columns` elements.
int check_state(const Instruction& in, int i, size_t rows, size_t columns) {
  const int32_t number = in.integer(i);
  if (number < 0 || static_cast<size_t>(number) >= in.program().num_states()) {
    return in.fail("there is no state %d", number);
  }
  const int state = in.program().state_parameter(static_cast<size_t>(number));
  const size_t slots = in.call().dim(state, 0);
  if (in.call().elements(state) == slots * rows * columns) return 0;
  return in.fail("state %d must have %zu times %zu elements for each slot", number, rows, columns);
}

float* states_of(const Instruction& in, int i) {
  return in.call().data<float>(in.program().state_parameter(static_cast<size_t>(in.integer(i))));
}

int check_floats(const Instruction& in, const char* name, int i, size_t size) {
  if (!in.has_weight(i)) return 0;
  const int parameter = in.parameter(i);
  if (in.call().dtype(parameter) == DType::kFloat32 && in.call().elements(parameter) == size) return 0;
  return in.fail("%s must be float32, %zu elements", name, size);
}

const float* floats_of(const Instruction& in, int i) { return reinterpret_cast<const float*>(in.weight_data(i)); }

// causal_conv: y | x | taps bias | function state. A state has the last rows of x before the next one, oldest first.

int check_causal_conv(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (const int status = in.check_rows("y", y, false)) return status;
  if (const int status = in.check_rows("x", x, false)) return status;
  if (const int status = in.check_width("x", *x, y->width)) return status;
  if (!in.has_weight(0)) return in.fail("taps are absent");
  const size_t taps = in.call().rank(in.parameter(0)) == 2 ? in.call().dim(in.parameter(0), 0) : 0;
  if (taps < 2 || taps > kMaxTaps) return in.fail("taps must be [2 to %zu, %zu]", kMaxTaps, y->width);
  if (const int status = check_floats(in, "taps", 0, taps * y->width)) return status;
  if (const int status = check_floats(in, "bias", 1, y->width)) return status;
  const int32_t function = in.integer(0);
  if (function != 0 && function != 1) return in.fail("function must be 0 or 1, is %d", function);
  return check_state(in, 1, taps - 1, y->width);
}

int run_causal_conv(const Instruction& in) {
  static OperatorClock clock("CausalConv");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  kernels().causal_conv({x.data, floats_of(in, 0), floats_of(in, 1), y.data, states_of(in, 1), in.program().sequences(),
                         in.program().dtype(), y.width, in.call().dim(in.parameter(0), 0), x.stride, y.stride,
                         gate_of(in.integer(0))});
  return 0;
}

}  // namespace

const Operation kCausalConv = {{"causal_conv", 1, 1, 2, 2}, check_causal_conv, run_causal_conv};

}  // namespace llm
