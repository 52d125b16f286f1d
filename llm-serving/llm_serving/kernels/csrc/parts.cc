#include "parts.h"

#include <atomic>

namespace llm {
namespace {

std::atomic<int64_t> weight_bytes{0};

// Bytes of the weight of a product.
size_t bytes_of(const LinearArgs& args) {
  if (!is_quantized(args.qvalues)) return args.n * args.k * element_size(args.dtype, nullptr);
  if (args.qvalues->format == WeightFormat::kBlocks) return args.n * args.qvalues->panel_bytes / kPanelWidth;
  return args.n * args.k * args.qvalues->bits / 8;
}

}  // namespace

void normalize(const RmsNormArgs& args) {
  static OperatorClock clock("RmsNorm");
  const Timed timed(clock);
  kernels().rms_norm(args);
}

void multiply(const LinearArgs& args) {
  static OperatorClock clock("MatMul");
  const Timed timed(clock);
  multiply_counted(args);
}

void multiply_counted(const LinearArgs& args) {
  weight_bytes.fetch_add(static_cast<int64_t>(bytes_of(args)), std::memory_order_relaxed);
  kernels().linear(args);
}

int64_t num_weight_bytes() { return weight_bytes.load(std::memory_order_relaxed); }

void gate(const SwigluArgs& args) {
  static OperatorClock clock("Swiglu");
  const Timed timed(clock);
  kernels().swiglu(args);
}

}  // namespace llm
