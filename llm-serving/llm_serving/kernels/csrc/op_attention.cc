// ReshapeAndCache, PagedAttention, and both with what comes before them.
#include <vector>

#include "attending.h"
#include "parts.h"

namespace llm {
namespace {

// The integers of `slots` once they are known to be slots of the cache or -1; a status as operators return it.
int read_slots(const Call& call, const KvCache& cache, int parameter, std::vector<int64_t>& slots) {
  if (!call.is_integer(parameter)) return call.fail("slot_mapping must be int32 or int64");
  slots.resize(call.elements(parameter));
  for (size_t i = 0; i < slots.size(); i++) slots[i] = call.integer(parameter, i);
  return call.check_within(parameter, "slot_mapping", -1, cache.slots(), "slots of the cache");
}

// k, v, key_cache, value_cache, slot_mapping | k
int reshape_and_cache(const Call& call) {
  if (call.count() < 6) return call.fail("expects 6 parameters, got %d", call.count());
  const DType dtype = call.dtype(0);
  if (!is_float(dtype) || call.dtype(1) != dtype) return call.fail("k and v must be floats of one type");
  KvCache cache;
  if (!read_cache(call, 2, 3, dtype, cache) || cache.key_dim != cache.value_dim) return call.fail("%s", kCacheRule);
  const size_t tokens = call.elements(4);
  const size_t width = cache.heads * cache.key_dim;
  if (call.elements(0) != tokens * width || call.elements(1) != tokens * width) {
    return call.fail("k and v must have %zu rows of %zu elements", tokens, width);
  }
  std::vector<int64_t> slots;
  if (const int status = read_slots(call, cache, 4, slots)) return status;
  store_kv(cache, {call.data<const char>(0), width, call.data<const char>(1), width, slots.data()}, tokens);
  return 0;
}

// q, key_cache, value_cache, block_tables, context_lens, 3 absent, query_lens, 1 absent, heads, scale, kv_heads, 3
// modes | y
int paged_attention(const Call& call) {
  if (call.count() < 17) return call.fail("expects 17 parameters, got %d", call.count());
  if (static_cast<size_t>(call.integer(12)) != call.dim(1, 2)) return call.fail("kv_head_num does not fit the cache");
  KvCache cache;
  if (!read_cache(call, 1, 2, call.dtype(0), cache) || cache.key_dim != cache.value_dim) {
    return call.fail("%s", kCacheRule);
  }
  const size_t num_heads = static_cast<size_t>(call.integer(10));
  const size_t width = num_heads * cache.key_dim;
  if (cache.heads == 0 || num_heads % cache.heads != 0 || width == 0 || call.elements(0) % width != 0) {
    return call.fail("rows of q must hold %zu heads of %zu elements, shared by %zu heads of the cache", num_heads,
                     cache.key_dim, cache.heads);
  }
  const size_t rows = call.elements(0) / width;
  Requests requests;
  if (const int status = read_requests(call, 3, 8, 4, rows, requests)) return status;
  if (const int status = check_blocks(call, requests, cache.num_blocks, cache.block_size, 0)) return status;
  AttendArgs args = {call.data<const char>(0), width, {}, cache, &requests, rows, num_heads, nullptr};
  args.scale = call.number(11);
  args.y = call.data<void>(16);
  attend(args);
  return 0;
}

// As read_slots, of `count` rows of tables.
int read_positions(const Call& call, int parameter, size_t tokens, size_t count, std::vector<int64_t>& positions) {
  if (!call.is_integer(parameter) || call.elements(parameter) != tokens) {
    return call.fail("positions must be int32 or int64, one for each of %zu rows", tokens);
  }
  positions.resize(tokens);
  for (size_t i = 0; i < tokens; i++) positions[i] = call.integer(parameter, i);
  return call.check_within(parameter, "positions", 0, count, "rows of cos and sin");
}

}  // namespace
}  // namespace llm

LLM_OPERATOR(ReshapeAndCache) { return llm::reshape_and_cache(call); }

LLM_OPERATOR(PagedAttention) { return llm::paged_attention(call); }

namespace llm {

int attend_to_qkv(const Call& call, const QkvParameters& at) {
  const DType dtype = at.dtype;
  const size_t tokens = call.elements(at.slot_mapping);
  KvCache cache;
  if (!read_cache(call, at.key_cache, at.value_cache, dtype, cache) || cache.key_dim != cache.value_dim) {
    return call.fail("%s", kCacheRule);
  }
  const size_t head_dim = cache.key_dim;
  const size_t kv_width = cache.heads * head_dim;
  const size_t width = at.width;
  const size_t q_width = at.q_width;
  if (head_dim == 0 || width != q_width + 2 * kv_width || width % head_dim != 0 || at.tokens != tokens) {
    return call.fail("qkv must have %zu rows of %zu queries and of %zu keys and values", tokens, q_width, kv_width);
  }
  if (call.dtype(at.cos) != dtype || call.dtype(at.sin) != dtype || call.rank(at.cos) != 2 ||
      call.dim(at.cos, 1) != head_dim || call.elements(at.sin) != call.elements(at.cos)) {
    return call.fail("cos and sin must be tables [positions, %zu] of the type of qkv", head_dim);
  }
  std::vector<int64_t> positions, slots;
  if (const int status = read_positions(call, at.positions, tokens, call.dim(at.cos, 0), positions)) return status;
  if (const int status = read_slots(call, cache, at.slot_mapping, slots)) return status;
  const size_t num_heads = q_width / head_dim;
  if (cache.heads == 0 || num_heads == 0 || num_heads % cache.heads != 0) {
    return call.fail("rows of q must hold %zu heads of %zu elements, shared by %zu heads of the cache", num_heads,
                     head_dim, cache.heads);
  }
  Requests requests;
  if (const int status = read_requests(call, at.block_tables, at.query_lens, at.context_lens, tokens, requests)) {
    return status;
  }
  if (const int status = check_blocks(call, requests, cache.num_blocks, cache.block_size, 0)) return status;
  const size_t bytes = element_size(dtype, nullptr);
  const char* q = static_cast<const char*>(at.qkv);
  const char* k = q + q_width * bytes;
  AttendArgs args = {q,         width,           {k, width, k + kv_width * bytes, width, slots.data()},
                     cache,     &requests,       tokens,
                     num_heads, positions.data()};
  args.cos = call.data<void>(at.cos);
  args.sin = call.data<void>(at.sin);
  args.table_dtype = dtype;
  args.scale = at.scale;
  args.y = at.y;
  args.y_passes = at.y_passes;
  attend(args);
  return 0;
}

}  // namespace llm
