// ReshapeAndCache, PagedAttention, and both with what comes before them.
#include <algorithm>
#include <vector>

#include "kv_layout.h"
#include "parts.h"
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

// Neighbours in a sequence share cache lines of their group, so one thread stores a run of them.
constexpr size_t kTokensPerTask = 64;
// Tasks a thread, where there are tokens for them.
constexpr size_t kTasksPerThread = 4;

// Rows of keys and values, `stride` elements apart, and the parameters that say where they go.
struct KvRows {
  const char* k;
  size_t k_stride;
  const char* v;
  size_t v_stride;
  DType dtype;
  int key_cache, value_cache, slots;
};

template <class Element, size_t kInputs>
void store_tokens(const Call& call, const KvRows& rows, size_t first, size_t last) {
  const size_t block_size = call.dim(rows.key_cache, 1);
  const size_t heads = call.dim(rows.key_cache, 2);
  const size_t head_dim = call.dim(rows.key_cache, 3);
  const auto* k = reinterpret_cast<const Element*>(rows.k);
  const auto* v = reinterpret_cast<const Element*>(rows.v);
  size_t slots[kTokensPerTask];
  bool skipped[kTokensPerTask];
  for (size_t token = first; token < last; token++) {
    const int64_t slot = call.integer(rows.slots, token);
    skipped[token - first] = slot < 0;
    slots[token - first] = static_cast<size_t>(slot);
  }
  for (size_t head = 0; head < heads; head++) {
    for (size_t token = first; token < last; token++) {
      if (skipped[token - first]) continue;
      const size_t in_block = slots[token - first] % block_size;
      const size_t group =
          group_offset(slots[token - first] / block_size, in_block / kGroupTokens, head, block_size, heads, head_dim);
      const size_t lane = in_block % kGroupTokens;
      const size_t at = head * head_dim;
      store_key<Element, kInputs>(k + token * rows.k_stride + at, head_dim, lane,
                                  call.data<Element>(rows.key_cache) + group);
      store_value<Element, kInputs>(v + token * rows.v_stride + at, head_dim, lane,
                                    call.data<Element>(rows.value_cache) + group);
    }
  }
}

constexpr char kCacheRule[] =
    "caches must be [num_blocks, block_size, num_kv_heads, head_dim] of the type of the rows, block_size and head_dim "
    "multiples of 16";

// What must hold before `store_rows`: a status as operators return it.
int check_slots(const Call& call, int key_cache, int slots) {
  if (!call.is_integer(slots)) return call.fail("slot_mapping must be int32 or int64");
  return call.check_within(slots, "slot_mapping", -1, call.dim(key_cache, 0) * call.dim(key_cache, 1),
                           "slots of the cache");
}

// Stores the tokens from `first` to `last`, at most kTokensPerTask.
void store_rows(const Call& call, const KvRows& rows, size_t first, size_t last) {
  if (rows.dtype == DType::kFloat32) return store_tokens<uint32_t, 1>(call, rows, first, last);
  if (rows.dtype == DType::kBFloat16) return store_tokens<uint16_t, 2>(call, rows, first, last);
  store_tokens<uint16_t, 1>(call, rows, first, last);
}

