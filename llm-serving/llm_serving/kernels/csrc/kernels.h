// The kernels one instruction set offers, and the choice among them. Sizes are in elements; rows are contiguous.
#pragma once

#include "dtype.h"
#include "passes.h"
#include "sample_args.h"

namespace llm {

// Columns of a packed panel: one AVX-512 register of float32, one AMX tile.
constexpr size_t kPanelWidth = 16;

// Of a packed bfloat16 weight that is kept as multiples of units (fixed_point.h).
struct WeightUnits {
  const float* unit;      // [columns of whole panels], times 2^14
  float activation_norm;  // norm of a block of activations, in their units, up to which sums stay in 32 bits
};

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
  Passes x_passes = {};                // how x lies: as rows, or as `Kernels::passes` says
  const void* bias = nullptr;          // [n], added to each row; null: nothing is
  const void* added = nullptr;         // [m, n], added after that; may be y
  bool gated = false;    // y [m, n / 2] = silu(first half of a row) * second half, of type dtype; n / 2 % 16 is 0
  Passes y_passes = {};  // how a gated y lies
};

// y = x / sqrt(mean(x^2) + eps) * gamma; rstd [rows] may be null. With `added`, x + added takes the place of x, rounded
// to the element type, and is written to `sum`. y lies as y_passes say.
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
  Passes y_passes = {};
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
  void* y;                      // [rows, num_heads * head_dim], as y_passes say
  const int64_t* block_tables;  // [batch, table_width]
  const int64_t* query_lens;    // [batch]
  const int64_t* context_lens;  // [batch]
  DType dtype;
  size_t rows, batch, table_width, block_size;
  size_t num_heads, num_kv_heads, head_dim;
  float scale;
  Passes y_passes = {};
};

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  // How x [m, k] must lie for `linear` to read it in its place; rows where it is converted in any case.
  Passes (*passes)(DType dtype, size_t m, size_t k, const WeightUnits* units);
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
