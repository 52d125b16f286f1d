// MatMul, the primitive of every linear layer.
#include <vector>

#include "call.h"
#include "kernels.h"
#include "packed_weights.h"
#include "parts.h"
#include "quantized_product.h"

namespace llm {
namespace {

// Returns a row-major copy of a matrix [rows, columns], or of its transpose.
std::vector<char> copy_of(const void* source, size_t rows, size_t columns, size_t bytes, bool transposed) {
  std::vector<char> copy(rows * columns * bytes);
  for (size_t row = 0; row < rows; row++) {
    for (size_t column = 0; column < columns; column++) {
      const size_t at = transposed ? column * rows + row : row * columns + column;
      std::memcpy(copy.data() + (row * columns + column) * bytes, static_cast<const char*>(source) + at * bytes, bytes);
    }
  }
  return copy;
}

// Computes products with unpacked or transposed operands by copying them: correct, but slow.
void multiply_unpacked(const LinearArgs& args, size_t bytes, bool transpose_a, bool transpose_b) {
  const std::vector<char> x = copy_of(args.x, args.m, args.k, bytes, transpose_a);
  const std::vector<char> weight = copy_of(args.weight, args.n, args.k, bytes, !transpose_b);
  std::vector<char> packed(weight.size());
  pack_weight(weight.data(), packed.data(), args.dtype, args.n, args.k);
  LinearArgs plain = args;
  plain.x = x.data();
  plain.weight = packed.data();
  kernels().linear(plain);
}

}  // namespace
}  // namespace llm

// x, weight, transpose_a, transpose_b | y; for 8-bit qvalues the exact sums, as float32
LLM_OPERATOR(MatMul) {
  using namespace llm;
  if (call.count() < 5) return call.fail("expects 5 parameters, got %d", call.count());
  const DType dtype = call.dtype(0);
  if (dtype == DType::kInt8 && !call.boolean(2) && call.boolean(3)) return multiply_qvalues(call, {0, 1, 4});
  if (call.rank(0) != 2 || call.rank(1) != 2 || call.rank(4) != 2) return call.fail("inputs must have two dimensions");
  const PackedWeight weight(call.data<void>(1), call.dtype(1), call.dim(1, 0), call.dim(1, 1));
  if (!is_float(dtype) || weight.dtype() != dtype || !is_float(call.dtype(4))) {
    return call.fail("both inputs must be float32, float16 or bfloat16, of one type");
  }
  const bool transpose_a = call.boolean(2);
  const bool transpose_b = call.boolean(3);
  const size_t m = call.dim(0, transpose_a ? 1 : 0);
  const size_t k = call.dim(0, transpose_a ? 0 : 1);
  const size_t n = call.dim(1, transpose_b ? 0 : 1);
  const size_t weight_k = transpose_b ? weight.columns() : call.dim(1, 0);
  if (weight_k != k || call.dim(4, 0) != m || call.dim(4, 1) != n) {
    return call.fail("shapes [%zu, %zu] x [%zu, %zu] do not fit", m, k, call.dim(1, 0), weight.columns());
  }
  if (call.dtype(4) != dtype && call.dtype(4) != DType::kFloat32) return call.fail("the result has another type");
  LinearArgs args = {call.data<void>(0), call.data<void>(1), call.data<void>(4), dtype, call.dtype(4), m, n, k};
  if (!weight.is_packed()) {
    multiply_unpacked(args, call.element_bytes(0), transpose_a, transpose_b);
    return 0;
  }
  if (transpose_a || !transpose_b) return call.fail("a packed weight is multiplied as x * weight^T only");
  args.qvalues = weight.qvalues();
  if (!can_multiply(args.qvalues)) return call.fail("%s", kOtherKernels);
  multiply_counted(args);
  return 0;
}
