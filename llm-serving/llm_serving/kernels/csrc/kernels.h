// The kernels one instruction set offers, and the choice among them. Sizes are in elements; rows are contiguous.
#pragma once

#include "dtype.h"
#include "sample_args.h"

namespace llm {

// Columns of a packed panel: one AVX-512 register of float32, one AMX tile.
constexpr size_t kPanelWidth = 16;

// Of a packed bfloat16 weight that is kept as multiples of units (fixed_point.h).
struct WeightUnits {
  const float* unit;      // [columns of whole panels], times 2^14
  float activation_norm;  // norm of a block of activations, in their units, up to which sums stay in 32 bits
};

// Rows of which a product reads a part at a time, so that those parts lie together: `width` columns of every row, then
// the next columns of every row, where the last may leave some unused. With all columns as the width, rows as usual.
struct Passes {
  size_t rows, width;

  // Where an element lies.
  size_t at(size_t row, size_t column) const { return (column / width * rows + row) * width + column % width; }

  // Calls body(first, last, at) for the parts of columns `first` to `last` of a row, and where each begins.
  template <class Body>
  void for_parts(size_t row, size_t first, size_t last, Body body) const {
    for (size_t end; first < last; first = end) {
      end = (first / width + 1) * width;
      if (end > last) end = last;
      body(first, end, at(row, first));
    }
  }
};

// What widths of passes divide, unless they are all columns.
constexpr size_t kMostPassWidth = 1024;

// y [m, n] = x [m, k] times the transpose of a packed weight [n, k] (packed_weights.h); y is of type `dtype` or
// float32. What may follow, `bias` and `added`, rounds to the element type as an operator of its own would.
struct LinearArgs {
  const void* x;
  const void* weight;
  void* y;
  DType dtype;
  DType y_dtype;
  size_t m, n, k;
  const WeightUnits* units = nullptr;  // null: the weight is kept as it is
  size_t x_width = 0;                  // of the passes that x lies in; 0: rows
  const void* bias = nullptr;          // [n], added to each row; null: nothing is
  const void* added = nullptr;         // [m, n], added after that; may be y
  // y [m, n / 2] = silu(first half of a row) * second half, in passes of this width; n is a multiple of 32. 0: as it is
  size_t gated_width = 0;
};

// y = x / sqrt(mean(x^2) + eps) * gamma; rstd [rows] may be null. With `added`, x + added takes the place of x, rounded
// to the element type, and is written to `sum`. y lies in passes.
struct RmsNormArgs {
  const void* x;
  const void* added;  // null: nothing is added
  void* sum;
  const void* gamma;
  void* y;
  float* rstd;
  DType dtype;
  size_t rows, size;
  float eps;
  size_t y_width;
};

// Rotates pairs (i, i + head_dim / 2) of each head; row t uses row position(t) of cos and sin.
struct RotaryArgs {
  const void* x;
  size_t x_stride;  // from a row of x to the next
  const void* cos;
  const void* sin;
  void* y;
  const int64_t* positions;  // null: row t uses row t
  DType dtype;
  DType table_dtype;
  size_t rows, heads, head_dim;
};

// y [rows, size] = silu(gate) * up, where a row of x is gate, then up.
struct SwigluArgs {
  const void* x;
  void* y;
  DType dtype;
  size_t rows, size;
};

// y = a + b, element by element.
struct AddArgs {
  const void* a;
  const void* b;
  void* y;
  DType dtype;
  size_t size;
};

// Causal attention of packed query rows over a paged cache (kv_layout.h).
struct AttentionArgs {
  const void* q;  // [rows, num_heads * head_dim]
  const void* key_cache;
  const void* value_cache;
  void* y;                      // as q, but in passes of y_width
  const int64_t* block_tables;  // [batch, table_width]
  const int64_t* query_lens;    // [batch]
  const int64_t* context_lens;  // [batch]
  DType dtype;
  size_t rows, batch, table_width, block_size;
  size_t num_heads, num_kv_heads, head_dim;
  float scale;
  size_t y_width;
};

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  // Width of the passes that `linear` reads m rows of x [m, k] in, so that it need not bring them there.
  size_t (*pass_width)(DType dtype, size_t m, size_t k, const WeightUnits* units);
  // Turns a packed bfloat16 weight [n, k] into multiples in its place and fills in what WeightUnits has; false if it
  // has no units and stays as it is. Null where products are in floating point.
  bool (*to_fixed_point)(void* packed, size_t n, size_t k, float* unit, float* activation_norm);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*swiglu)(const SwigluArgs&);
  void (*add)(const AddArgs&);
  void (*attention)(const AttentionArgs&);
  void (*sample)(const SampleArgs&);
};

// The kernels in use: the best this CPU runs, or what LLM_SERVING_ISA names.
const Kernels& kernels();

// Whether the kernels in use can read the weight: one kept as multiples serves those only that multiply in integers.
inline bool can_multiply(const WeightUnits* units) { return units == nullptr || kernels().to_fixed_point != nullptr; }
constexpr char kOtherKernels[] = "the weight was packed for another instruction set";

// Selects by name; false when the name is unknown or this CPU cannot run it.
bool select_kernels(const char* isa);

// Name of the i-th set this CPU can run, best first; null behind the last.
const char* supported_isa(size_t i);

}  // namespace llm
