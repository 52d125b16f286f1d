// The kernels of one instruction set, and the choice among the sets. Sizes are in elements; rows are contiguous.
#pragma once

#include "dtype.h"
#include "sample_args.h"
#include "tiled_layout.h"

namespace llm {

// Columns of a packed panel: one AVX-512 register of float32, one AMX tile.
constexpr size_t kPanelWidth = 16;

// Whole panels of qvalues have a multiple of this number of inputs.
constexpr size_t kFourInputs = 4;      // kW8A8
constexpr size_t kGroupMultiple = 32;  // other formats

// Formats of packed weights that are not elements of the model's type; each has a file of its own.
enum class WeightFormat : uint8_t {
  kFixedPoint,  // bfloat16 as 16-bit multiples of a unit for each column (fixed_point.h)
  kW8A8,        // 8-bit qvalues with a scale for each column, times rows brought to 8 bits (w8a8.h)
  kW4A8,        // 4-bit qvalues with a scale for each column and group of inputs, times rows brought to 8 bits (w4a8.h)
  kWeightOnly,  // qvalues of 8 or 4 bits with a scale for each column and group of inputs, times rows (weight_only.h)
  kBlocks,  // blocks of GGUF files, times rows brought to 8 bits in blocks (blocks.h) or rows (weight_only_blocks.h)
};

// Form of qvalues in blocks (packed_blocks.h).
struct BlockForm {
  uint8_t bits = 8;         // of a qvalue: 4, 5, 6 or 8
  uint8_t zero = 0;         // the qvalue that represents 0, without minima
  uint8_t group = 32;       // inputs with one scale: 16 or 32
  bool has_minima = false;  // whether each group has a minimum; only with 4 or 5 bits
  bool has_units = false;   // whether scales are integers, times a unit for each 256 inputs

  LLM_INLINE bool operator==(const BlockForm& other) const {
    return bits == other.bits && zero == other.zero && group == other.group && has_minima == other.has_minima &&
           has_units == other.has_units;
  }
};

// Consecutive panels of one form.
struct BlockSegment {
  size_t first_panel;
  size_t offset;  // of its first panel, in bytes
  BlockForm form;
};

// What products need of such a weight besides its qvalues.
struct WeightQValues {
  WeightFormat format = WeightFormat::kFixedPoint;
  const float* scale = nullptr;   // [panels][groups][16]; kFixedPoint: units times 2^14; kW8A8: null to return sums
  const int32_t* sums = nullptr;  // kW8A8: sums of each column's qvalues
  float activation_norm = 0.0f;   // kFixedPoint: norm of a block of activations, in their units, up to which sums fit
  const uint8_t* zero = nullptr;  // 4 bits: zero points, laid out like scale; null: 8
  size_t bits = 8;
  size_t group = 0;      // inputs with one scale
  size_t groups = 1;     // groups of a row
  bool rotated = false;  // the product takes rotated rows (rotation.h)
  // kBlocks:
  const BlockSegment* segments = nullptr;
  size_t num_segments = 0;
  size_t first_panel = 0;    // panels before the first one of this part of a weight
  size_t panel_bytes = 0;    // mean bytes of a panel
  bool weight_only = false;  // rows are multiplied in the model dtype

  // Returns the index of the scales, or zero points, of a group of a panel.
  LLM_INLINE size_t number_at(size_t panel, size_t of_group) const { return (panel * groups + of_group) * kPanelWidth; }

