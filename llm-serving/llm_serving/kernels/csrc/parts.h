// What larger operators are made of. Each part is timed as the operator it stands for.
#pragma once

#include "call.h"
#include "kernels.h"
#include "packed_weights.h"

namespace llm {

void normalize(const RmsNormArgs& args);
void multiply(const LinearArgs& args);
// The same where somebody else takes the time.
void multiply_counted(const LinearArgs& args);
void gate(const SwigluArgs& args);

// Bytes of the weights of all products so far. Each product reads its weight once.
int64_t num_weight_bytes();

// y [count, columns]: the rows of a table [rows, columns], which may be a packed weight, that the integers of parameter
// `indices` name. Rows of y begin `y_stride` bytes from each other; 0: they are contiguous. Returns a status as
// operators do; nothing is written unless it is 0. The table has the rows from `first` on of `whole`, and others are
// zeros; whole 0: it has them all.
int look_up(const Call& call, int table, int indices, char* y, size_t y_stride = 0, size_t first = 0, size_t whole = 0);

// Refuses integers of `indices` that name no row of a table.
int check_indices(const Call& call, int indices, size_t rows);

// A parameter that products multiply by.
class Weight {
 public:
  Weight(const Call& call, int parameter)
      : Weight(call.data<void>(parameter), call.dtype(parameter), call.dim(parameter, 0), call.dim(parameter, 1)) {}

  Weight(const void* data, DType tensor, size_t n, size_t k) : data_(data), n_(n), k_(k) {
    const PackedWeight packed(data_, tensor, n_, k_);
    is_packed_ = packed.is_packed();
    dtype_ = packed.dtype();
    k_ = packed.columns();
    row_bytes_ = packed.row_bytes();
    if (packed.codes() == nullptr) return;
    has_codes_ = true;
    codes_ = *packed.codes();
  }

  bool is_packed() const { return is_packed_; }
  const void* data() const { return data_; }
  // Of the rows it multiplies.
  DType dtype() const { return dtype_; }
  size_t rows() const { return n_; }
  size_t columns() const { return k_; }
  // Null for a weight that is kept as elements.
  const WeightCodes* codes() const { return has_codes_ ? &codes_ : nullptr; }

  // `count` rows of a packed weight, from `first` on; both are whole panels.
  Weight part(size_t first, size_t count) const {
    Weight result = *this;
    result.data_ = static_cast<const char*>(data_) + first * row_bytes_;
    result.n_ = count;
    const size_t numbers = codes_.number_at(first / kPanelWidth, 0);
    if (has_codes_) result.codes_.scale += numbers;
    if (has_codes_ && codes_.sums != nullptr) result.codes_.sums += first;
    if (has_codes_ && codes_.zero != nullptr) result.codes_.zero += numbers;
    return result;
  }

  // How products want their `count` rows.
  Passes passes(size_t count) const { return kernels().passes(dtype_, count, k_, codes()); }

  // y = x * weight^T, of which x has the rows `passes` say. Valid as long as this object.
  LinearArgs product(const Passes& passes, const void* x, void* y) const {
    LinearArgs args = {x, data_, y, dtype_, dtype_, passes.rows, n_, k_, codes()};
    args.x_passes = passes;
    return args;
  }

 private:
  const void* data_;
  DType dtype_ = DType::kNone;
  size_t n_, k_, row_bytes_ = 0;
  bool is_packed_ = false, has_codes_ = false;
  WeightCodes codes_ = {};
};

}  // namespace llm
