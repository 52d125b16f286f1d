// Operations of attention: rope, store_kv, attention.
#include "kv_layout.h"
#include "program.h"
#include "selected_attention.h"

namespace llm {
namespace {

// Checks the weights cos and sin, i and i + 1, for heads of `head_dim`; returns a status as operators do.
int check_tables(const Instruction& in, int i, size_t head_dim) {
  const Call& call = in.call();
  const DType dtype = call.dtype(in.parameter(i));
  for (const int table : {i, i + 1}) {
    if (!in.has_weight(table)) return in.fail("cos and sin go together");
    const int parameter = in.parameter(table);
    if ((dtype != in.program().dtype() && dtype != DType::kFloat32) || call.dtype(parameter) != dtype ||
        call.rank(parameter) != 2 || call.dim(parameter, 1) != head_dim ||
        call.dim(parameter, 0) != call.dim(in.parameter(i), 0)) {
      return in.fail("cos and sin must be tables [positions, %zu] of the model's type or float32", head_dim);
    }
  }
  return in.program().check_positions(call.dim(in.parameter(i), 0));
}

// Checks that weight `i`, if it is given, is float32 with one element for each of `width` columns.
int check_columns(const Instruction& in, const char* name, int i, size_t width) {
  if (!in.has_weight(i)) return 0;
  if (in.call().dtype(in.parameter(i)) == DType::kFloat32 && in.call().elements(in.parameter(i)) == width) return 0;
  return in.fail("%s must be float32 with %zu elements, one for each column", name, width);
}

const float* floats(const Instruction& in, int i) { return reinterpret_cast<const float*>(in.weight_data(i)); }

// rope: y | x | cos sin bias offset |. Rotates element i of a head of x + bias with element i + head_dim / 2, and
// subtracts the offset.

int check_rope(const Instruction& in) {
  const Operand *y = in.output(0), *x = in.input(0);
  if (const int status = in.check_rows("y", y, false)) return status;
  if (const int status = in.check_rows("x", x, false)) return status;
  if (const int status = in.check_width("x", *x, y->width)) return status;
  if (!in.has_weight(0)) return in.fail("cos is absent");
  const Call& call = in.call();
  const size_t head_dim = call.rank(in.parameter(0)) == 2 ? call.dim(in.parameter(0), 1) : 0;
  if (head_dim == 0 || head_dim % 2 != 0 || y->width % head_dim != 0) {
    return in.fail("%zu columns are not heads of the %zu elements of cos", y->width, head_dim);
  }
  if (const int status = check_columns(in, "bias", 2, y->width)) return status;
  if (const int status = check_columns(in, "offset", 3, y->width)) return status;
  return check_tables(in, 0, head_dim);
}

int run_rope(const Instruction& in) {
  const Rows y = in.rows(in.output(0)), x = in.rows(in.input(0));
  const size_t head_dim = in.call().dim(in.parameter(0), 1);
  kernels().rotary({x.data, x.stride, in.weight_data(0), in.weight_data(1), y.data, in.program().positions(),
                    in.program().dtype(), in.call().dtype(in.parameter(0)), y.count, y.width / head_dim, head_dim,
                    y.stride, floats(in, 2), floats(in, 3)});
  return 0;
}

// Checks attribute i, the group of the layer, which has its own slots and block tables.
int check_group(const Instruction& in, int i) {
  const bool exists = in.integer(i) >= 0 && static_cast<size_t>(in.integer(i)) < in.program().num_groups();
  return exists ? 0 : in.fail("there is no group %d", in.integer(i));
}

// Checks operands that are stored in the cache, in slots of the group in attribute i.
int check_stored(const Instruction& in, const Operand* k, const Operand* v, const KvCache& cache, int i) {
  if (const int status = check_group(in, i)) return status;
  if (const int status = in.check_rows("k", k, false)) return status;
  if (const int status = in.check_rows("v", v, false)) return status;
  if (const int status = in.check_width("k", *k, cache.heads * cache.key_dim)) return status;
  if (const int status = in.check_width("v", *v, cache.heads * cache.value_dim)) return status;
  return in.program().check_slots(static_cast<size_t>(in.integer(i)), cache.slots());
}

KvRows stored_rows(const Instruction& in, const Operand* k, const Operand* v, int group) {
  const Rows keys = in.rows(k), values = in.rows(v);
  const int64_t* slots = in.program().slots(static_cast<size_t>(in.integer(group)));
  return {keys.data, keys.stride, values.data, values.stride, slots};
}

// store_kv: | k v | | layer layer_group

int check_store_kv(const Instruction& in) {
  KvCache cache;
  if (const int status = in.read_layer(in.integer(0), cache)) return status;
  return check_stored(in, in.input(0), in.input(1), cache, 1);
}

int run_store_kv(const Instruction& in) {
  KvCache cache;
  if (const int status = in.read_layer(in.integer(0), cache)) return status;
  store_kv(cache, stored_rows(in, in.input(0), in.input(1), 1), in.program().tokens());
  return 0;
}

// attention: y | q q_rope k v selected | slopes cos sin q_gamma k_gamma k_bias k_offset sinks | layer scale window cap
// eps causal consumer chunk layer_group.
// With k and v: heads are normalised if there are norm weights, rotated if there are tables, and stored, then attended
// to; without k and v they are already stored. A causal row sees `window` tokens, including its own, or those of its
// `chunk` up to its own, or all before it; another row sees the tokens less than `window` away on either side, or its
// whole request. With q_rope, keys are also the values, and the stored values are the rotary part of keys, which
// belongs to q_rope (DeepSeek-V2, 2024, section 2.1). With `selected`, the result of select_keys, a row sees these keys
// only.

enum AttendWeight { kSlopes, kCos, kSin, kQGain, kKGain, kKBias, kKOffset, kSinks };
enum AttendAttribute { kLayer, kScale, kWindow, kCap, kEps, kCausal, kConsumer, kChunk, kGroup };

// Checks the operand `selected`, if present.
int check_selected(const Instruction& in, const Operand* selected) {
  if (selected == nullptr) return 0;
  if (const int status = in.check_rows("selected", selected, DType::kInt32, false)) return status;
  if (in.input(1) == nullptr || in.integer(kWindow) != 0 || in.number(kCap) != 0.0f || in.has_weight(kSlopes) ||
      in.has_weight(kSinks) || in.integer(kCausal) == 0 || in.integer(kConsumer) != -1 || in.integer(kChunk) != 0) {
    return in.fail("selected keys must be latent and causal, without window, chunk, cap, slopes, sinks and consumer");
  }
  return 0;
}

int check_attention(const Instruction& in) {
  const Operand *y = in.output(0), *q = in.input(0), *k = in.input(2), *v = in.input(3);
  KvCache cache;
  if (const int status = in.read_layer(in.integer(kLayer), cache)) return status;
  const Operand* q_rope = in.input(1);
  if (q_rope == nullptr && cache.key_dim != cache.value_dim) {
    return in.fail("keys and values must be of one width where there is no q_rope");
  }
  if (const int status = in.check_rows("y", y, false)) return status;
  if (const int status = in.check_rows("q", q, false)) return status;
  if (const int status = in.check_width("q", *q, y->width)) return status;
  if (q->width % (cache.heads * cache.key_dim) != 0) {
    return in.fail("%zu columns of q are not heads of %zu elements, shared by %zu heads of the cache", q->width,
                   cache.key_dim, cache.heads);
  }
  if (q_rope != nullptr) {
    if (const int status = in.check_rows("q_rope", q_rope, false)) return status;
    const size_t width = q->width / cache.key_dim * cache.value_dim;
    if (const int status = in.check_width("q_rope", *q_rope, width)) return status;
    if (k != nullptr) return in.fail("latent keys must be stored already");
    if (cache.quantized) return in.fail("latent keys have no codes");
  }
  if (const int status = check_selected(in, in.input(4))) return status;
  if ((k == nullptr) != (v == nullptr)) return in.fail("k and v go together");
  if (k != nullptr) {
    if (const int status = check_stored(in, k, v, cache, kGroup)) return status;
    if (in.has_weight(kCos)) {
      if (const int status = check_tables(in, kCos, cache.key_dim)) return status;
    }
    for (const int weight : {kSin, kKBias, kKOffset}) {
      if (in.has_weight(weight) && !in.has_weight(kCos)) return in.fail("sin, k_bias and k_offset need cos");
    }
  } else {
    for (const int weight : {kCos, kSin, kQGain, kKGain, kKBias, kKOffset}) {
      if (in.has_weight(weight))
        return in.fail("without k and v there must be no cos, sin, q_gamma, k_gamma, k_bias or k_offset");
    }
  }
  if (const int status = in.check_vector("q_gamma", kQGain, cache.key_dim, true)) return status;
  if (const int status = in.check_vector("k_gamma", kKGain, cache.key_dim, true)) return status;
  if (const int status = check_columns(in, "k_bias", kKBias, cache.heads * cache.key_dim)) return status;
  if (const int status = check_columns(in, "k_offset", kKOffset, cache.heads * cache.key_dim)) return status;
  const size_t num_heads = q->width / cache.key_dim;
  for (const int weight : {kSlopes, kSinks}) {
    if (in.has_weight(weight) && (in.call().dtype(in.parameter(weight)) != DType::kFloat32 ||
                                  in.call().elements(in.parameter(weight)) != num_heads)) {
      const char* name = weight == kSlopes ? "slopes" : "sinks";
      return in.fail("%s must be float32, one for each of %zu heads", name, num_heads);
    }
  }
  if (in.integer(kWindow) < 0) return in.fail("window must be 0 or more, is %d", in.integer(kWindow));
  const bool has_chunk = in.integer(kChunk) != 0;
  if (in.integer(kChunk) < 0 || (has_chunk && (in.integer(kWindow) != 0 || in.integer(kCausal) == 0))) {
    return in.fail("chunk must be 0, or more for causal attention without a window, is %d", in.integer(kChunk));
  }
  if (!(in.number(kCap) >= 0.0f)) return in.fail("cap must be 0 or more, is %g", static_cast<double>(in.number(kCap)));
  if (const int status = check_group(in, kGroup)) return status;
  const size_t window = static_cast<size_t>(in.integer(kWindow)), group = static_cast<size_t>(in.integer(kGroup));
  if (const int status = in.program().check_blocks(group, cache.num_blocks, cache.block_size, window)) return status;
  return in.check_consumer(kConsumer, *y);
}

int run_attention(const Instruction& in) {
  const Program& program = in.program();
  KvCache cache;
  if (const int status = in.read_layer(in.integer(kLayer), cache)) return status;
  const Rows y = in.rows(in.output(0)), q = in.rows(in.input(0));
  const Requests& requests = program.requests(static_cast<size_t>(in.integer(kGroup)));
  AttendArgs args = {q.data, q.stride, {}, cache, &requests, q.count, q.width / cache.key_dim, program.positions()};
  if (in.input(2) != nullptr) args.rows = stored_rows(in, in.input(2), in.input(3), kGroup);
  auto dtype = [&](int weight) { return in.has_weight(weight) ? in.call().dtype(in.parameter(weight)) : DType::kNone; };
  args.k_bias = floats(in, kKBias);
  args.k_offset = floats(in, kKOffset);
  args.cos = in.weight_data(kCos);
  args.sin = in.weight_data(kSin);
  args.table_dtype = dtype(kCos);
  args.q_gamma = in.weight_data(kQGain);
  args.q_gamma_dtype = dtype(kQGain);
  args.k_gamma = in.weight_data(kKGain);
  args.k_gamma_dtype = dtype(kKGain);
  args.eps = in.number(kEps);
  args.scale = in.number(kScale);
  args.causal = in.integer(kCausal) != 0;
  args.window = static_cast<size_t>(in.integer(kWindow));
  args.chunk = static_cast<size_t>(in.integer(kChunk));
  args.cap = in.number(kCap);
  args.slopes = reinterpret_cast<const float*>(in.weight_data(kSlopes));
  args.sinks = reinterpret_cast<const float*>(in.weight_data(kSinks));
  if (in.input(1) != nullptr) {
    const Rows rope = in.rows(in.input(1));
    args.q_rope = rope.data;
    args.rope_stride = rope.stride;
  }
  args.y = y.data;
  args.y_layout =
      in.consumer(kConsumer) == nullptr ? TiledLayout{y.count, y.stride} : in.consumer(kConsumer)->layout(y.count);
  if (in.input(4) == nullptr) {
    attend(args);
  } else {
    const Rows selected = in.rows(in.input(4));
    attend_to_selected(args, {reinterpret_cast<const int32_t*>(selected.data), selected.stride, selected.width});
  }
  return 0;
}

}  // namespace

const Operation kRope = {{"rope", 1, 1, 4, 0}, check_rope, run_rope};
const Operation kStoreKv = {{"store_kv", 0, 2, 0, 2}, check_store_kv, run_store_kv};
const Operation kAttention = {{"attention", 1, 5, 8, 9}, check_attention, run_attention};

}  // namespace llm
