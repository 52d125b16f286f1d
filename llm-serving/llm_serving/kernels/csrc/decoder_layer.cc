// A layer of a decoder: attention, then the feed-forward half.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "thread_pool.h"

namespace llm {
namespace {

// y = x * weight^T + bias + added; null for what is not added.
void multiply(const Weight& weight, const Passes& passes, const void* x, const char* bias, const void* added, void* y) {
  LinearArgs args = weight.product(passes, x, y);
  args.bias = bias;
  args.added = added;
  multiply(args);
}

// Copies the rows that sample to `y`, and returns it.
const char* select_rows(const Call& call, const void* x, size_t row_bytes, char* y) {
  for (size_t i = 0; i < call.elements(kSampleIndices); i++) {
    const size_t row = static_cast<size_t>(call.integer(kSampleIndices, i));
    std::memcpy(y + i * row_bytes, static_cast<const char*>(x) + row * row_bytes, row_bytes);
  }
  return y;
}

}  // namespace

DecoderRows::DecoderRows(const DecoderSizes& sizes, size_t rows, size_t bytes) {
  auto whole_lines = [](size_t size) { return Passes::padded(size, 64); };
  auto passes = [&](size_t columns) { return Passes::most_elements(rows, columns) * bytes; };
  const size_t qkv = whole_lines(rows * bytes * sizes.qkv);
  const size_t row = whole_lines(rows * bytes * sizes.hidden);
  const size_t gate_up = sizes.gates_at_once() ? 0 : rows * bytes * 2 * sizes.inner;
  const size_t wide_bytes = std::max({gate_up, qkv + passes(sizes.q), row});
  const size_t narrow_bytes = std::max(passes(sizes.inner), rows * bytes * sizes.q);
  const size_t all = passes(sizes.hidden) + row + whole_lines(wide_bytes) + narrow_bytes;
  normed = static_cast<char*>(scratch(Scratch::kLayer, all + 1));
  residual = normed + passes(sizes.hidden);
  wide = residual + row;
  attended = wide + qkv;
  narrow = wide + whole_lines(wide_bytes);
}

DecoderLayer::Vectors::Vectors(const char* data, const DecoderSizes& sizes, const DecoderConstants& constants,
                               size_t bytes)
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

DecoderLayer::DecoderLayer(const Call& call, size_t index, const DecoderSizes& sizes, const DecoderConstants& constants)
    : call_(call),
      first_(kLayers + static_cast<int>(index) * kNumLayerParameters),
      sizes_(sizes),
      constants_(constants),
      dtype_(call.dtype(kTable)),
      vectors_(call.data<const char>(at(kVectors)), sizes, constants, call.element_bytes(kTable)),
      qkv_(call, "qkv", at(kQkv), dtype_),
      out_(call, "out", at(kOut), dtype_),
      gate_up_(call, "gate_up", at(kGateUp), dtype_),
      down_(call, "down", at(kDown), dtype_) {}

int DecoderLayer::check() const {
  if (call_.dtype(at(kVectors)) != dtype_ || call_.elements(at(kVectors)) != vectors_.elements) {
    return call_.fail("vectors must have %zu elements of the type of the table", vectors_.elements);
  }
  if (const int status = qkv_.check(call_, sizes_.qkv, sizes_.hidden)) return status;
  if (const int status = out_.check(call_, sizes_.hidden, sizes_.q)) return status;
  if (const int status = gate_up_.check(call_, 2 * sizes_.inner, sizes_.hidden)) return status;
  return down_.check(call_, sizes_.hidden, sizes_.inner);
}

int DecoderLayer::run(const DecoderRows& rows, bool selects) const {
  size_t count = call_.elements(kTokenIds);
  Passes passes = qkv_.passes(count);
  norm(rows.residual, vectors_.gain, passes, rows.normed);
  multiply(qkv_, passes, rows.normed, vectors_.qkv, nullptr, rows.wide);
  passes = selects ? Passes{count, sizes_.q} : out_.passes(count);
  if (const int status = attend(rows.wide, passes, rows.attended)) return status;
  const void* attended = rows.attended;
  const void* hidden = rows.residual;
  if (selects) {
    const size_t bytes = call_.element_bytes(kTable);
    attended = select_rows(call_, attended, sizes_.q * bytes, rows.narrow);
    hidden = select_rows(call_, hidden, sizes_.hidden * bytes, rows.wide);
    count = call_.elements(kSampleIndices);
    passes.rows = count;
  }
  multiply(out_, passes, attended, vectors_.out, hidden, rows.residual);
  passes = gate_up_.passes(count);
  norm(rows.residual, vectors_.mlp_gain, passes, rows.normed);
  passes = multiply_and_gate(passes, rows.normed, rows.wide, rows.narrow);
  multiply(down_, passes, rows.narrow, vectors_.down, rows.residual, rows.residual);
  return 0;
}

void DecoderLayer::norm(const void* x, const char* gain, const Passes& passes, void* y) const {
  normalize({x, nullptr, nullptr, gain, y, nullptr, dtype_, passes.rows, sizes_.hidden, constants_.eps, passes});
}

// y = silu(gate) * up, by way of `gate_up` if they are not gated at once; returns how y lies.
Passes DecoderLayer::multiply_and_gate(const Passes& passes, const void* x, void* gate_up, void* y) const {
  if (!sizes_.gates_at_once()) {
    multiply(gate_up_, passes, x, vectors_.gate_up, nullptr, gate_up);
    gate({gate_up, y, dtype_, passes.rows, sizes_.inner});
    return {passes.rows, sizes_.inner};
  }
  LinearArgs args = gate_up_.product(passes, x, y);
  args.bias = vectors_.gate_up;
  args.gate = Gate::kSilu;
  args.y_passes = down_.passes(passes.rows);
  llm::multiply(args);
  return args.y_passes;
}

int DecoderLayer::attend(const void* qkv, const Passes& passes, void* y) const {
  return attend_to_qkv(
      call_, {qkv, call_.elements(kTokenIds), sizes_.qkv, sizes_.q, dtype_, kPositions, kCos, kSin, at(kKeyCache),
              at(kValueCache), kSlotMapping, kBlockTables, kQueryLens, kContextLens, constants_.scale, y, passes});
}

}  // namespace llm
