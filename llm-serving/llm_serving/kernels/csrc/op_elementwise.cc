// RmsNorm, AddRmsNorm, Swiglu and ApplyRotaryPosEmb.
#include <vector>

#include "call.h"
#include "kernels.h"

namespace llm {
namespace {

// Parameter indices of both norms; -1 if one lacks the parameter.
struct NormParameters {
  int x, residual, gamma, eps, y, rstd, sum;
};

int norm_rows(const Call& call, const NormParameters& at) {
  const DType dtype = call.dtype(at.x);
  if (!is_float(dtype) || call.dtype(at.gamma) != dtype) return call.fail("x and gamma must be floats of one type");
  const size_t size = call.elements(at.gamma);
  if (call.rank(at.gamma) != 1 || call.rank(at.x) < 1 || call.dim(at.x, -1) != size) {
    return call.fail("gamma of %zu elements does not fit rows of x", size);
  }
  const bool adds = at.residual >= 0;
  if (adds && (call.dtype(at.residual) != dtype || call.elements(at.residual) != call.elements(at.x))) {
    return call.fail("both inputs must be of one type and shape");
  }
  const size_t rows = size == 0 ? 0 : call.elements(at.x) / size;
  kernels().rms_norm({call.data<void>(at.x), adds ? call.data<void>(at.residual) : nullptr,
                      adds ? call.data<void>(at.sum) : nullptr, call.data<void>(at.gamma), call.data<void>(at.y),
                      call.present(at.rstd) ? call.data<float>(at.rstd) : nullptr, dtype, rows, size,
                      call.number(at.eps)});
  return 0;
}

}  // namespace
}  // namespace llm

// x, gamma, eps | y, rstd (float32)
LLM_OPERATOR(RmsNorm) {
  if (call.count() < 5) return call.fail("expects 5 parameters, got %d", call.count());
  return llm::norm_rows(call, {0, -1, 1, 2, 3, 4, -1});
}

// x1, x2, gamma, eps | y, rstd (float32), x1 + x2
LLM_OPERATOR(AddRmsNorm) {
  if (call.count() < 7) return call.fail("expects 7 parameters, got %d", call.count());
  return llm::norm_rows(call, {0, 1, 2, 3, 4, 5, 6});
}

// x, axis | y
LLM_OPERATOR(Swiglu) {
  using namespace llm;
  if (call.count() < 3) return call.fail("expects 3 parameters, got %d", call.count());
  if (!is_float(call.dtype(0))) return call.fail("x must be float32, float16 or bfloat16");
  const int64_t axis = call.integer(1);
  if (axis != -1 && axis != call.rank(0) - 1) return call.fail("only the last axis can be halved");
  const size_t width = call.dim(0, -1);
  if (width % 2 != 0) return call.fail("the last axis must be even, is %zu", width);
  const size_t rows = width == 0 ? 0 : call.elements(0) / width;
  kernels().swiglu({call.data<void>(0), call.data<void>(2), call.dtype(0), rows, width / 2});
  return 0;
}

namespace llm {
namespace {

constexpr int64_t kRotateHalf = 2;

// Returns the rows of a tensor whose last axis is all heads of a row.
size_t rows_of(const Call& call, int x) { return call.dim(x, -1) == 0 ? 0 : call.elements(x) / call.dim(x, -1); }

// Rotates tensor `x` into `y`; null positions mean that row t uses row t of cos and sin.
int rotate(const Call& call, int x, int cos, int sin, int y, const int64_t* positions) {
  const DType dtype = call.dtype(x);
  const DType table = call.dtype(cos);
  const size_t head_dim = call.dim(cos, -1);
  if (!is_float(dtype) || call.dtype(sin) != table || (table != dtype && table != DType::kFloat32)) {
    return call.fail("cos and sin must be of the type of x, or float32");
  }
  if (head_dim == 0 || head_dim % 2 != 0) return call.fail("head_dim must be even, is %zu", head_dim);
  const size_t rows = rows_of(call, x);
  if (call.dim(x, -1) % head_dim != 0) {
    return call.fail("rows of x are not whole heads of %zu elements", head_dim);
  }
  const size_t heads = rows == 0 ? 0 : call.elements(x) / rows / head_dim;
  kernels().rotary({call.data<void>(x), heads * head_dim, call.data<void>(cos), call.data<void>(sin),
                    call.data<void>(y), positions, dtype, table, rows, heads, head_dim});
  return 0;
}

}  // namespace
}  // namespace llm

// q, k, cos, sin, lengths, cos_format | q, k. cos and sin have a row for each token, or for each position, which then
// follows from the lengths of the packed prompts.
LLM_OPERATOR(ApplyRotaryPosEmb) {
  using namespace llm;
  if (call.count() < 8) return call.fail("expects 8 parameters, got %d", call.count());
  if (call.integer(5) != kRotateHalf) return call.fail("cos_format must be 2 (rotate half)");
  const size_t rows = rows_of(call, 0);
  const size_t table_rows = call.elements(2) / (call.dim(2, -1) + (call.dim(2, -1) == 0));
  if (call.elements(3) != call.elements(2)) return call.fail("cos and sin must have one shape");
  if (rows_of(call, 1) != rows) return call.fail("q and k must have the same number of rows");
  std::vector<int64_t> positions;
  if (table_rows != rows) {
    for (size_t i = 0; i < call.elements(4); i++) {
      for (int64_t position = 0; position < call.integer(4, i); position++) positions.push_back(position);
      if (call.integer(4, i) > static_cast<int64_t>(table_rows)) return call.fail("a length exceeds the tables");
    }
    if (positions.size() != rows) return call.fail("%zu rows fit neither the tables nor the lengths", rows);
  }
  const int64_t* at = positions.empty() ? nullptr : positions.data();
  const int status = rotate(call, 0, 2, 3, 6, at);
  return status != 0 ? status : rotate(call, 1, 2, 3, 7, at);
}
