// ReshapeAndCache and PagedAttention.
#include <algorithm>
#include <vector>

#include "masked_attention.h"
#include "paged_attention.h"
#include "parts.h"

namespace llm {
namespace {

constexpr int64_t kTrapezoidal = 1;  // mask mode: rows see all keys up to their own

// Reads `slots` and checks that they are slots of the cache or -1; returns a status as operators do.
int read_slots(const Call& call, const KvCache& cache, int parameter, std::vector<int64_t>& slots) {
  if (!call.is_integer(parameter)) return call.fail("slot_mapping must be int32 or int64");
  slots.resize(call.elements(parameter));
  for (size_t i = 0; i < slots.size(); i++) slots[i] = call.integer(parameter, i);
  return call.check_within(parameter, "slot_mapping", -1, cache.slots(), "slots of the cache");
}

// k, v, key_cache, value_cache, slot_mapping | k
//
// Without v and value_cache, only keys are stored, whose values are a part of them.
int reshape_and_cache(const Call& call) {
  if (call.count() < 6) return call.fail("expects 6 parameters, got %d", call.count());
  const DType dtype = call.dtype(0);
  const bool is_latent = !call.present(1);
  if (!is_float(dtype) || (!is_latent && call.dtype(1) != dtype)) {
    return call.fail("k and v must be floats of one type");
  }
  KvCache cache;
  const bool fits = is_latent ? read_latent_cache(call, 2, 0, dtype, cache) : read_cache(call, 2, 3, dtype, cache);
  if (!fits || cache.quantized || (!is_latent && cache.key_dim != cache.value_dim)) return call.fail("%s", kCacheRule);
  const size_t tokens = call.elements(4);
  const size_t width = cache.heads * cache.key_dim;
  if (call.elements(0) != tokens * width || (!is_latent && call.elements(1) != tokens * width)) {
    return call.fail("k and v must have %zu rows of %zu elements", tokens, width);
  }
  std::vector<int64_t> slots;
  if (const int status = read_slots(call, cache, 4, slots)) return status;
  const int values = is_latent ? 0 : 1;
  store_kv(cache, {call.data<const char>(0), width, call.data<const char>(values), width, slots.data()}, tokens);
  return 0;
}

// q, key_cache, value_cache, block_tables, context_lens, 2 absent, mask, query_lens, 1 absent, heads, scale, kv_heads,
// mode of a quantized cache, mode of the mask, width of latent values | y
//
// The mask, or its mode, says which keys of its request a row sees. Caches of qvalues are only supported without a
// mask. With a width of latent values, the first elements of a key are its value, and value_cache is not read.
int paged_attention(const Call& call) {
  if (call.count() < 17) return call.fail("expects 17 parameters, got %d", call.count());
  KvCache cache;
  const bool is_trapezoidal = call.integer(14) == kTrapezoidal;
  const auto value_dim = static_cast<size_t>(call.integer(15));
  const bool fits = value_dim > 0 ? read_latent_cache(call, 1, value_dim, call.dtype(0), cache)
                                  : read_cache(call, 1, 2, call.dtype(0), cache) && cache.key_dim == cache.value_dim;
  if (!fits || (cache.quantized && !is_trapezoidal)) return call.fail("%s", kCacheRule);
  if (static_cast<size_t>(call.integer(12)) != cache.heads) return call.fail("kv_head_num does not fit the cache");
  const size_t num_heads = static_cast<size_t>(call.integer(10));
  const size_t width = num_heads * cache.key_dim;
  if (cache.heads == 0 || num_heads % cache.heads != 0 || width == 0 || call.elements(0) % width != 0) {
    return call.fail("rows of q must hold %zu heads of %zu elements, shared by %zu heads of the cache", num_heads,
                     cache.key_dim, cache.heads);
  }
  const size_t rows = call.elements(0) / width;
  if (call.elements(16) != rows * num_heads * cache.value_dim) {
    return call.fail("rows of y must hold %zu heads of %zu elements", num_heads, cache.value_dim);
  }
  std::vector<Requests> of_groups;
  if (const int status = read_requests(call, 3, 8, 4, rows, 1, of_groups)) return status;
  const Requests& requests = of_groups[0];
  if (const int status = check_blocks(call, requests, cache.num_blocks, cache.block_size, 0)) return status;
  AttentionMask mask;
  if (call.present(7) && call.elements(7) > 1) {  // a single element means no mask
    int64_t longest = 0;
    for (const int64_t length : requests.context_lens) longest = std::max(longest, length);
    if (is_trapezoidal) return call.fail("a mask and the mode TRAPEZOIDAL exclude each other");
    if (!is_float(call.dtype(7)) || call.rank(7) != 2 || call.dim(7, 0) != rows ||
        call.dim(7, 1) < static_cast<size_t>(longest)) {
      return call.fail("attn_mask must have a row for each of %zu rows and a column for each of %lld keys", rows,
                       static_cast<long long>(longest));
    }
    mask = {call.data<void>(7), call.dtype(7), call.dim(7, 1)};
  }
  AttendArgs args = {call.data<const char>(0), width, {}, cache, &requests, rows, num_heads, nullptr};
  args.scale = call.number(11);
  args.y = call.data<void>(16);
  if (is_trapezoidal) {
    attend(args);
  } else {
    attend_under(mask, args);
  }
  return 0;
}

}  // namespace
}  // namespace llm

LLM_OPERATOR(ReshapeAndCache) { return llm::reshape_and_cache(call); }

LLM_OPERATOR(PagedAttention) { return llm::paged_attention(call); }
