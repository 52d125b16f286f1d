#include "parts.h"

namespace llm {

void normalize(const RmsNormArgs& args) {
  static OperatorClock clock("RmsNorm");
  const Timed timed(clock);
  kernels().rms_norm(args);
}

void multiply(const LinearArgs& args) {
  static OperatorClock clock("MatMul");
  const Timed timed(clock);
  kernels().linear(args);
}

void gate(const SwigluArgs& args) {
  static OperatorClock clock("Swiglu");
  const Timed timed(clock);
  kernels().swiglu(args);
}

int Weight::check(const Call& call, size_t n, size_t k) const {
  if (n_ != n || k_ != k || !is_packed_) {
    return call.fail("%s must be packed, [%zu, %zu], of the type of the table", name_, n, k);
  }
  return can_multiply(units()) ? 0 : call.fail("%s", kOtherKernels);
}

}  // namespace llm
