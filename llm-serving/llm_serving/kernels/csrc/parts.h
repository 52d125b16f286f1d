// What larger operators are made of. Each part is timed as the operator it stands for.
#pragma once

#include "call.h"
#include "kernels.h"
#include "packed_weights.h"

namespace llm {

void normalize(const RmsNormArgs& args);
void multiply(const LinearArgs& args);
void gate(const SwigluArgs& args);

// y [count, columns]: the rows of a table [rows, columns], which may be a packed weight, that the integers of parameter
// `indices` name. Returns a status as operators do; nothing is written unless it is 0.
int look_up(const Call& call, int table, int indices, char* y);

// Rows of query, key and value, `width` elements each and `q_width` of them queries, and the parameters of a call that
// go with them; `cos` and `sin` have a row for each position.
struct QkvParameters {
  const void* qkv;
  size_t tokens, width, q_width;
  DType dtype;
  int positions, cos, sin, key_cache, value_cache, slot_mapping, block_tables, query_lens, context_lens;
  float scale;
  void* y;
  Passes y_passes;
};

// Rotates queries and keys, stores keys and values, attends: what four operators do otherwise, with the same bits.
// Returns a status as operators do; nothing is written unless it is 0.
int attend_to_qkv(const Call& call, const QkvParameters& at);

// A parameter that products multiply by.
class Weight {
 public:
  Weight(const Call& call, const char* name, int parameter, DType dtype)
      : name_(name),
        data_(call.data<void>(parameter)),
        dtype_(dtype),
        n_(call.dim(parameter, 0)),
        k_(call.dim(parameter, 1)),
        packed_(data_, dtype, n_, k_) {}

  // Refuses any but a packed weight [n, k] that the kernels in use can read.
  int check(const Call& call, size_t n, size_t k) const;

  // How products want their `count` rows.
  Passes passes(size_t count) const { return kernels().passes(dtype_, count, k_, packed_.units()); }

  // y = x * weight^T, of which x has the rows `passes` say.
  LinearArgs product(const Passes& passes, const void* x, void* y) const {
    LinearArgs args = {x, data_, y, dtype_, dtype_, passes.rows, n_, k_, packed_.units()};
    args.x_passes = passes;
    return args;
  }

 private:
  const char* const name_;
  const void* const data_;
  const DType dtype_;
  const size_t n_, k_;
  const PackedWeight packed_;
};

}  // namespace llm
