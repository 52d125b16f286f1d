// Parts of larger operators. Each part is timed as the operator that it replaces.
#pragma once

#include "call.h"
#include "kernels.h"
#include "packed_weights.h"

namespace llm {

void normalize(const RmsNormArgs& args);
void multiply(const LinearArgs& args);
// The same without timing, for callers that do it themselves.
void multiply_counted(const LinearArgs& args);
void gate(const SwigluArgs& args);

// Bytes of the weights of all products so far; each product reads its weight once.
int64_t num_weight_bytes();

// Copies the rows of a table [rows, columns], which may be a packed weight, that parameter `indices` selects, to y
// [count, columns]. Rows of y are `y_stride` bytes apart; 0: contiguous. Returns a status as operators do; on an error
// nothing is written. If `whole` is not 0, the table has the rows from `first` on of `whole` rows, and other rows are
// zeros.
int gather_blocks(const Call& call, int table, int indices, char* y, size_t y_stride = 0, size_t first = 0,
                  size_t whole = 0);

// Refuses integers of `indices` that are not rows of a table.
int check_indices(const Call& call, int indices, size_t rows);

// A parameter that is a weight of products.
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
    if (packed.qvalues() == nullptr) return;
    has_qvalues_ = true;
    qvalues_ = *packed.qvalues();
  }

  bool is_packed() const { return is_packed_; }
  const void* data() const { return data_; }
  // Type of the rows it multiplies.
  DType dtype() const { return dtype_; }
  size_t rows() const { return n_; }
  size_t columns() const { return k_; }
  // Null for a weight with elements.
  const WeightQValues* qvalues() const { return has_qvalues_ ? &qvalues_ : nullptr; }

  // Returns `count` rows of a packed weight, from `first` on; both must be whole panels.
  Weight part(size_t first, size_t count) const {
    Weight result = *this;
    result.data_ = static_cast<const char*>(data_) + first * row_bytes_;
    result.n_ = count;
    result.qvalues_.first_panel += first / kPanelWidth;
    const size_t numbers = qvalues_.number_at(first / kPanelWidth, 0);
    if (has_qvalues_ && qvalues_.scale != nullptr) result.qvalues_.scale += numbers;
    if (has_qvalues_ && qvalues_.sums != nullptr) result.qvalues_.sums += first;
    if (has_qvalues_ && qvalues_.zero != nullptr) result.qvalues_.zero += numbers;
    return result;
  }

  // Layout of `count` rows that products read without conversion.
  TiledLayout layout(size_t count) const { return kernels().layout(dtype_, count, k_, qvalues()); }

  // y = x * weight^T, where the rows of x have this layout. Valid as long as this object.
  LinearArgs product(const TiledLayout& layout, const void* x, void* y) const {
    LinearArgs args = {x, data_, y, dtype_, dtype_, layout.rows, n_, k_, qvalues()};
    args.x_layout = layout;
    return args;
  }

 private:
  const void* data_;
  DType dtype_ = DType::kNone;
  size_t n_, k_, row_bytes_ = 0;
  bool is_packed_ = false, has_qvalues_ = false;
  WeightQValues qvalues_ = {};
};

}  // namespace llm
