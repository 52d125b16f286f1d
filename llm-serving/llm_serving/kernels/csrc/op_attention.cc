// ReshapeAndCache and PagedAttention, and the same for float32, which those primitives refuse.
#include <vector>

#include "call.h"
#include "kernels.h"
#include "kv_layout.h"
#include "thread_pool.h"

namespace llm {
namespace {

bool valid_cache(const Call& call, int cache, DType dtype) {
  return call.rank(cache) == 4 && call.dtype(cache) == dtype && call.dim(cache, 1) % kGroupTokens == 0 &&
         call.dim(cache, 3) % kPanelWidth == 0;
}

// Writes the key of one head into column `lane` of a group; `kInputs` of its dims stay together.
template <class Element, size_t kInputs>
void store_key(const Element* key, size_t head_dim, size_t lane, Element* group) {
  for (size_t dim = 0; dim < head_dim; dim += kInputs) {
    __builtin_memcpy(group + dim * kGroupTokens + lane * kInputs, key + dim, kInputs * sizeof(Element));
  }
}

// Writes the value of one head into input `lane` of a group. `kInputs` tokens stay together in a panel of 16 dims.
template <class Element, size_t kInputs>
void store_value(const Element* value, size_t head_dim, size_t lane, Element* group) {
  for (size_t panel = 0; panel < head_dim; panel += kPanelWidth) {
    Element* row = group + panel * kGroupTokens + lane / kInputs * kInputs * kPanelWidth + lane % kInputs;
    for (size_t column = 0; column < kPanelWidth; column++) row[column * kInputs] = value[panel + column];
  }
}

// Neighbours in a sequence share cache lines of their group, so one thread stores a run of them. Heads share none.
constexpr size_t kTokensPerTask = 64;
// Rows of one head below which one thread is quicker than waking another.
constexpr size_t kRowsWorthSharing = 32;

template <class Element, size_t kInputs>
void store_tokens(const Call& call, size_t first, size_t last, size_t first_head, size_t last_head) {
  const size_t block_size = call.dim(2, 1);
  const size_t heads = call.dim(2, 2);
  const size_t head_dim = call.dim(2, 3);
  size_t slots[kTokensPerTask];
  bool skipped[kTokensPerTask];
  for (size_t token = first; token < last; token++) {
    const int64_t slot = call.integer(4, token);
    skipped[token - first] = slot < 0;
    slots[token - first] = static_cast<size_t>(slot);
  }
  for (size_t head = first_head; head < last_head; head++) {
    for (size_t token = first; token < last; token++) {
      if (skipped[token - first]) continue;
      const size_t in_block = slots[token - first] % block_size;
      const size_t group =
          group_offset(slots[token - first] / block_size, in_block / kGroupTokens, head, block_size, heads, head_dim);
      const size_t lane = in_block % kGroupTokens;
      const size_t at = (token * heads + head) * head_dim;
      store_key<Element, kInputs>(call.data<const Element>(0) + at, head_dim, lane, call.data<Element>(2) + group);
      store_value<Element, kInputs>(call.data<const Element>(1) + at, head_dim, lane, call.data<Element>(3) + group);
    }
  }
}

// k, v, key_cache, value_cache, slot_mapping | k
int store_kv(const Call& call) {
  if (call.count() < 6) return call.fail("expects 6 parameters, got %d", call.count());
  const DType dtype = call.dtype(0);
  if (!is_float(dtype) || call.dtype(1) != dtype) return call.fail("k and v must be floats of one type");
  if (!valid_cache(call, 2, dtype) || !valid_cache(call, 3, dtype) || call.elements(2) != call.elements(3)) {
    return call.fail(
        "caches must be [num_blocks, block_size, num_kv_heads, head_dim] of the type of k, block_size and "
        "head_dim multiples of 16");
  }
  if (!call.is_integer(4)) return call.fail("slot_mapping must be int32 or int64");
  const size_t tokens = call.elements(4);
  const size_t width = call.dim(2, 2) * call.dim(2, 3);
  if (call.elements(0) != tokens * width || call.elements(1) != tokens * width) {
    return call.fail("k and v must have %zu rows of %zu elements", tokens, width);
  }
  const int64_t slots = static_cast<int64_t>(call.dim(2, 0) * call.dim(2, 1));
  for (size_t token = 0; token < tokens; token++) {
    const int64_t slot = call.integer(4, token);
    if (slot < -1 || slot >= slots) {
      return call.fail("slot_mapping[%zu] = %lld is outside the %lld slots of the cache", token,
                       static_cast<long long>(slot), static_cast<long long>(slots));
    }
  }
  const size_t heads = call.dim(2, 2);
  const size_t heads_per_task = tokens * heads < kRowsWorthSharing ? heads : 1;
  const size_t head_tasks = (heads + heads_per_task - 1) / (heads_per_task + (heads == 0));
  auto store = [&](size_t task) {
    const size_t first = task / head_tasks * kTokensPerTask;
    const size_t last = first + kTokensPerTask < tokens ? first + kTokensPerTask : tokens;
    const size_t head = task % head_tasks * heads_per_task;
    const size_t end = head + heads_per_task;
    if (dtype == DType::kFloat32) return store_tokens<uint32_t, 1>(call, first, last, head, end);
    if (dtype == DType::kBFloat16) return store_tokens<uint16_t, 2>(call, first, last, head, end);
    store_tokens<uint16_t, 1>(call, first, last, head, end);
  };
  parallel_for((tokens + kTokensPerTask - 1) / kTokensPerTask * head_tasks, store);
  return 0;
}

std::vector<int64_t> integers(const Call& call, int i) {
  std::vector<int64_t> values(call.elements(i));
  for (size_t j = 0; j < values.size(); j++) values[j] = call.integer(i, j);
  return values;
}

// Where an operator has its parameters; -1 where it has none.
struct AttentionParameters {
  int q, key_cache, value_cache, block_tables, context_lens, query_lens, y;
};

int paged_attention(const Call& call, const AttentionParameters& at, size_t num_heads, float scale) {
  const DType dtype = call.dtype(at.q);
  if (!is_float(dtype) || !valid_cache(call, at.key_cache, dtype) || !valid_cache(call, at.value_cache, dtype)) {
    return call.fail(
        "caches must be [num_blocks, block_size, num_kv_heads, head_dim] of the type of q, block_size and "
        "head_dim multiples of 16");
  }
  const size_t num_blocks = call.dim(at.key_cache, 0);
  const size_t block_size = call.dim(at.key_cache, 1);
  const size_t num_kv_heads = call.dim(at.key_cache, 2);
  const size_t head_dim = call.dim(at.key_cache, 3);
  const size_t width = num_heads * head_dim;
  if (num_kv_heads == 0 || num_heads % num_kv_heads != 0 || width == 0 || call.elements(at.q) % width != 0) {
    return call.fail("rows of q must hold %zu heads of %zu elements, shared by %zu heads of the cache", num_heads,
                     head_dim, num_kv_heads);
  }
  if (call.rank(at.block_tables) != 2 || !call.is_integer(at.block_tables) || !call.is_integer(at.context_lens)) {
    return call.fail("block_tables [B, W] and context_lens [B] must be int32 or int64");
  }
  const size_t rows = call.elements(at.q) / width;
  const size_t batch = call.elements(at.context_lens);
  const std::vector<int64_t> tables = integers(call, at.block_tables);
  const std::vector<int64_t> contexts = integers(call, at.context_lens);
  std::vector<int64_t> queries(batch, 1);
  if (at.query_lens >= 0 && call.present(at.query_lens)) queries = integers(call, at.query_lens);
  if (call.dim(at.block_tables, 0) != batch || queries.size() != batch) {
    return call.fail("block_tables, query_lens and context_lens must have one entry a request");
  }
  const size_t table_width = call.dim(at.block_tables, 1);
  size_t total = 0;
  for (size_t i = 0; i < batch; i++) {
    if (queries[i] < 0 || contexts[i] < queries[i]) {
      return call.fail("request %zu has %lld query rows in a context of %lld", i, static_cast<long long>(queries[i]),
                       static_cast<long long>(contexts[i]));
    }
    if (queries[i] == 0) continue;
    total += static_cast<size_t>(queries[i]);
    const size_t blocks = (static_cast<size_t>(contexts[i]) + block_size - 1) / block_size;
    if (blocks > table_width)
      return call.fail("request %zu needs %zu blocks, its table has %zu", i, blocks, table_width);
    for (size_t j = 0; j < blocks; j++) {
      const int64_t block = tables[i * table_width + j];
      if (block < 0 || static_cast<size_t>(block) >= num_blocks) {
        return call.fail("block %lld of request %zu is outside the %zu blocks of the cache",
                         static_cast<long long>(block), i, num_blocks);
      }
    }
  }
  if (total != rows) return call.fail("query_lens add up to %zu, q has %zu rows", total, rows);
  kernels().attention({call.data<void>(at.q), call.data<void>(at.key_cache), call.data<void>(at.value_cache),
                       call.data<void>(at.y), tables.data(), queries.data(), contexts.data(), dtype, batch, table_width,
                       block_size, num_heads, num_kv_heads, head_dim, scale});
  return 0;
}

}  // namespace
}  // namespace llm

