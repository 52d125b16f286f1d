// Operations on several residual streams in one row, and sparse activations: mix_streams, match_streams, sparsify.
#include "program.h"

namespace llm {
namespace {

int check_outer(const Instruction& in, const char* const (&names)[2]) {
  const Operand* y = in.output(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows(names[0], in.input(0), y->selected)) return status;
  return in.check_rows(names[1], in.input(1), y->selected);
}

// mix_streams: y | base x coefficients | | streams offset first. y is `streams` parts of equal width; part i is that of
// base plus, from i = first on, the sum of (offset + coefficient) times each part of x.

int check_mix_streams(const Instruction& in) {
  if (const int status = check_outer(in, {"base", "x"})) return status;
  const Operand *y = in.output(0), *x = in.input(1), *coefficients = in.input(2);
  if (const int status = in.check_width("base", *in.input(0), y->width)) return status;
  const int32_t streams = in.integer(0), first = in.integer(2);
  if (streams < 1 || y->width % static_cast<size_t>(streams) != 0) {
    return in.fail("%zu columns are not %d streams", y->width, streams);
  }
  const size_t size = y->width / static_cast<size_t>(streams);
  if (x->width % size != 0) return in.fail("%zu columns of x are not parts of %zu", x->width, size);
  if (first < 0 || first > streams) return in.fail("first must be from 0 to %d, is %d", streams, first);
  if (coefficients == nullptr) return 0;
  if (const int status = in.check_rows("coefficients", coefficients, y->selected)) return status;
  return in.check_width("coefficients", *coefficients, static_cast<size_t>(streams) * (x->width / size));
}

int run_mix_streams(const Instruction& in) {
  static OperatorClock clock("MixStreams");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), base = in.rows(in.input(0)), x = in.rows(in.input(1));
  const auto streams = static_cast<size_t>(in.integer(0));
  const size_t size = y.width / streams;
  MixStreamsArgs args = {base.data,
                         x.data,
                         nullptr,
                         y.data,
                         in.program().dtype(),
                         y.count,
                         streams,
                         x.width / size,
                         size,
                         static_cast<size_t>(in.integer(2)),
                         base.stride,
                         x.stride,
                         0,
                         y.stride,
                         in.number(1)};
  if (in.input(2) != nullptr) {
    const Rows coefficients = in.rows(in.input(2));
    args.coefficients = coefficients.data;
    args.coefficients_stride = coefficients.stride;
  }
  kernels().mix_streams(args);
  return 0;
}

// match_streams: y | like x | | eps sums. Parts of x, each as wide as like, are scaled to its root mean square. y is
// like, then these parts, or the sum of all.

int check_match_streams(const Instruction& in) {
  if (const int status = check_outer(in, {"like", "x"})) return status;
  const Operand *y = in.output(0), *like = in.input(0), *x = in.input(1);
  if (x->width % like->width != 0) return in.fail("%zu columns of x are not parts of %zu", x->width, like->width);
  return in.check_width("y", *y, in.integer(1) != 0 ? like->width : like->width + x->width);
}

int run_match_streams(const Instruction& in) {
  static OperatorClock clock("MatchStreams");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), like = in.rows(in.input(0)), x = in.rows(in.input(1));
  kernels().match_streams({like.data, x.data, y.data, in.program().dtype(), y.count, x.width / like.width, like.width,
                           like.stride, x.stride, y.stride, in.number(0), in.integer(1) != 0});
  return 0;
}

// sparsify: y | x | | scale. y = the part of x above mean + scale * standard deviation of its row, zero elsewhere.

int check_sparsify(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  return in.check_width("x", *x, y->width);
}

int run_sparsify(const Instruction& in) {
  static OperatorClock clock("Sparsify");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  kernels().sparsify({x.data, y.data, in.program().dtype(), y.count, y.width, x.stride, y.stride, in.number(0)});
  return 0;
}

}  // namespace

const Operation kMixStreams = {{"mix_streams", 1, 3, 0, 3}, check_mix_streams, run_mix_streams};
const Operation kMatchStreams = {{"match_streams", 1, 2, 0, 2}, check_match_streams, run_match_streams};
const Operation kSparsify = {{"sparsify", 1, 1, 0, 1}, check_sparsify, run_sparsify};

}  // namespace llm
