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

}  // namespace llm
