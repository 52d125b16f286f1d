// FlashAttentionScore: attention of whole prompts to their own keys and values.
#include <algorithm>
#include <vector>

#include "kv_layout.h"
#include "masked_attention.h"
#include "paged_attention.h"
#include "thread_pool.h"

namespace llm {
namespace {

constexpr int64_t kLayoutTH = 5;
constexpr float kMaskedBFloat16 = -10000.0f;

// q, k, v, 3 absent, mask, 1 absent, query lengths, key lengths, heads, keep_prob, scale, tokens before and behind,
// precision, layout, sparse mode | maximum, sum, softmax, y
//
// Prompts one after another (layout TH): a row sees keys of its own prompt. The mask [n, n] is applied along the
// diagonal of each prompt; keys before its square are visible, those behind it are hidden. Keys and values are
// converted to the layout of a cache, so that the kernels and the bits are those of PagedAttention. Only y is written.
int flash_attention_score(const Call& call) {
  if (call.count() < 22) return call.fail("expects 22 parameters, got %d", call.count());
  for (const int absent : {3, 4, 5, 7}) {
    if (call.present(absent)) return call.fail("parameter %d must be absent", absent);
  }
  const DType dtype = call.dtype(0);
  const size_t num_heads = static_cast<size_t>(call.integer(10));
  if (call.integer(16) != kLayoutTH || call.integer(17) != 0 || call.number(11) != 1.0f) {
    return call.fail("input_layout must be TH, sparse_mode 0 and keep_prob 1");
  }
  if (!is_float(dtype) || call.dtype(1) != dtype || call.dtype(2) != dtype || call.rank(0) != 2 || call.rank(1) != 2) {
    return call.fail("query, key and value must be [tokens, heads * head_dim], floats of one type");
  }
  const size_t tokens = call.dim(0, 0), width = call.dim(0, 1), kv_width = call.dim(1, 1);
  const size_t head_dim = num_heads == 0 ? 0 : width / num_heads;
  if (head_dim == 0 || head_dim % kPanelWidth != 0 || width != num_heads * head_dim || kv_width == 0 ||
      width % kv_width != 0 || kv_width % head_dim != 0) {
    return call.fail("rows of %zu and %zu elements must hold heads of a multiple of %zu, those of query shared evenly",
                     width, kv_width, kPanelWidth);
  }
  if (call.dim(1, 0) != tokens || call.elements(2) != call.elements(1)) {
    return call.fail("key and value must have the %zu rows of query", tokens);
  }
  Requests requests;
  for (const int lens : {8, 9}) {
    if (!call.present(lens) || !call.is_integer(lens)) return call.fail("lengths must be int32 or int64");
    const bool of_queries = lens == 8;
    auto& target = of_queries ? requests.query_lens : requests.context_lens;
    for (size_t i = 0; i < call.elements(lens); i++) target.push_back(call.integer(lens, i));
  }
  if (requests.query_lens != requests.context_lens) return call.fail("query and key lengths must be the same");
  size_t total = 0, blocks = 0;
  for (const int64_t length : requests.query_lens) {
    if (length < 0) return call.fail("a prompt has %lld rows", static_cast<long long>(length));
    const size_t count = (static_cast<size_t>(length) + kGroupTokens - 1) / kGroupTokens;
    total += static_cast<size_t>(length);
    blocks += count;
    requests.table_width = std::max(requests.table_width, count);
  }
  if (total != tokens) return call.fail("lengths add up to %zu, query has %zu rows", total, tokens);
  AttentionMask mask;
  if (call.present(6)) {
    if (!is_float(call.dtype(6)) || call.rank(6) != 2 || call.dim(6, 0) != call.dim(6, 1) || call.dim(6, 0) == 0) {
      return call.fail("attn_mask must be a square of floats");
    }
    // Like the device: a mask of bfloat16 is a flag, one of float16 is a value.
    const float factor = call.dtype(6) == DType::kBFloat16 ? kMaskedBFloat16 : 1.0f;
    mask = {call.data<void>(6), call.dtype(6), call.dim(6, 1), factor, true};
  }
  // Every prompt has blocks of its own, one after another.
  std::vector<int64_t> slots(tokens);
  requests.block_tables.assign(requests.query_lens.size() * requests.table_width, 0);
  size_t block = 0, token = 0;
  for (size_t i = 0; i < requests.query_lens.size(); i++) {
    const auto length = static_cast<size_t>(requests.query_lens[i]);
    for (size_t at = 0; at < length; at++) slots[token++] = static_cast<int64_t>(block * kGroupTokens + at);
    for (size_t at = 0; at * kGroupTokens < length; at++) {
      requests.block_tables[i * requests.table_width + at] = static_cast<int64_t>(block++);
    }
  }
  const size_t bytes = blocks * kGroupTokens * kv_width * call.element_bytes(0);
  char* memory = static_cast<char*>(scratch(Scratch::kLayer, 2 * bytes + 1));
  const KvCache cache = {memory,   memory + bytes, dtype, blocks, kGroupTokens, kv_width / head_dim,
                         head_dim, head_dim,       false};
  store_kv(cache, {call.data<const char>(1), kv_width, call.data<const char>(2), kv_width, slots.data()}, tokens);
  AttendArgs args = {call.data<const char>(0), width, {}, cache, &requests, tokens, num_heads, nullptr};
  args.scale = call.number(12);
  args.y = call.data<void>(21);
  attend_under(mask, args);
  return 0;
}

}  // namespace
}  // namespace llm

LLM_OPERATOR(FlashAttentionScore) { return llm::flash_attention_score(call); }
