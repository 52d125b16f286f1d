// Operations that several ranks compute together: all_reduce.
#include "program.h"
#include "ranks.h"

namespace llm {
namespace {

// all_reduce: y | x | |. y = the sum of x of all ranks, in rank order, rounded once.

int check_all_reduce(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_width("x", *x, y->width)) return status;
  if (x->width != x->columns || y->width != y->columns) return in.fail("x and y must be whole buffers");
  return ranks_in_use() != nullptr ? 0 : in.fail("this process computes with no other");
}

int run_all_reduce(const Instruction& in) {
  static OperatorClock clock("AllReduce");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  Ranks* ranks = ranks_in_use();
  if (ranks->all_reduce(x.data, y.data, x.count * x.width, in.program().dtype())) return 0;
  return in.fail("%s", ranks->error());
}

}  // namespace

const Operation kAllReduce = {{"all_reduce", 1, 1, 0, 0}, check_all_reduce, run_all_reduce};

}  // namespace llm
