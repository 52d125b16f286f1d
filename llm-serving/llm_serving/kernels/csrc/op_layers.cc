// All layers of a decoder as one operator: MindSpore spends more on eight operators a layer than a small model computes
// in them, and finds its own data gone from the caches after each layer of a large one.
#include <cstring>
#include <vector>

#include "call.h"
#include "ending.h"
#include "kernels.h"
#include "op_attention.h"
#include "packed_weights.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Parameters of decoder_layers, and those of each layer behind them; the last is the result.
enum Parameter {
  kHidden,
  kCos,
  kSin,
  kSlotMapping,
  kBlockTables,
  kQueryLens,
  kContextLens,
  kSampleIndices,
  kConstants,
  kLayers
};
enum LayerParameter { kVectors, kQkv, kOut, kGateUp, kDown, kKeyCache, kValueCache, kNumLayerParameters };

constexpr int kNumWeights = 4;
constexpr size_t kNumConstants = 4;

struct Constants {
  float scale, eps;
  bool attention_bias, mlp_bias;
};

// Of all layers.
struct Sizes {
  size_t hidden, qkv, q, inner;
};

// The gains of both norms, and the biases, null where the model has none. All lie behind one another.
struct Vectors {
  const char* gain;
  const char* mlp_gain;
  const char *qkv = nullptr, *out = nullptr, *gate_up = nullptr, *down = nullptr;
  size_t elements;

  Vectors(const char* data, const Sizes& sizes, const Constants& constants, size_t bytes)
      : gain(data), mlp_gain(data + sizes.hidden * bytes), elements(2 * sizes.hidden) {
    auto take = [&](size_t size) {
      const char* vector = data + elements * bytes;
      elements += size;
      return vector;
    };
    if (constants.attention_bias) {
      qkv = take(sizes.qkv);
      out = take(sizes.hidden);
    }
    if (constants.mlp_bias) {
      gate_up = take(2 * sizes.inner);
      down = take(sizes.hidden);
    }
  }
};

// Whether gate and up consist of whole panels, so that a product can gate its own result.
bool gates_at_once(const Sizes& sizes) { return sizes.inner % kPanelWidth == 0; }

// Memory for the rows of a step on their way through the layers. `attended` lies behind the rows of query, key and
// value in `wide`, which gate and up take afterwards where they are not gated at once. The rows that sample are put
// into `narrow` and `wide`.
struct Rows {
  char *normed, *residual, *wide, *attended, *narrow;

  Rows(const Sizes& sizes, size_t rows, size_t bytes) {
    auto larger = [](size_t a, size_t b) { return a > b ? a : b; };
    auto whole_lines = [](size_t size) { return Passes::padded(size, 64); };
    auto passes = [&](size_t columns) { return Passes::most_elements(rows, columns) * bytes; };
    const size_t qkv = whole_lines(rows * bytes * sizes.qkv);
    const size_t row = whole_lines(rows * bytes * sizes.hidden);
    const size_t gate_up = gates_at_once(sizes) ? 0 : rows * bytes * 2 * sizes.inner;
    const size_t wide_bytes = larger(larger(gate_up, qkv + passes(sizes.q)), row);
    const size_t narrow_bytes = larger(passes(sizes.inner), rows * bytes * sizes.q);
    const size_t all = passes(sizes.hidden) + row + whole_lines(wide_bytes) + narrow_bytes;
    normed = static_cast<char*>(scratch(Scratch::kLayer, all + 1));
    residual = normed + passes(sizes.hidden);
    wide = residual + row;
    attended = wide + qkv;
    narrow = wide + whole_lines(wide_bytes);
  }
};

// Copies the rows that sample to `y`, and returns it.
const char* select_rows(const Call& call, const void* x, size_t row_bytes, char* y) {
  for (size_t i = 0; i < call.elements(kSampleIndices); i++) {
    const size_t row = static_cast<size_t>(call.integer(kSampleIndices, i));
    std::memcpy(y + i * row_bytes, static_cast<const char*>(x) + row * row_bytes, row_bytes);
  }
  return y;
}

// What a layer multiplies by. Each part is timed as the operator it stands for, what follows a product as the product.
class Layer {
 public:
  Layer(const Call& call, size_t index, const Sizes& sizes, const Constants& constants)
      : call_(call),
        first_(kLayers + static_cast<int>(index) * kNumLayerParameters),
        constants_(constants),
        dtype_(call.dtype(kHidden)),
        weights_{packed(kQkv), packed(kOut), packed(kGateUp), packed(kDown)},
        sizes_(sizes),
        vectors_(call.data<const char>(at(kVectors)), sizes, constants, call.element_bytes(kHidden)) {}

