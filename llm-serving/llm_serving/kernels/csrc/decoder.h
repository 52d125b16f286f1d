// The operator `decoder` and a layer of it.
#pragma once

#include "parts.h"

namespace llm {

// Parameters of the operator, those of each layer behind them; the last is the result.
enum DecoderParameter {
  kConstants,
  kTokenIds,
  kPositions,
  kSlotMapping,
  kBlockTables,
  kQueryLens,
  kContextLens,
  kSampleIndices,
  kTable,
  kCos,
  kSin,
  kGain,
  kHead,
  kLayers
};
enum LayerParameter { kVectors, kQkv, kOut, kGateUp, kDown, kKeyCache, kValueCache, kNumLayerParameters };

struct DecoderConstants {
  float scale, eps;
  bool attention_bias, mlp_bias;
};

// Of all layers.
struct DecoderSizes {
  size_t hidden, qkv, q, inner;

  // Whether gate and up consist of whole panels, so that a product can gate its own result.
  bool gates_at_once() const { return inner % kPanelWidth == 0; }
};

// Memory for the rows of a step on their way through the layers; `residual` is what one layer hands to the next.
// `attended` lies behind the rows of query, key and value in `wide`, which gate and up take afterwards where they are
// not gated at once. The rows that sample are put into `narrow` and `wide`.
struct DecoderRows {
  char *normed, *residual, *wide, *attended, *narrow;

  DecoderRows(const DecoderSizes& sizes, size_t rows, size_t bytes);
};

class DecoderLayer {
 public:
  DecoderLayer(const Call& call, size_t index, const DecoderSizes& sizes, const DecoderConstants& constants);

  int check() const;

  // Turns rows.residual [T, H] into that of the next layer, or with `selects` into [S, H], only the rows that sample:
  // nothing but the keys and values of the others is read again.
  int run(const DecoderRows& rows, bool selects) const;

 private:
  // The gains of both norms, and the biases, null where the model has none. All lie behind one another.
  struct Vectors {
    const char* gain;
    const char* mlp_gain;
    const char *qkv = nullptr, *out = nullptr, *gate_up = nullptr, *down = nullptr;
    size_t elements;

    Vectors(const char* data, const DecoderSizes& sizes, const DecoderConstants& constants, size_t bytes);
  };

  // Parameter `i` of a layer among those of the operator.
  int at(int i) const { return first_ + i; }

  void norm(const void* x, const char* gain, const Passes& passes, void* y) const;
  Passes multiply_and_gate(const Passes& passes, const void* x, void* gate_up, void* y) const;
  int attend(const void* qkv, const Passes& passes, void* y) const;

  const Call& call_;
  const int first_;
  const DecoderSizes& sizes_;
  const DecoderConstants& constants_;
  const DType dtype_;
  const Vectors vectors_;
  const Weight qkv_, out_, gate_up_, down_;
};

}  // namespace llm
