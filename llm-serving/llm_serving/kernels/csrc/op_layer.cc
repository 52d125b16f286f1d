// A whole decoder layer as one operator: MindSpore spends more on eight operators than a small model computes in them.
#include <vector>

#include "call.h"
#include "kernels.h"
#include "op_attention.h"
#include "packed_weights.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Parameters of decoder_layer.
enum Parameter {
  kHidden,
  kVectors,
  kQkv,
  kOut,
  kGateUp,
  kDown,
  kCos,
  kSin,
  kKeyCache,
  kValueCache,
  kSlotMapping,
  kBlockTables,
  kQueryLens,
  kContextLens,
  kConstants,
  kResult,
  kNumParameters
};

constexpr int kNumWeights = 4;
constexpr size_t kNumConstants = 4;

struct Constants {
  float scale, eps;
  bool attention_bias, mlp_bias;
};

struct Sizes {
  size_t tokens, hidden, qkv, q, inner;
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

// The rows of a step on their way through a layer. Each part is timed as the operator it stands for.
class LayerStep {
 public:
  LayerStep(const Call& call, const PackedWeight* weights, const Sizes& sizes, const Constants& constants)
      : call_(call), weights_(weights), sizes_(sizes), constants_(constants), dtype_(call.dtype(kHidden)) {}

  void norm(const void* x, const void* gain, void* y) const {
    static OperatorClock clock("RmsNorm");
    const Timed timed(clock);
    kernels().rms_norm({x, nullptr, nullptr, gain, y, nullptr, dtype_, sizes_.tokens, sizes_.hidden, constants_.eps});
  }

  void add_and_norm(const void* x, const void* added, const void* gain, void* sum, void* y) const {
    static OperatorClock clock("AddRmsNorm");
    const Timed timed(clock);
    kernels().rms_norm({x, added, sum, gain, y, nullptr, dtype_, sizes_.tokens, sizes_.hidden, constants_.eps});
  }

  void multiply(const void* x, int weight, const char* bias, char* y) const {
    static OperatorClock clock("MatMul");
    const Timed timed(clock);
    const size_t outputs = call_.dim(weight, 0);
    const PackedWeight& packed = weights_[weight - kQkv];
    kernels().linear(
        {x, call_.data<void>(weight), y, dtype_, dtype_, sizes_.tokens, outputs, call_.dim(weight, 1), packed.units()});
    if (bias == nullptr) return;
    const size_t row_bytes = outputs * call_.element_bytes(kHidden);
    for (size_t row = 0; row < sizes_.tokens; row++) {
      kernels().add({y + row * row_bytes, bias, y + row * row_bytes, dtype_, outputs});
    }
  }

  int attend(const void* qkv, void* y) const {
    static OperatorClock clock("Attention");
    const Timed timed(clock);
    return attend_to_qkv(call_, {qkv, sizes_.tokens, sizes_.qkv, sizes_.q, dtype_, kCos, kSin, kKeyCache, kValueCache,
                                 kSlotMapping, kBlockTables, kQueryLens, kContextLens, constants_.scale, y});
  }

  void gate(const void* gate_up, void* y) const {
    static OperatorClock clock("Swiglu");
    const Timed timed(clock);
    kernels().swiglu({gate_up, y, dtype_, sizes_.tokens, sizes_.inner});
  }

  void add(const void* a, const void* b, void* y) const {
    static OperatorClock clock("AddExt");
    const Timed timed(clock);
    kernels().add({a, b, y, dtype_, sizes_.tokens * sizes_.hidden});
  }

 private:
  const Call& call_;
  const PackedWeight* const weights_;
  const Sizes& sizes_;
  const Constants& constants_;
  const DType dtype_;
};

int check(const Call& call, const PackedWeight* weights, const Sizes& sizes, const Vectors& vectors) {
  const DType dtype = call.dtype(kHidden);
  if (call.dtype(kVectors) != dtype || call.elements(kVectors) != vectors.elements) {
    return call.fail("vectors must have %zu elements of the type of hidden", vectors.elements);
  }
  const size_t inputs[kNumWeights] = {sizes.hidden, sizes.q, sizes.hidden, sizes.inner};
  const size_t outputs[kNumWeights] = {sizes.qkv, sizes.hidden, 2 * sizes.inner, sizes.hidden};
  for (int i = 0; i < kNumWeights; i++) {
    if (call.dim(kQkv + i, 0) != outputs[i] || call.dim(kQkv + i, 1) != inputs[i] || !weights[i].is_packed()) {
      return call.fail("weight %d must be packed, [%zu, %zu], of the type of hidden", i, outputs[i], inputs[i]);
    }
    if (!can_multiply(weights[i].units())) return call.fail("%s", kOtherKernels);
  }
  return 0;
}

}  // namespace
}  // namespace llm