// Calls body(first, last) for runs of tokens that one thread has in its caches; a single run is for all threads.
template <class Body>
void for_token_runs(size_t tokens, Body body) {
  const size_t wanted = tokens / (kTasksPerThread * num_threads());
  size_t run = (wanted + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
  run = std::clamp(run, kGroupTokens, kTokensPerTask);
  auto task = [&](size_t i) { body(i * run, std::min((i + 1) * run, tokens)); };
  parallel_for((tokens + run - 1) / run, task);
}

// k, v, key_cache, value_cache, slot_mapping | k
int store_kv(const Call& call) {
  if (call.count() < 6) return call.fail("expects 6 parameters, got %d", call.count());
  const DType dtype = call.dtype(0);
  if (!is_float(dtype) || call.dtype(1) != dtype) return call.fail("k and v must be floats of one type");
  if (!valid_cache(call, 2, dtype) || !valid_cache(call, 3, dtype) || call.elements(2) != call.elements(3)) {
    return call.fail("%s", kCacheRule);
  }
  const size_t tokens = call.elements(4);
  const size_t width = call.dim(2, 2) * call.dim(2, 3);
  if (call.elements(0) != tokens * width || call.elements(1) != tokens * width) {
    return call.fail("k and v must have %zu rows of %zu elements", tokens, width);
  }
  if (const int status = check_slots(call, 2, 4)) return status;
  const KvRows rows = {call.data<const char>(0), width, call.data<const char>(1), width, dtype, 2, 3, 4};
  for_token_runs(tokens, [&](size_t first, size_t last) { store_rows(call, rows, first, last); });
  return 0;
}

std::vector<int64_t> integers(const Call& call, int i) {
  std::vector<int64_t> values(call.elements(i));
  for (size_t j = 0; j < values.size(); j++) values[j] = call.integer(i, j);
  return values;
}

// The queries [elements / width, width = num_heads * head_dim], and where an operator has its parameters; -1 where it
// has none.
struct AttentionParameters {
  const void* q;
  size_t elements;
  size_t num_heads;
  DType dtype;
  int key_cache, value_cache, block_tables, context_lens, query_lens;
  void* y;
  Passes y_passes;
};

// Attention after `prepare`, which may write what it reads; nothing is written where a parameter does not fit.
template <class Prepare>
int paged_attention(const Call& call, const AttentionParameters& at, float scale, Prepare prepare) {
  if (!is_float(at.dtype) || !valid_cache(call, at.key_cache, at.dtype) ||
      !valid_cache(call, at.value_cache, at.dtype)) {
    return call.fail("%s", kCacheRule);
  }
  const size_t num_heads = at.num_heads;
  const size_t num_blocks = call.dim(at.key_cache, 0);
  const size_t block_size = call.dim(at.key_cache, 1);
  const size_t num_kv_heads = call.dim(at.key_cache, 2);
  const size_t head_dim = call.dim(at.key_cache, 3);
  const size_t width = num_heads * head_dim;
  if (num_kv_heads == 0 || num_heads % num_kv_heads != 0 || width == 0 || at.elements % width != 0) {
    return call.fail("rows of q must hold %zu heads of %zu elements, shared by %zu heads of the cache", num_heads,
                     head_dim, num_kv_heads);
  }
  if (call.rank(at.block_tables) != 2 || !call.is_integer(at.block_tables) || !call.is_integer(at.context_lens)) {
    return call.fail("block_tables [B, W] and context_lens [B] must be int32 or int64");
  }
  const size_t rows = at.elements / width;
  const size_t batch = call.elements(at.context_lens);
  const std::vector<int64_t> tables = integers(call, at.block_tables);
  const std::vector<int64_t> contexts = integers(call, at.context_lens);
  std::vector<int64_t> queries(batch, 1);
  if (at.query_lens >= 0 && call.present(at.query_lens)) {
    if (!call.is_integer(at.query_lens)) return call.fail("query_lens [B] must be int32 or int64");
    queries = integers(call, at.query_lens);
  }
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
  prepare();
  kernels().attention({at.q, call.data<void>(at.key_cache), call.data<void>(at.value_cache), at.y, tables.data(),
                       queries.data(), contexts.data(), at.dtype, rows, batch, table_width, block_size, num_heads,
                       num_kv_heads, head_dim, scale, at.y_passes});
  return 0;
}

// As check_slots, of `count` rows of tables.
int check_positions(const Call& call, int positions, size_t tokens, size_t count) {
  if (!call.is_integer(positions) || call.elements(positions) != tokens) {
    return call.fail("positions must be int32 or int64, one for each of %zu rows", tokens);
  }
  return call.check_within(positions, "positions", 0, count, "rows of cos and sin");
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
  const size_t num_heads = static_cast<size_t>(call.integer(10));
  return paged_attention(
      call, {call.data<void>(0), call.elements(0), num_heads, call.dtype(0), 1, 2, 3, 4, 8, call.data<void>(16), {}},
      call.number(11), [] {});
}

namespace llm {

int attend_to_qkv(const Call& call, const QkvParameters& at) {
  static OperatorClock clock("Attention");
  const Timed timed(clock);
  const DType dtype = at.dtype;
  const size_t tokens = call.elements(at.slot_mapping);
  if (!is_float(dtype) || !valid_cache(call, at.key_cache, dtype) || !valid_cache(call, at.value_cache, dtype) ||
      call.elements(at.key_cache) != call.elements(at.value_cache)) {
    return call.fail("%s", kCacheRule);
  }
  const size_t head_dim = call.dim(at.key_cache, 3);
  const size_t kv_width = call.dim(at.key_cache, 2) * head_dim;
  const size_t width = at.width;
  const size_t q_width = at.q_width;
  if (head_dim == 0 || width != q_width + 2 * kv_width || width % head_dim != 0 || at.tokens != tokens) {
    return call.fail("qkv must have %zu rows of %zu queries and of %zu keys and values", tokens, q_width, kv_width);
  }
  if (call.dtype(at.cos) != dtype || call.dtype(at.sin) != dtype || call.rank(at.cos) != 2 ||
      call.dim(at.cos, 1) != head_dim || call.elements(at.sin) != call.elements(at.cos)) {
    return call.fail("cos and sin must be tables [positions, %zu] of the type of qkv", head_dim);
  }
  if (const int status = check_positions(call, at.positions, tokens, call.dim(at.cos, 0))) return status;
  if (const int status = check_slots(call, at.key_cache, at.slot_mapping)) return status;
  const size_t bytes = element_size(dtype, nullptr);
  const char* qkv = static_cast<const char*>(at.qkv);
  char* q = static_cast<char*>(scratch(Scratch::kActivations, tokens * (q_width + kv_width) * bytes + 1));
  char* k = q + tokens * q_width * bytes;
  const KvRows rows = {
      k, kv_width, qkv + (q_width + kv_width) * bytes, width, dtype, at.key_cache, at.value_cache, at.slot_mapping};
  const std::vector<int64_t> positions = integers(call, at.positions);
  auto rotate_and_store = [&](size_t first, size_t last) {
    auto rotate = [&](const char* x, char* y, size_t columns) {
      kernels().rotary({x + first * width * bytes, width, call.data<void>(at.cos), call.data<void>(at.sin),
                        y + first * columns * bytes, positions.data() + first, dtype, dtype, last - first,
                        columns / head_dim, head_dim});
    };
    rotate(qkv, q, q_width);
    rotate(qkv + q_width * bytes, k, kv_width);
    store_rows(call, rows, first, last);
  };
  return paged_attention(call,
                         {q, tokens * q_width, q_width / head_dim, dtype, at.key_cache, at.value_cache, at.block_tables,
                          at.context_lens, at.query_lens, at.y, at.y_passes},
                         at.scale, [&] { for_token_runs(tokens, rotate_and_store); });
}

}  // namespace llm
