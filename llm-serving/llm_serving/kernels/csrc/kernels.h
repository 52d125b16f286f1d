// The kernels one instruction set offers, and the choice among them. Sizes are in elements; rows are contiguous.
#pragma once

#include "dtype.h"
#include "sample_args.h"
#include "tiled_layout.h"

namespace llm {

// Columns of a packed panel: one AVX-512 register of float32, one AMX tile.
constexpr size_t kPanelWidth = 16;

// Inputs of whole panels of qvalues: a multiple of these.
constexpr size_t kFourInputs = 4;      // kW8A8
constexpr size_t kGroupMultiple = 32;  // others

// How a packed weight is kept that is not elements of the model's type; a file each.
enum class WeightFormat : uint8_t {
  kFixedPoint,  // bfloat16 as 16-bit multiples of a unit for each column (fixed_point.h)
  kW8A8,        // 8-bit qvalues with a scale for each column, times rows brought to 8 bits (w8a8.h)
  kW4A8,        // 4-bit qvalues with a scale for each column and group of inputs, times the same (w4a8.h)
  kWeightOnly,  // qvalues of 8 or 4 bits with a scale for each column and group of inputs, times rows (weight_only.h)
};

// What products know of such a weight beside its qvalues.
struct WeightQValues {
  WeightFormat format = WeightFormat::kFixedPoint;
  const float* scale = nullptr;   // [panels][groups][16]; of multiples, units times 2^14; kW8A8: null asks for sums
  const int32_t* sums = nullptr;  // kW8A8: of each column's qvalues
  float activation_norm = 0.0f;   // kFixedPoint: norm of a block of activations, in their units, up to which sums fit
  const uint8_t* zero = nullptr;  // of 4 bits: as scale; null: 8
  size_t bits = 8;
  size_t group = 0;   // inputs with one scale
  size_t groups = 1;  // of a row