// hidden [T, H], vectors (see Vectors), weights of query-key-value [(num_heads + 2 * num_kv_heads) * head_dim, H], out
// [H, num_heads * head_dim], gate and up [2 * I, H], down [H, I], cos, sin, key_cache, value_cache, slot_mapping,
// block_tables, query_lens, context_lens, float32[4]: scale, eps, whether there are biases in attention and in the
// feed-forward half | hidden [T, H]. A custom operator; the bits are those of the operators it stands for.
LLM_OPERATOR(decoder_layer) {
  using namespace llm;
  if (call.count() < kNumParameters) return call.fail("expects %d parameters, got %d", kNumParameters, call.count());
  if (!is_float(call.dtype(kHidden)) || call.rank(kHidden) != 2 || call.dtype(kConstants) != DType::kFloat32 ||
      call.elements(kConstants) != kNumConstants) {
    return call.fail("hidden must be floats [T, H], and the last input four constants of float32");
  }
  for (const int weight : {kQkv, kOut, kGateUp, kDown}) {
    if (call.rank(weight) != 2) return call.fail("weights must have two dimensions");
  }
  const float* numbers = call.data<const float>(kConstants);
  const Constants constants = {numbers[0], numbers[1], numbers[2] != 0.0f, numbers[3] != 0.0f};
  const Sizes sizes = {call.dim(kHidden, 0), call.dim(kHidden, 1), call.dim(kQkv, 0), call.dim(kOut, 1),
                       call.dim(kDown, 1)};
  const size_t bytes = call.element_bytes(kHidden);
  const Vectors vectors(call.data<const char>(kVectors), sizes, constants, bytes);
  const auto weight = [&](int i) {
    return PackedWeight(call.data<void>(i), call.dtype(kHidden), call.dim(i, 0), call.dim(i, 1));
  };
  const PackedWeight weights[kNumWeights] = {weight(kQkv), weight(kOut), weight(kGateUp), weight(kDown)};
  if (const int status = check(call, weights, sizes, vectors)) return status;
  const size_t row = sizes.hidden * bytes * sizes.tokens;
  const size_t attention_size = sizes.qkv + sizes.q;
  const size_t widest = 2 * sizes.inner > attention_size ? 2 * sizes.inner : attention_size;
  const size_t wide_bytes = sizes.tokens * widest * bytes;
  char* normed =
      static_cast<char*>(scratch(Scratch::kLayer, 3 * row + wide_bytes + sizes.tokens * sizes.inner * bytes + 1));
  char* change = normed + row;
  char* middle = change + row;
  char* wide = middle + row;
  char* attended = wide + sizes.tokens * sizes.qkv * bytes;
  char* gated = wide + wide_bytes;
  const void* hidden = call.data<void>(kHidden);
  const LayerStep step(call, weights, sizes, constants);
  step.norm(hidden, vectors.gain, normed);
  step.multiply(normed, kQkv, vectors.qkv, wide);
  if (const int status = step.attend(wide, attended)) return status;
  step.multiply(attended, kOut, vectors.out, change);
  step.add_and_norm(change, hidden, vectors.mlp_gain, middle, normed);
  step.multiply(normed, kGateUp, vectors.gate_up, wide);
  step.gate(wide, gated);
  step.multiply(gated, kDown, vectors.down, change);
  step.add(change, middle, call.data<void>(kResult));
  return 0;
}

LLM_EXPORT std::vector<int64_t> decoder_layerInferShape(int*, int64_t** shapes, void*) {
  return {shapes[0][0], shapes[0][1]};
}