  // Returns the segment of a panel, counted from the start of the whole weight.
  LLM_INLINE const BlockSegment& segment_of(size_t panel) const {
    size_t i = num_segments - 1;
    while (segments[i].first_panel > panel) i--;
    return segments[i];
  }
};

// Gate function, applied to the first half of a row before it is multiplied by the second: x * sigmoid(x), GELU in its
// tanh approximation, GELU, or x * sigmoid(1.702 x) of x <= 7 times one more than the second half in [-7, 7] (gpt-oss).
// Values equal the attribute `function` of programs. kTanh is an activation function, never a gate.
enum class Gate : uint8_t { kNone, kSilu, kGeluTanh, kGelu, kClamped, kTanh = 6 };

// Function applied to b in y = a * function(b).
enum class Factor : uint8_t { kItself, kSilu, kSigmoid, kRelu };

// Most rows of an adapter that are multiplied by its A together.
constexpr size_t kAdapterRows = 16;

// `count` rows of one adapter, in AdapterRows::order from `first` on.
struct AdapterSpan {
  int32_t slot;
  uint32_t first, count;  // count: 1 to kAdapterRows
};

// The rows of a product that have an adapter.
struct AdapterRows {
  const int32_t* slots;   // [m], slot of the adapter of a row; -1: none
  const uint32_t* order;  // rows by slot, ascending in each
  const AdapterSpan* spans;
  size_t num_spans;
};

// Matrices of adapters, which change a product x * weight^T to x * weight^T + B r with r = A x, rounded to the element
// type (lora.h). Each panel of 16 columns belongs to a part, which has its own r. K, N and `max_rank` are multiples of
// 16; the panels are like those of packed weights.
struct AdapterArgs {
  AdapterRows rows;
  const void* a;       // [slots, num_parts * max_rank / 16, K, 16]
  const void* b;       // [slots, N / 16, max_rank, 16]
  const float* ranks;  // [slots, num_parts], rows of A and of B in use
  const float* parts;  // [N / 16], part of each panel
  size_t num_parts, max_rank;
  void* r;  // memory for float32 [m, num_parts, max_rank]
};

// y [m, n] = x [m, k] times the transpose of a packed weight [n, k] (packed_weights.h); y is of type `dtype` or
// float32, or int32 for sums of products of qvalues. `bias` and `residual` are rounded to the element type as separate
// operators would round them.
struct LinearArgs {
  const void* x;
  const void* weight;
  void* y;
  DType dtype;
  DType y_dtype;
  size_t m, n, k;
  const WeightQValues* qvalues = nullptr;  // null: the weight has elements
  TiledLayout x_layout = {};               // layout of x: rows, or as `Kernels::layout` returns
  const void* bias = nullptr;              // [n], added to each row; may be null
  const void* residual = nullptr;          // [m, n], to which the product times `scale` is added; may be y
  Gate gate = Gate::kNone;                 // y [m, n / 2] = gate(first half of a row) * second half; n / 2 % 16 is 0
  TiledLayout y_layout = {};               // layout of y
  size_t residual_stride = 0;              // elements from a row to the next; 0: n
  float scale = 1.0f;
  const float* x_scale = nullptr;  // kW8A8: x is already int8 qvalues [m, k], with a scale for each row, or for sums
  const AdapterArgs* adapters = nullptr;  // null: no row has an adapter; y is of type `dtype` otherwise
};

// y = x / sqrt(mean(x^2) + eps) * gamma + beta, where the mean of x is subtracted from it first if `centred`; rstd
// [rows] may be null. With `residual`, x + residual replaces x, rounded to the element type, and is written to
// `residual_out`. y has layout y_layout. Each `group` columns of a row are normalised separately. Strides are from a
// row to the next; 0: size.
struct RmsNormArgs {
  const void* x;
  const void* residual;  // may be null
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
  bool centred = false;
  const void* beta = nullptr;  // of gamma's type and size; null: zeros
  bool of_row = false;         // gamma and beta have elements for all columns of a row, otherwise for those of a group
};

// y = rotate(x + bias) - offset for the pairs (i, i + head_dim / 2) of each head. All of it is computed in float32, and
// y is rounded once. Row t uses row position(t) of cos and sin.
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
  size_t y_stride = 0;                             // 0: heads * head_dim
  const float *bias = nullptr, *offset = nullptr;  // [heads * head_dim]; null: zeros
};