  int check() const {
    if (call_.dtype(at(kVectors)) != dtype_ || call_.elements(at(kVectors)) != vectors_.elements) {
      return call_.fail("vectors must have %zu elements of the type of hidden", vectors_.elements);
    }
    const size_t inputs[kNumWeights] = {sizes_.hidden, sizes_.q, sizes_.hidden, sizes_.inner};
    const size_t outputs[kNumWeights] = {sizes_.qkv, sizes_.hidden, 2 * sizes_.inner, sizes_.hidden};
    for (int i = 0; i < kNumWeights; i++) {
      const int weight = at(kQkv + i);
      if (call_.dim(weight, 0) != outputs[i] || call_.dim(weight, 1) != inputs[i] || !weights_[i].is_packed()) {
        return call_.fail("weight %d must be packed, [%zu, %zu], of the type of hidden", i, outputs[i], inputs[i]);
      }
      if (!can_multiply(weights_[i].units())) return call_.fail("%s", kOtherKernels);
    }
    return 0;
  }

  // Turns `hidden` [T, H] into `result`, which may be rows.residual as `hidden` may be: [T, H], or with `selects` only
  // the rows that sample, as nothing but the keys and values of the others is read again.
  int run(const Rows& rows, const void* hidden, bool selects, void* result) const {
    size_t count = call_.dim(kHidden, 0);
    Passes passes = passes_of(kQkv, count);
    norm(hidden, vectors_.gain, passes, rows.normed);
    multiply(passes, rows.normed, kQkv, vectors_.qkv, nullptr, rows.wide);
    passes = selects ? Passes{count, sizes_.q} : passes_of(kOut, count);
    if (const int status = attend(rows.wide, passes, rows.attended)) return status;
    const void* attended = rows.attended;
    if (selects) {
      const size_t bytes = call_.element_bytes(kHidden);
      attended = select_rows(call_, attended, sizes_.q * bytes, rows.narrow);
      hidden = select_rows(call_, hidden, sizes_.hidden * bytes, rows.wide);
      count = call_.elements(kSampleIndices);
      passes.rows = count;
    }
    multiply(passes, attended, kOut, vectors_.out, hidden, rows.residual);
    passes = passes_of(kGateUp, count);
    norm(rows.residual, vectors_.mlp_gain, passes, rows.normed);
    const Passes inner = multiply_and_gate(passes, rows.normed, rows.wide, rows.narrow);
    multiply(inner, rows.narrow, kDown, vectors_.down, rows.residual, result);
    return 0;
  }

 private:
  // As products with a weight read `count` rows.
  Passes passes_of(LayerParameter weight, size_t count) const {
    return kernels().passes(dtype_, count, call_.dim(at(weight), 1), weights_[weight - kQkv].units());
  }

  void norm(const void* x, const char* gain, const Passes& passes, void* y) const {
    static OperatorClock clock("RmsNorm");
    const Timed timed(clock);
    kernels().rms_norm(
        {x, nullptr, nullptr, gain, y, nullptr, dtype_, passes.rows, sizes_.hidden, constants_.eps, passes});
  }

  LinearArgs product(const Passes& passes, const void* x, LayerParameter weight, const char* bias, void* y) const {
    LinearArgs args = {x,
                       call_.data<void>(at(weight)),
                       y,
                       dtype_,
                       dtype_,
                       passes.rows,
                       call_.dim(at(weight), 0),
                       call_.dim(at(weight), 1),
                       weights_[weight - kQkv].units()};
    args.x_passes = passes;
    args.bias = bias;
    return args;
  }

  // y = x * weight^T + bias + added; null for what is not added.
  void multiply(const Passes& passes, const void* x, LayerParameter weight, const char* bias, const void* added,
                void* y) const {
    LinearArgs args = product(passes, x, weight, bias, y);
    args.added = added;
    multiply(args);
  }

  void multiply(const LinearArgs& args) const {
    static OperatorClock clock("MatMul");
    const Timed timed(clock);
    kernels().linear(args);
  }

  // y = silu(gate) * up, by way of `gate_up` if they are not gated at once; returns how y lies.
  Passes multiply_and_gate(const Passes& passes, const void* x, void* gate_up, void* y) const {
    if (!gates_at_once(sizes_)) {
      multiply(passes, x, kGateUp, vectors_.gate_up, nullptr, gate_up);
      static OperatorClock clock("Swiglu");
      const Timed timed(clock);
      kernels().swiglu({gate_up, y, dtype_, passes.rows, sizes_.inner});
      return {passes.rows, sizes_.inner};
    }
    LinearArgs args = product(passes, x, kGateUp, vectors_.gate_up, y);
    const Passes result = passes_of(kDown, passes.rows);
    args.gated = true;
    args.y_passes = result;
    multiply(args);
    return result;
  }

