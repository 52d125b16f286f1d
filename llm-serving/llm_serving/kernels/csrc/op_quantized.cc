// DynamicQuantExt and QuantBatchMatmul: rows brought to 8 bits, and their products with weights of 8 bits.
#include "quantized_product.h"

// x, smooth_scales (absent) | qvalues int8, a scale for each row (float32)
LLM_OPERATOR(DynamicQuantExt) {
  using namespace llm;
  if (call.count() < 4) return call.fail("expects 4 parameters, got %d", call.count());
  if (call.present(1)) return call.fail("smooth_scales must be None");
  if (!is_float(call.dtype(0)) || call.rank(0) < 1) return call.fail("x must be float32, float16 or bfloat16");
  const size_t size = call.dim(0, -1), rows = size == 0 ? 0 : call.elements(0) / size;
  if (call.dtype(2) != DType::kInt8 || call.elements(2) != rows * size || call.dtype(3) != DType::kFloat32 ||
      call.elements(3) != rows) {
    return call.fail("the results must be int8 of the shape of x, and float32 of its rows");
  }
  kernels().encode({call.data<void>(0), call.data<int8_t>(2), call.data<float>(3), call.dtype(0), rows, size});
  return 0;
}

// x1, x2, scale, offset, bias, scales of rows, transpose_x1, transpose_x2, dtype | y
LLM_OPERATOR(QuantBatchMatmul) {
  using namespace llm;
  if (call.count() < 10) return call.fail("expects 10 parameters, got %d", call.count());
  if (call.present(3) || call.present(4)) return call.fail("offset and bias must be None");
  if (call.boolean(6) || !call.boolean(7)) return call.fail("x1 * x2^T is computed only");
  if (!call.present(2)) return call.fail("scale must be given");
  return multiply_qvalues(call, {0, 1, 9, 2, call.present(5) ? 5 : -1});
}