// y [rows, size] = gate(first) * second, where a row of x is first, then second; or gate(x) if there is no second.
struct SwigluArgs {
  const void* x;
  void* y;
  DType dtype;
  size_t rows, size;
  Gate gate = Gate::kSilu;
  size_t x_stride = 0, y_stride = 0;  // 0: the width of the row
  bool has_second = true;
};

// y = a + scale * b, or a * factor(b), element by element, of rows that are
// `stride` elements apart.
struct AddArgs {
  const void* a;  // null: zeros
  const void* b;
  void* y;
  DType dtype;
  size_t size;
  float scale = 1.0f;
  size_t rows = 1, a_stride = 0, b_stride = 0, y_stride = 0;
  Factor factor = Factor::kItself;
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

// Caps logits in place: x = cap * tanh(scale * x / cap), or scale * x with a cap of 0.
struct CapArgs {
  float* x;
  size_t size;
  float scale, cap;
};

// The `top_k` experts of each row and their weights, by descending score; of equal scores the lower index first.
struct RouteArgs {
  float* logits;            // [rows, experts]; replaced by scores
  const float* bias;        // [experts], added to logits; may be null
  const float* correction;  // [experts], added to scores for the choice only; may be null
  float* topk_weights;
  int32_t* topk_ids;
  size_t rows, experts, top_k;
  size_t topk_weights_stride, chosen_stride;
  bool sigmoid;     // score is a sigmoid of each logit; otherwise a softmax
  bool normalises;  // weights of a row sum to `scale`
  float scale;
  // Experts are chosen from the `top_groups` best of `groups` groups: those with the largest score or, with a
  // correction, with the largest sum of two scores.
  size_t groups, top_groups;
  const float* factors = nullptr;  // [experts], applied to the weights last; may be null
  // SparseMixer (Liu et al. 2023): experts are chosen one after another by logit. The weight of each is its share of a
  // softmax over the experts not chosen before whose logit is below the largest by at most `mixer_margin` times the
  // larger of that and of the own absolute logit. `sigmoid`, `normalises`, `correction` and groups are not used.
  bool mixes = false;
  float mixer_margin = 0.0f;
};

// sums [.., size] of row index[i] += share[i] * row from[i] of x [.., size], in float32, for each i below `count`; each
// row of sums occurs at most once.
struct GatherSumArgs {
  const void* x;
  const uint32_t* from;  // null: i
  const uint32_t* index;
  const float* share;
  float* sums;
  DType dtype;  // type of x
  size_t count, size;
};

// y [rows, streams * size] = base + (offset + coefficient) * x for all streams from `first` on, in float32 and rounded
// once. x has `terms` parts of `size` elements, which are added in order; coefficients [rows, streams * terms] are
// zeros if null.
struct MixStreamsArgs {
  const void* base;
  const void* x;
  const void* coefficients;
  void* y;
  DType dtype;
  size_t rows, streams, terms, size, first;
  size_t base_stride, x_stride, coefficients_stride, y_stride;  // from a row to the next
  float offset;
};

// Scales each of `streams` parts of x [rows, streams * size] to the root mean square of `like` [rows, size]; the mean
// of the squares of a part counts as `eps` at least. y is `like`, then all parts, or if `sums` the sum of these.
struct MatchStreamsArgs {
  const void* like;
  const void* x;
  void* y;
  DType dtype;
  size_t rows, streams, size;
  size_t like_stride, x_stride, y_stride;
  float eps;
  bool sums;
};

// y [rows, size] = the part of x above mean + scale * standard deviation of its row, zero elsewhere.
struct SparsifyArgs {
  const void* x;
  void* y;
  DType dtype;
  size_t rows, size;
  size_t x_stride, y_stride;
  float scale;
};

// Rows quantized to 8 bits with a scale each (quantized_rows.h).
struct EncodeArgs {
  const void* x;
  int8_t* qvalues;
  float* scale;
  DType dtype;
  size_t rows, size;
  bool rotates = false;  // whether rows are rotated first (rotation.h)
};

// Returns how many numbers of a row are rotated together (rotation.h): the largest power of two that divides `size`, at
// most 128; 1, which means none, below 16.
constexpr size_t rotation_block(size_t size) {
  const size_t power = size & (~size + 1);
  const size_t block = power < 128 ? power : 128;
  return block < 16 ? 1 : block;
}

// Attention of packed query rows over a paged cache (kv_layout.h).
struct AttentionArgs {
  const void* q;  // [rows, num_heads * head_dim], or key_dim in place of head_dim
  const void* key_cache;
  const void* value_cache;
  void* y;                      // [rows, num_heads * head_dim], with layout y_layout
  const int64_t* block_tables;  // [batch, table_width]
  const int64_t* query_lens;    // [batch]
  const int64_t* context_lens;  // [batch]
  DType dtype;
  size_t rows, batch, table_width, block_size;
  size_t num_heads, num_kv_heads, head_dim;
  float scale;
  TiledLayout y_layout = {};
  bool quantized = false;  // the caches hold qvalues and scales; not with latent keys
  size_t q_stride = 0;     // elements from a row of q to the next; 0: those of all heads
  // Whether a row sees only tokens up to its own. Otherwise it sees the whole request, or with a window all tokens that
  // are closer than the window, before and after its own.
  bool causal = true;
  size_t window = 0;  // tokens that a row sees, including its own; 0: all
  // A causal row sees only tokens of its own chunk, which are positions 0 to chunk - 1, chunk to 2 * chunk - 1 and so
  // on (Llama 4); 0: no chunks. Not with a window.
  size_t chunk = 0;
  float cap = 0.0f;  // c > 0: a score s becomes c * tanh(s / c)
  // ALiBi slopes [num_heads]: slope times distance in tokens is subtracted from capped scores
  const float* slopes = nullptr;
  // Scores [num_heads] that take a share of the softmax and add no value (Xiao et al. 2023, attention sinks).
  const float* sinks = nullptr;
  // Latent attention: keys are also the values, and the value cache has the rotary part of keys, `rope_dim` elements,
  // which belong to q_rope [rows, num_heads * rope_dim]; null: no latent keys.
  const void* q_rope = nullptr;
  size_t rope_stride = 0;  // elements from a row of q_rope to the next
  size_t rope_dim = 0;
  // Latent attention with one cache: keys, and heads of q, have so many elements, and the first head_dim elements of a
  // key are its value; value_cache is not read. 0: heads of q, keys and values have head_dim elements.
  size_t key_dim = 0;
};

// The sequences of a step. Each has consecutive rows, which are processed in order, and state slots.
struct Sequences {
  size_t count;
  const int64_t* first_rows;  // [count]
  const int64_t* lens;        // [count], rows
  const int64_t* in;          // [count], slot of the state before the first row; -1: zeros
  const int64_t* out;         // [rows of all sequences], slot that gets the state after a row; -1: none
};

// Depthwise causal convolution: y[t] = function(bias + sum over i of weight[i] * x[t - (taps - 1 - i)]), within a
// sequence. The state has the last taps - 1 rows of x, oldest first.
struct CausalConvArgs {
  const void* x;
  const float* weight;  // [taps, size]
  const float* bias;    // [size]; may be null
  void* y;
  float* states;  // [slots, taps - 1, size]
  Sequences sequences;
  DType dtype;
  size_t size, taps;
  size_t x_stride, y_stride;
  Gate gate;  // kNone or kSilu
};
constexpr size_t kMaxTaps = 8;

// A linear recurrence with a matrix for each head (recurrence.h): the gated delta rule, or Mamba-2 if b is null.
// Consecutive heads of v share a head of q and k.
struct RecurrenceArgs {
  const void *q, *k, *v;             // q and k [rows, key_heads * key_dim], v [rows, heads * value_dim]
  const void *a, *b;                 // [rows, heads]; b may be null
  const float *rates, *bias, *skip;  // [heads]; skip may be null
  void* y;                           // [rows, heads * value_dim]
  float* states;                     // [slots, heads, value_dim / 16, key_dim, 16]
  Sequences sequences;
  DType dtype;
  size_t heads, key_heads, key_dim, value_dim;
  size_t q_stride, k_stride, v_stride, a_stride, b_stride, y_stride;
  float scale = 1.0f, eps = 0.0f;  // delta rule: factor of normalised queries, eps of the norm
  float low, high;                 // limits of softplus(a + bias)
};

// The request of a row, and the index of the row's token in it.
struct RowOwner {
  size_t request, position;
};

// Scores of the keys of one head, up to the position of each row: the sum over heads of weight * relu(q * key).
struct KeyScoresArgs {
  const void* q;        // [rows, heads * dim]
  const void* weights;  // [rows, heads]
  const void* keys;     // [num_blocks, block_size, 1, dim]
  const int64_t* block_tables;
  const RowOwner* owners;  // [rows]; requests are indices of block tables
  float* scores;           // [rows, scores_stride]; scores beyond the position of a row are not defined
  DType dtype;
  size_t rows, heads, dim;
  size_t q_stride, weights_stride;
  size_t scores_stride;  // a multiple of kChunkTokens
  size_t table_width, block_size;
};

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  // Layout of x [m, k] that `linear` reads without conversion; rows if it is converted anyway.
  TiledLayout (*layout)(DType dtype, size_t m, size_t k, const WeightQValues* qvalues);
  // Converts a packed bfloat16 weight [n, k] in place to multiples, and fills in the fields of WeightQValues; false
  // if it has no units and is unchanged. Null if products are in floating point.
  bool (*to_fixed_point)(void* packed, size_t n, size_t k, float* unit, float* activation_norm);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*swiglu)(const SwigluArgs&);
  void (*add)(const AddArgs&);
  void (*multiply)(const AddArgs&);  // y = a * factor(b); a is not null, scale is ignored
  void (*silu)(const SigmoidArgs&);
  void (*sigmoid)(const SigmoidArgs&);
  void (*round)(const RoundArgs&);
  void (*sigmoid_gate)(const SigmoidGateArgs&);
  void (*cap)(const CapArgs&);
  void (*route)(const RouteArgs&);
  void (*gather_sum)(const GatherSumArgs&);
  void (*encode)(const EncodeArgs&);
  void (*rotate)(float* x, size_t size);  // a row in place (rotation.h)
  void (*attention)(const AttentionArgs&);
  void (*sample)(const SampleArgs&);
  void (*causal_conv)(const CausalConvArgs&);
  void (*recurrence)(const RecurrenceArgs&);
  void (*mix_streams)(const MixStreamsArgs&);
  void (*match_streams)(const MatchStreamsArgs&);
  void (*sparsify)(const SparsifyArgs&);
  void (*key_scores)(const KeyScoresArgs&);
};

// The kernels in use, which Python chooses before the first operator runs (kernels/library.py).
const Kernels& kernels();
bool has_kernels();
void use_kernels(const Kernels* set);

// Whether the kernels in use can read the weight: multiples can only be multiplied in integers.
inline bool can_multiply(const WeightQValues* qvalues) {
  return qvalues == nullptr || qvalues->format != WeightFormat::kFixedPoint || kernels().to_fixed_point != nullptr;
}
// Whether a weight has qvalues rather than elements or multiples of the same size.
inline bool is_quantized(const WeightQValues* qvalues) {
  return qvalues != nullptr && qvalues->format != WeightFormat::kFixedPoint;
}
constexpr char kOtherKernels[] = "the weight was packed for another instruction set";

}  // namespace llm