  int attend(const void* qkv, const Passes& passes, void* y) const {
    static OperatorClock clock("Attention");
    const Timed timed(clock);
    return attend_to_qkv(
        call_, {qkv, call_.dim(kHidden, 0), sizes_.qkv, sizes_.q, dtype_, kCos, kSin, at(kKeyCache), at(kValueCache),
                kSlotMapping, kBlockTables, kQueryLens, kContextLens, constants_.scale, y, passes});
  }

  int at(int parameter) const { return first_ + parameter; }

  PackedWeight packed(int weight) const {
    const int i = at(weight);
    return PackedWeight(call_.data<void>(i), dtype_, call_.dim(i, 0), call_.dim(i, 1));
  }

  const Call& call_;
  const int first_;
  const Constants& constants_;
  const DType dtype_;
  const PackedWeight weights_[kNumWeights];
  const Sizes& sizes_;
  const Vectors vectors_;
};

int check_parameters(const Call& call, size_t num_layers) {
  if (!is_float(call.dtype(kHidden)) || call.rank(kHidden) != 2 || call.dtype(kConstants) != DType::kFloat32 ||
      call.elements(kConstants) != kNumConstants) {
    return call.fail("hidden must be floats [T, H], and constants four of float32");
  }
  if (!call.is_integer(kSampleIndices)) return call.fail("sample_indices [S] must be int32 or int64");
  for (size_t i = 0; i < call.elements(kSampleIndices); i++) {
    const int64_t index = call.integer(kSampleIndices, i);
    if (index < 0 || static_cast<size_t>(index) >= call.dim(kHidden, 0)) {
      return call.fail("sample_indices[%zu] = %lld is outside the %zu rows", i, static_cast<long long>(index),
                       call.dim(kHidden, 0));
    }
  }
  for (size_t layer = 0; layer < num_layers; layer++) {
    for (const int weight : {kQkv, kOut, kGateUp, kDown}) {
      if (call.rank(kLayers + static_cast<int>(layer) * kNumLayerParameters + weight) != 2) {
        return call.fail("weights must have two dimensions");
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace llm

// hidden [T, H], cos, sin, slot_mapping, block_tables, query_lens, context_lens, sample_indices [S], float32[4]: scale,
// eps, whether there are biases in attention and in the feed-forward half; then for each layer vectors (see Vectors),
// weights of query-key-value [(num_heads + 2 * num_kv_heads) * head_dim, H], out [H, num_heads * head_dim], gate and up
// [2 * I, H], down [H, I], key_cache, value_cache | hidden [S, H] of the rows that sample. A custom operator; the bits
// are those of the operators it stands for.
LLM_OPERATOR(decoder_layers) {
  using namespace llm;
  const int of_layers = call.count() - kLayers - 1;
  if (of_layers <= 0 || of_layers % kNumLayerParameters != 0) {
    return call.fail("expects %d parameters, %d for each layer, and a result, got %d", kLayers, kNumLayerParameters,
                     call.count());
  }
  const size_t num_layers = static_cast<size_t>(of_layers / kNumLayerParameters);
  if (const int status = check_parameters(call, num_layers)) return status;
  const float* numbers = call.data<const float>(kConstants);
  const Constants constants = {numbers[0], numbers[1], numbers[2] != 0.0f, numbers[3] != 0.0f};
  const Sizes sizes = {call.dim(kHidden, 1), call.dim(kLayers + kQkv, 0), call.dim(kLayers + kOut, 1),
                       call.dim(kLayers + kDown, 1)};
  std::vector<Layer> layers;
  layers.reserve(num_layers);
  for (size_t i = 0; i < num_layers; i++) {
    layers.emplace_back(call, i, sizes, constants);
    if (const int status = layers[i].check()) return status;
  }
  const size_t samples = call.elements(kSampleIndices);
  const size_t tokens = call.dim(kHidden, 0);
  const Rows rows(sizes, samples > tokens ? samples : tokens, call.element_bytes(kHidden));
  const void* hidden = call.data<void>(kHidden);
  Ending ending(num_layers);
  for (size_t i = 0; i < num_layers; i++) {
    const bool last = i + 1 == num_layers;
    void* result = last ? call.data<void>(call.count() - 1) : rows.residual;
    if (const int status = layers[i].run(rows, hidden, last, result)) return status;
    hidden = result;
    ending.layer_done();
  }
  return 0;
}

LLM_EXPORT std::vector<int64_t> decoder_layersInferShape(int*, int64_t** shapes, void*) {
  return {shapes[llm::kSampleIndices][0], shapes[llm::kHidden][1]};
}