LLM_OPERATOR(ReshapeAndCache) { return llm::store_kv(call); }

// q, key_cache, value_cache, block_tables, context_lens, 3 absent, query_lens, 1 absent, heads, scale, kv_heads, 3
// modes | y
LLM_OPERATOR(PagedAttention) {
  using namespace llm;
  if (call.count() < 17) return call.fail("expects 17 parameters, got %d", call.count());
  if (static_cast<size_t>(call.integer(12)) != call.dim(1, 2)) return call.fail("kv_head_num does not fit the cache");
  return paged_attention(call, {0, 1, 2, 3, 4, 8, 16}, static_cast<size_t>(call.integer(10)), call.number(11));
}

// The two operators in float32, called as custom operators. Their results have the shape of their first input.
LLM_OPERATOR(store_kv_float32) { return llm::store_kv(call); }

// q, key_cache, value_cache, block_tables, query_lens, context_lens, scale float32[1] | y
LLM_OPERATOR(attention_float32) {
  using namespace llm;
  if (call.count() < 8) return call.fail("expects 8 parameters, got %d", call.count());
  const size_t head_dim = call.dim(1, 3);
  return paged_attention(call, {0, 1, 2, 3, 5, 4, 7}, head_dim == 0 ? 0 : call.dim(0, -1) / head_dim, call.number(6));
}

// MindSpore asks for the shape of the result before each call whose shapes are dynamic.
LLM_EXPORT std::vector<int64_t> store_kv_float32InferShape(int* ranks, int64_t** shapes, void*) {
  return std::vector<int64_t>(shapes[0], shapes[0] + ranks[0]);
}

LLM_EXPORT std::vector<int64_t> attention_float32InferShape(int* ranks, int64_t** shapes, void*) {
  return std::vector<int64_t>(shapes[0], shapes[0] + ranks[0]);
}