  // Where the scales, or zeros, of a group of a panel begin.
  LLM_INLINE size_t number_at(size_t panel, size_t of_group) const { return (panel * groups + of_group) * kPanelWidth; }
};

// What is made of the first half of a row before it is multiplied by the second: x * sigmoid(x), or x times the normal
// distribution function of x by way of tanh.
enum class Gate : uint8_t { kNone, kSilu, kGeluTanh };

// y [m, n] = x [m, k] times the transpose of a packed weight [n, k] (packed_weights.h); y is of type `dtype` or
// float32, or int32 of sums of products of qvalues. What may follow, `bias` and `residual`, rounds to the element type
// as an operator of its own would.
struct LinearArgs {
  const void* x;
  const void* weight;
  void* y;
  DType dtype;
  DType y_dtype;
  size_t m, n, k;
  const WeightQValues* qvalues = nullptr;  // null: the weight is kept as elements
  TiledLayout x_layout = {};               // how x lies: as rows, or as `Kernels::passes` says
  const void* bias = nullptr;              // [n], added to each row; null: nothing is
  const void* residual = nullptr;          // [m, n], to which the rest is added, times `scale`; may be y
  Gate gate = Gate::kNone;                 // y [m, n / 2] = gate(first half of a row) * second half; n / 2 % 16 is 0
  TiledLayout y_layout = {};               // how y lies
  size_t residual_stride = 0;              // from a row to the next; 0: n
  float scale = 1.0f;
  const float* x_scale = nullptr;  // kW8A8: x is qvalues already, int8 [m, k], with a scale for each row or for sums
};

// y = x / sqrt(mean(x^2) + eps) * gamma; rstd [rows] may be null. With `residual`, x + residual takes the place of x,
// rounded to the element type, and is written to `residual_out`. y lies as y_layout say. Each `group` of the columns of
// a row is a row of its own to the mean and to gamma. Strides are from a row to the next; 0: size.
struct RmsNormArgs {
  const void* x;
  const void* residual;  // null: nothing is added
  void* sum;
  const void* gamma;
  void* y;
  float* rstd;
  DType dtype;
  size_t rows, size;
  float eps;
  TiledLayout y_layout = {};
  DType gamma_dtype = dtype;  // or float32
  size_t group = 0;           // 0: size
  size_t x_stride = 0, residual_stride = 0, sum_stride = 0;
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
  size_t y_stride = 0;  // 0: heads * head_dim
};

// y [rows, size] = gate(first) * second, where a row of x is first, then second.
struct SwigluArgs {
  const void* x;
  void* y;
  DType dtype;
  size_t rows, size;
  Gate gate = Gate::kSilu;
  size_t x_stride = 0, y_stride = 0;  // 0: as wide as the row
};

// y = a + scale * b, element by element, of rows that are `stride` elements apart.
struct AddArgs {
  const void* a;  // null: zeros
  const void* b;
  void* y;
  DType dtype;
  size_t size;
  float scale = 1.0f;
  size_t rows = 1, a_stride = 0, b_stride = 0, y_stride = 0;
};

// y = x * sigmoid(x), or sigmoid(x), element by element.
struct SigmoidArgs {
  const void* x;
  void* y;
  DType dtype;
  size_t size;
};

// y = added + scale * (x, rounded to the element type); without `residual`, y = x rounded. x is float32 [rows, size].
struct RoundArgs {
  const float* x;
  const void* residual;
  void* y;
  DType dtype;
  size_t rows, size;
  size_t residual_stride, y_stride;
  float scale;
};

// y = x * sigmoid(gate), one gate for each row.
struct SigmoidGateArgs {
  const void* x;
  const void* gate;
  void* y;
  DType dtype;
  size_t rows, size;
  size_t x_stride, gate_stride, y_stride;
};

// Logits in place: x = cap * tanh(scale * x / cap), or scale * x with a cap of 0.
struct CapArgs {
  float* x;
  size_t size;
  float scale, cap;
};

// The `top_k` experts of each row and their shares, by falling score, the lower index first among equals.
struct RouteArgs {
  float* logits;            // [rows, experts]; scores take their place
  const float* correction;  // [experts], added to scores for choosing only; null: nothing is
  float* topk_weights;
  int32_t* topk_ids;
  size_t rows, experts, top_k;
  size_t topk_weights_stride, chosen_stride;
  bool sigmoid;     // of each logit; otherwise softmax
  bool normalises;  // shares of a row add up to `scale`
  float scale;
  // Experts are chosen from the `top_groups` best of so many groups: those with the largest score or, with a
  // correction, with the largest sum of two.
  size_t groups, top_groups;
};

// sums [.., size] of row index[i] += share[i] * row from[i] of x [.., size], in float32, for each i below `count`; no
// row twice.
struct GatherSumArgs {
  const void* x;
  const uint32_t* from;  // null: i
  const uint32_t* index;
  const float* share;
  float* sums;
  DType dtype;  // of x
  size_t count, size;
};

// Rows brought to 8 bits with a scale each (quantized_rows.h).
struct EncodeArgs {
  const void* x;
  int8_t* qvalues;
  float* scale;
  DType dtype;
  size_t rows, size;
};

// Causal attention of packed query rows over a paged cache (kv_layout.h).
struct AttentionArgs {
  const void* q;  // [rows, num_heads * head_dim]
  const void* key_cache;
  const void* value_cache;
  void* y;                      // [rows, num_heads * head_dim], as y_layout say
  const int64_t* block_tables;  // [batch, table_width]
  const int64_t* query_lens;    // [batch]
  const int64_t* context_lens;  // [batch]
  DType dtype;
  size_t rows, batch, table_width, block_size;
  size_t num_heads, num_kv_heads, head_dim;
  float scale;
  TiledLayout y_layout = {};
  bool quantized = false;         // the caches hold qvalues and scales; there are no latents then
  size_t q_stride = 0;            // from a row of q to the next; 0: num_heads * head_dim
  size_t window = 0;              // tokens a row sees, its own included; 0: all
  float cap = 0.0f;               // c > 0: a score s becomes c * tanh(s / c)
  const float* slopes = nullptr;  // [num_heads], times the distance in tokens taken off scores after that
  // Latent attention: keys are values as well, and the other cache holds what of a key has been turned, `rope_dim`
  // elements that belong to those of q_rope [rows, num_heads * rope_dim]; null: there is none.
  const void* q_rope = nullptr;
  size_t rope_stride = 0;  // from a row of q_rope to the next
  size_t rope_dim = 0;
};

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  // How x [m, k] must lie for `linear` to read it in its place; rows where it is converted in any case.
  TiledLayout (*layout)(DType dtype, size_t m, size_t k, const WeightQValues* qvalues);
  // Turns a packed bfloat16 weight [n, k] into multiples in its place and fills in what WeightQValues has of them;
  // false if it has no units and stays as it is. Null where products are in floating point.
  bool (*to_fixed_point)(void* packed, size_t n, size_t k, float* unit, float* activation_norm);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*swiglu)(const SwigluArgs&);
  void (*add)(const AddArgs&);
  void (*multiply)(const AddArgs&);  // y = a * b; a is there, and scale has no meaning
  void (*silu)(const SigmoidArgs&);
  void (*sigmoid)(const SigmoidArgs&);
  void (*round)(const RoundArgs&);
  void (*sigmoid_gate)(const SigmoidGateArgs&);
  void (*cap)(const CapArgs&);
  void (*route)(const RouteArgs&);
  void (*gather_sum)(const GatherSumArgs&);
  void (*encode)(const EncodeArgs&);
  void (*attention)(const AttentionArgs&);
  void (*sample)(const SampleArgs&);
};

// The kernels in use: the best this CPU runs, or what LLM_SERVING_ISA names.
const Kernels& kernels();

// Whether the kernels in use can read the weight: one kept as multiples serves those only that multiply in integers.
inline bool can_multiply(const WeightQValues* qvalues) {
  return qvalues == nullptr || qvalues->format != WeightFormat::kFixedPoint || kernels().to_fixed_point != nullptr;
}
// Whether a weight has qvalues in place of elements or of multiples of the same size.
inline bool is_quantized(const WeightQValues* qvalues) {
  return qvalues != nullptr && qvalues->format != WeightFormat::kFixedPoint;
}
constexpr char kOtherKernels[] = "the weight was packed for another instruction set";

// Selects by name; false when the name is unknown or this CPU cannot run it.
bool select_kernels(const char* isa);

// Name of the i-th set this CPU can run, best first; null behind the last.
const char* supported_isa(size_t i);

}  // namespace llm
