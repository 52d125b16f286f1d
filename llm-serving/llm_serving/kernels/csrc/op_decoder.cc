// A whole decoder as one operator: MindSpore spends more on a step's operators than a small model computes in them, and
// finds its own data gone from the caches after each layer of a large one.
#include <algorithm>
#include <vector>

#include "decoder.h"
#include "ending.h"

namespace llm {
namespace {

int check_parameters(const Call& call, size_t num_layers) {
  const DType dtype = call.dtype(kTable);
  if (!is_float(dtype) || call.rank(kTable) != 2 || call.dtype(kGain) != dtype ||
      call.elements(kGain) != call.dim(kTable, 1)) {
    return call.fail("table must be floats [V, H], and gain [H] of their type");
  }
  if (call.dtype(kConstants) != DType::kFloat32 || call.elements(kConstants) != 4) {
    return call.fail("constants must be four of float32");
  }
  if (!call.is_integer(kSampleIndices)) return call.fail("sample_indices [S] must be int32 or int64");
  const size_t tokens = call.elements(kTokenIds);
  if (const int status = call.check_within(kSampleIndices, "sample_indices", 0, tokens, "rows")) return status;
  bool are_matrices = call.rank(kHead) == 2;
  for (size_t layer = 0; layer < num_layers; layer++) {
    for (const int weight : {kQkv, kOut, kGateUp, kDown}) {
      are_matrices &= call.rank(kLayers + static_cast<int>(layer) * kNumLayerParameters + weight) == 2;
    }
  }
  if (!are_matrices) return call.fail("weights must have two dimensions");
  const int logits = call.count() - 1;
  if (call.dtype(logits) != DType::kFloat32 || call.rank(logits) != 2 ||
      call.dim(logits, 0) != call.elements(kSampleIndices) || call.dim(logits, 1) != call.dim(kHead, 0)) {
    return call.fail("the result must be float32 [S, V]");
  }
  return 0;
}

}  // namespace
}  // namespace llm

// float32[4]: scale, eps, whether there are biases in attention and in the feed-forward half; token_ids [T],
// positions [T], slot_mapping [T], block_tables, query_lens, context_lens, sample_indices [S]; table [V, H], cos and
// sin [positions, head_dim], gain [H] of the last norm, head [V, H]; then for each layer vectors (see DecoderLayer),
// weights of query-key-value [(num_heads + 2 * num_kv_heads) * head_dim, H], out [H, num_heads * head_dim], gate and up
// [2 * I, H], down [H, I], key_cache, value_cache | logits [S, V] of the rows that sample. A custom operator; the bits
// are those of the operators it stands for.
LLM_OPERATOR(decoder) {
  using namespace llm;
  const int of_layers = call.count() - kLayers - 1;
  if (of_layers <= 0 || of_layers % kNumLayerParameters != 0) {
    return call.fail("expects %d parameters, %d for each layer, and a result, got %d", kLayers, kNumLayerParameters,
                     call.count());
  }
  const size_t num_layers = static_cast<size_t>(of_layers / kNumLayerParameters);
  if (const int status = check_parameters(call, num_layers)) return status;
  const DType dtype = call.dtype(kTable);
  const float* numbers = call.data<const float>(kConstants);
  const DecoderConstants constants = {numbers[0], numbers[1], numbers[2] != 0.0f, numbers[3] != 0.0f};
  const DecoderSizes sizes = {call.dim(kTable, 1), call.dim(kLayers + kQkv, 0), call.dim(kLayers + kOut, 1),
                              call.dim(kLayers + kDown, 1)};
  const Weight head(call, "head", kHead, dtype);
  if (const int status = head.check(call, call.dim(kHead, 0), sizes.hidden)) return status;
  std::vector<DecoderLayer> layers;
  layers.reserve(num_layers);
  for (size_t i = 0; i < num_layers; i++) {
    layers.emplace_back(call, i, sizes, constants);
    if (const int status = layers[i].check()) return status;
  }
  const size_t samples = call.elements(kSampleIndices);
  const DecoderRows rows(sizes, std::max(samples, call.elements(kTokenIds)), call.element_bytes(kTable));
  if (const int status = look_up(call, kTable, kTokenIds, rows.residual)) return status;
  Ending ending(num_layers);
  for (size_t i = 0; i < num_layers; i++) {
    if (const int status = layers[i].run(rows, i + 1 == num_layers)) return status;
    ending.layer_done();
  }
  const Passes passes = head.passes(samples);
  normalize({rows.residual, nullptr, nullptr, call.data<void>(kGain), rows.normed, nullptr, dtype, samples,
             sizes.hidden, constants.eps, passes});
  LinearArgs product = head.product(passes, rows.normed, call.data<void>(call.count() - 1));
  product.y_dtype = DType::kFloat32;
  multiply(product);
  return 0;
}

LLM_EXPORT std::vector<int64_t> decoderInferShape(int*, int64_t** shapes, void*) {
  return {shapes[llm::kSampleIndices][0], shapes[llm::kHead][0]};
}
