// Operations that keep a state of each sequence: causal_conv, delta_rule, ssm.
#include <limits>

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

// causal_conv: y | x | taps bias | function state. A state holds the last taps - 1 rows of x,
// oldest first.

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

// Checks the shapes of a recurrence. Inputs 0 and 1 are queries and keys, 2 values; the rest have one column per head.
// Attribute `heads_at` is the number of key heads; the next attribute is the index of the state.
int check_recurrence(const Instruction& in, const char* const (&names)[5], int inputs, int heads_at) {
  const Operand* y = in.output(0);
  if (const int status = in.check_rows("y", y, false)) return status;
  for (int i = 0; i < inputs; i++) {
    if (const int status = in.check_rows(names[i], in.input(i), false)) return status;
  }
  const size_t heads = in.input(3)->width, width = in.input(0)->width;
  const int32_t key_heads = in.integer(heads_at);
  if (key_heads < 1 || heads % static_cast<size_t>(key_heads) != 0 || width % static_cast<size_t>(key_heads) != 0 ||
      y->width % heads != 0) {
    return in.fail("%d heads do not divide %zu heads of values and %zu columns, or those %zu columns", key_heads, heads,
                   width, y->width);
  }
  if (const int status = in.check_width(names[1], *in.input(1), width)) return status;
  if (const int status = in.check_width(names[2], *in.input(2), y->width)) return status;
  if (inputs > 4) {
    if (const int status = in.check_width(names[4], *in.input(4), heads)) return status;
  }
  for (int i = 0; i < 2; i++) {
    if (!in.has_weight(i)) return in.fail("rates and bias go together");
    if (const int status = check_floats(in, i == 0 ? "rates" : "bias", i, heads)) return status;
  }
  const size_t blocks = (y->width / heads + kPanelWidth - 1) / kPanelWidth;
  const size_t key_dim = width / static_cast<size_t>(key_heads);
  return check_state(in, heads_at + 1, heads * blocks * key_dim, kPanelWidth);
}

// Arguments of a recurrence whose inputs have the order of `check_recurrence`.
RecurrenceArgs recurrence_args(const Instruction& in, int heads_at) {
  const Rows y = in.rows(in.output(0)), q = in.rows(in.input(0)), k = in.rows(in.input(1)), v = in.rows(in.input(2));
  const Rows a = in.rows(in.input(3));
  RecurrenceArgs args = {};
  args.q = q.data;
  args.k = k.data;
  args.v = v.data;
  args.a = a.data;
  args.y = y.data;
  args.rates = floats_of(in, 0);
  args.bias = floats_of(in, 1);
  args.states = states_of(in, heads_at + 1);
  args.sequences = in.program().sequences();
  args.dtype = in.program().dtype();
  args.heads = a.width;
  args.key_heads = static_cast<size_t>(in.integer(heads_at));
  args.key_dim = q.width / args.key_heads;
  args.value_dim = y.width / args.heads;
  args.q_stride = q.stride;
  args.k_stride = k.stride;
  args.v_stride = v.stride;
  args.a_stride = a.stride;
  args.y_stride = y.stride;
  args.high = std::numeric_limits<float>::infinity();
  return args;
}

// delta_rule: y | q k v a b | rates bias | scale eps heads state.

int check_delta_rule(const Instruction& in) { return check_recurrence(in, {"q", "k", "v", "a", "b"}, 5, 2); }

int run_delta_rule(const Instruction& in) {
  static OperatorClock clock("DeltaRule");
  const Timed timed(clock);
  RecurrenceArgs args = recurrence_args(in, 2);
  const Rows b = in.rows(in.input(4));
  args.b = b.data;
  args.b_stride = b.stride;
  args.scale = in.number(0);
  args.eps = in.number(1);
  kernels().recurrence(args);
  return 0;
}

// ssm: y | c b x dt | rates bias skip | low high heads state.

int check_ssm(const Instruction& in) {
  if (const int status = check_recurrence(in, {"c", "b", "x", "dt", ""}, 4, 2)) return status;
  return check_floats(in, "skip", 2, in.input(3)->width);
}

int run_ssm(const Instruction& in) {
  static OperatorClock clock("Ssm");
  const Timed timed(clock);
  RecurrenceArgs args = recurrence_args(in, 2);
  args.skip = floats_of(in, 2);
  args.low = in.number(0);
  args.high = in.number(1);
  kernels().recurrence(args);
  return 0;
}

}  // namespace

const Operation kCausalConv = {{"causal_conv", 1, 1, 2, 2}, check_causal_conv, run_causal_conv};
const Operation kDeltaRule = {{"delta_rule", 1, 5, 2, 4}, check_delta_rule, run_delta_rule};
const Operation kSsm = {{"ssm", 1, 4, 3, 4}, check_ssm, run_ssm};

}  // namespace llm
