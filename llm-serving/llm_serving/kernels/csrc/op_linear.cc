// MatMul, the primitive of every linear layer.
#include "call.h"
#include "kernels.h"
#include "packed_weights.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Any layout, one sum at a time in float32: for products that are none of our layers'.
void multiply_any(const Call& call, bool transpose_a, bool transpose_b, size_t m, size_t n, size_t k) {
  const DType dtype = call.dtype(0);
  auto row = [&](size_t i) {
    for (size_t j = 0; j < n; j++) {
      float sum = 0.0f;
      for (size_t l = 0; l < k; l++) {
        sum += load_element(call.data<void>(0), dtype, transpose_a ? l * m + i : i * k + l) *
               load_element(call.data<void>(1), dtype, transpose_b ? j * k + l : l * n + j);
      }
      store_element(call.data<void>(4), call.dtype(4), i * n + j, sum);
    }
  };
  parallel_for(m, row);
}

}  // namespace
}  // namespace llm

// x, weight, transpose_a, transpose_b | y
LLM_OPERATOR(MatMul) {
  using namespace llm;
  if (call.count() < 5) return call.fail("expects 5 parameters, got %d", call.count());
  const DType dtype = call.dtype(0);
  if (!is_float(dtype) || call.dtype(1) != dtype || !is_float(call.dtype(4))) {
    return call.fail("both inputs must be float32, float16 or bfloat16, of one type");
  }
  if (call.rank(0) != 2 || call.rank(1) != 2 || call.rank(4) != 2) return call.fail("inputs must have two dimensions");
  const bool transpose_a = call.boolean(2);
  const bool transpose_b = call.boolean(3);
  const size_t m = call.dim(0, transpose_a ? 1 : 0);
  const size_t k = call.dim(0, transpose_a ? 0 : 1);
  const size_t n = call.dim(1, transpose_b ? 0 : 1);
  if (call.dim(1, transpose_b ? 1 : 0) != k || call.dim(4, 0) != m || call.dim(4, 1) != n) {
    return call.fail("shapes [%zu, %zu] x [%zu, %zu] do not fit", m, k, call.dim(1, 0), call.dim(1, 1));
  }
  if (!is_packed(call.data<void>(1), dtype, call.dim(1, 0), call.dim(1, 1))) {
    multiply_any(call, transpose_a, transpose_b, m, n, k);
    return 0;
  }
  if (transpose_a || !transpose_b) return call.fail("a packed weight is multiplied as x * weight^T only");
  if (call.dtype(4) != dtype && call.dtype(4) != DType::kFloat32) return call.fail("the result has another type");
  kernels().linear({call.data<void>(0), call.data<void>(1), call.data<void>(4), dtype, call.dtype(4), m, n, k});
  return 0;
}
