#include "paged_attention.h"

#include <algorithm>
#include <utility>

#include "kv_layout.h"
#include "thread_pool.h"

namespace llm {

const char kCacheRule[] =
    "caches must be [num_blocks, block_size, num_kv_heads, head_dim] of the type of the rows, block_size and head_dim "
    "multiples of 16";

namespace {

// Writes the key of one head into column `lane` of a group; `kInputs` of its dims are adjacent.
template <class Element, size_t kInputs>
void store_key(const Element* key, size_t head_dim, size_t lane, Element* group) {
  for (size_t dim = 0; dim < head_dim; dim += kInputs) {
    __builtin_memcpy(group + dim * kGroupTokens + lane * kInputs, key + dim, kInputs * sizeof(Element));
  }
}

// Writes the value of one head into input `lane` of a group; `kInputs` tokens are adjacent in a panel of 16 dims.
template <class Element, size_t kInputs>
void store_value(const Element* value, size_t head_dim, size_t lane, Element* group) {
  for (size_t panel = 0; panel < head_dim; panel += kPanelWidth) {
    Element* row = group + panel * kGroupTokens + lane / kInputs * kInputs * kPanelWidth + lane % kInputs;
    for (size_t column = 0; column < kPanelWidth; column++) row[column * kInputs] = value[panel + column];
  }
}

// Adjacent tokens of a sequence share cache lines of their group, so one thread stores a run of them.
constexpr size_t kTokensPerTask = 64;
// Tasks for each thread, if there are enough tokens.
constexpr size_t kTasksPerThread = 4;

// Calls body(head, token, lane, group) for the tokens from `first` to `last` that are stored: `lane` is the index in
// its group, and group(dim) the offset of the group for heads of `dim` elements.
template <class Body>
void for_stored(const KvCache& cache, const KvRows& rows, size_t first, size_t last, Body body) {
  for (size_t head = 0; head < cache.heads; head++) {
    for (size_t token = first; token < last; token++) {
      if (rows.slots[token] < 0) continue;
      const size_t slot = static_cast<size_t>(rows.slots[token]);
      const size_t in_block = slot % cache.block_size;
      auto group = [&](size_t dim) {
        return group_offset(slot / cache.block_size, in_block / kGroupTokens, head, cache.block_size, cache.heads, dim);
      };
      body(head, token, in_block % kGroupTokens, group);
    }
  }
}

template <class Element, size_t kInputs>
void store_tokens(const KvCache& cache, const KvRows& rows, size_t first, size_t last) {
  const auto* k = reinterpret_cast<const Element*>(rows.k);
  const auto* v = reinterpret_cast<const Element*>(rows.v);
  auto* keys = reinterpret_cast<Element*>(cache.keys);
  auto* values = reinterpret_cast<Element*>(cache.values);
  for_stored(cache, rows, first, last, [&](size_t head, size_t token, size_t lane, auto group) {
    store_key<Element, kInputs>(k + token * rows.k_stride + head * cache.key_dim, cache.key_dim, lane,
                                keys + group(cache.key_dim));
    if (cache.values_in_keys) return;
    store_value<Element, kInputs>(v + token * rows.v_stride + head * cache.value_dim, cache.value_dim, lane,
                                  values + group(cache.value_dim));
  });
}

void store_qvalues_of_tokens(const KvCache& cache, const KvRows& rows, size_t first, size_t last) {
  const size_t bytes = element_size(cache.dtype, nullptr);
  std::vector<int8_t> qvalues(std::max(cache.key_dim, cache.value_dim));
  // Stores the qvalues of one head, and its scale in the lane of its token.
  auto quantized = [&](const char* rows_of_heads, size_t stride, size_t head, size_t token, size_t dim, size_t lane,
                       char* group, bool rotates) {
    float scale;
    const char* x = rows_of_heads + (token * stride + head * dim) * bytes;
    kernels().encode({x, qvalues.data(), &scale, cache.dtype, 1, dim, rotates});
    std::memcpy(group + kGroupTokens * dim + lane * kScaleBytes, &scale, kScaleBytes);
    return reinterpret_cast<int8_t*>(group);
  };
  for_stored(cache, rows, first, last, [&](size_t head, size_t token, size_t lane, auto group) {
    int8_t* keys = quantized(rows.k, rows.k_stride, head, token, cache.key_dim, lane,
                             cache.keys + group(cache.key_dim + kScaleBytes), true);
    store_key<int8_t, kCodeInputs>(qvalues.data(), cache.key_dim, lane, keys);
    int8_t* values = quantized(rows.v, rows.v_stride, head, token, cache.value_dim, lane,
                               cache.values + group(cache.value_dim + kScaleBytes), false);
    store_value<int8_t, kCodeInputs>(qvalues.data(), cache.value_dim, lane, values);
  });
}

// Stores the tokens from `first` to `last`.
void store_run(const KvCache& cache, const KvRows& rows, size_t first, size_t last) {
  const bool pairs = cache.dtype == DType::kBFloat16;
  if (cache.quantized) return store_qvalues_of_tokens(cache, rows, first, last);
  if (cache.dtype == DType::kFloat32) return store_tokens<uint32_t, 1>(cache, rows, first, last);
  if (pairs) return store_tokens<uint16_t, 2>(cache, rows, first, last);
  store_tokens<uint16_t, 1>(cache, rows, first, last);
}

// Calls body(first, last) for runs of tokens that fit the caches of one thread; a single run is shared by all threads.
template <class Body>
void for_token_runs(size_t tokens, Body body) {
  const size_t wanted = tokens / (kTasksPerThread * num_threads());
  size_t run = (wanted + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
  run = std::clamp(run, kGroupTokens, kTokensPerTask);
  auto task = [&](size_t i) { body(i * run, std::min((i + 1) * run, tokens)); };
  parallel_for((tokens + run - 1) / run, task);
}

std::vector<int64_t> integers(const Call& call, int i) {
  std::vector<int64_t> values(call.elements(i));
  for (size_t j = 0; j < values.size(); j++) values[j] = call.integer(i, j);
  return values;
}

// Rows of heads that go to the cache or to attention.
struct Heads {
  const char* x;
  size_t stride;  // elements from a row to the next
};

// Arguments of the preparation of heads of queries or keys.
struct Preparation {
  const AttendArgs& args;
  size_t count;
  const void* gamma;
  DType gamma_dtype;
  char* y;                                         // [tokens, count * head_dim]
  const float *bias = nullptr, *offset = nullptr;  // of the rotary embedding

  bool changes() const { return gamma != nullptr || args.cos != nullptr; }

  Heads prepared(Heads heads) const { return changes() ? Heads{y, count * args.cache.key_dim} : heads; }

  void run(Heads heads, size_t first, size_t last) const {
    const size_t head_dim = args.cache.key_dim;
    const size_t width = count * head_dim;
    const DType dtype = args.cache.dtype;
    const size_t bytes = element_size(dtype, nullptr);
    char* target = y + first * width * bytes;
    const char* x = heads.x + first * heads.stride * bytes;
    size_t stride = heads.stride;
    if (gamma != nullptr) {
      RmsNormArgs norm = {x, nullptr, nullptr, gamma, target, nullptr, dtype, last - first, width, args.eps};
      norm.gamma_dtype = gamma_dtype;
      norm.group = head_dim;
      norm.x_stride = stride;
      kernels().rms_norm(norm);
      x = target;
      stride = width;
    }
    if (args.cos == nullptr) return;
    kernels().rotary({x, stride, args.cos, args.sin, target, args.positions + first, dtype, args.table_dtype,
                      last - first, count, head_dim, 0, bias, offset});
  }
};

// Gives each group the requests of the first one, with its own of the `groups` times `entries` entries of tables.
void split_tables(size_t groups, size_t entries, std::vector<Requests>& requests) {
  const std::vector<int64_t> tables = std::move(requests[0].block_tables);
  requests[0].block_tables.clear();
  requests.resize(groups, requests[0]);
  for (size_t group = 0; group < groups; group++) {
    const auto first = tables.begin() + static_cast<ptrdiff_t>(group * entries);
    requests[group].block_tables.assign(first, first + static_cast<ptrdiff_t>(entries));
  }
}

}  // namespace

int read_requests(const Call& call, int block_tables, int query_lens, int context_lens, size_t rows, size_t groups,
                  std::vector<Requests>& of_groups) {
  of_groups.resize(1);
  Requests& requests = of_groups[0];
  if (call.rank(block_tables) != 2 || !call.is_integer(block_tables) || !call.is_integer(context_lens)) {
    return call.fail("block_tables [B, W] and context_lens [B] must be int32 or int64");
  }
  const size_t batch = call.elements(context_lens);
  requests.query_lens.assign(batch, 1);
  if (query_lens >= 0 && call.present(query_lens)) {
    if (!call.is_integer(query_lens)) return call.fail("query_lens [B] must be int32 or int64");
    requests.query_lens = integers(call, query_lens);
  }
  if (call.dim(block_tables, 0) != groups * batch || requests.query_lens.size() != batch) {
    return call.fail("block_tables, query_lens and context_lens must have one entry a request and group");
  }
  requests.block_tables = integers(call, block_tables);
  requests.context_lens = integers(call, context_lens);
  requests.table_width = call.dim(block_tables, 1);
  size_t total = 0;
  for (size_t i = 0; i < batch; i++) {
    const int64_t queries = requests.query_lens[i];
    if (queries < 0 || requests.context_lens[i] < queries) {
      return call.fail("request %zu has %lld query rows in a context of %lld", i, static_cast<long long>(queries),
                       static_cast<long long>(requests.context_lens[i]));
    }
    total += static_cast<size_t>(queries);
  }
  if (total != rows) return call.fail("query_lens add up to %zu, q has %zu rows", total, rows);
  if (groups > 1) split_tables(groups, batch * requests.table_width, of_groups);
  return 0;
}

std::vector<RowOwner> row_owners(const Requests& requests) {
  std::vector<RowOwner> rows;
  for (size_t request = 0; request < requests.query_lens.size(); request++) {
    const int64_t context = requests.context_lens[request];
    for (int64_t at = context - requests.query_lens[request]; at < context; at++) {
      rows.push_back({request, static_cast<size_t>(at)});
    }
  }
  return rows;
}

int check_blocks(const Call& call, const Requests& requests, size_t num_blocks, size_t block_size, size_t window) {
  const size_t width = requests.table_width;
  for (size_t i = 0; i < requests.query_lens.size(); i++) {
    if (requests.query_lens[i] == 0) continue;
    const size_t context = static_cast<size_t>(requests.context_lens[i]);
    const size_t blocks = (context + block_size - 1) / block_size;
    if (blocks > width) return call.fail("request %zu needs %zu blocks, its table has %zu", i, blocks, width);
    const size_t position = context - static_cast<size_t>(requests.query_lens[i]);
    const size_t first = window == 0 || position < window ? 0 : position + 1 - window;
    for (size_t j = first / block_size; j < blocks; j++) {
      const int64_t block = requests.block_tables[i * width + j];
      if (block < 0 || static_cast<size_t>(block) >= num_blocks) {
        return call.fail("block %lld of request %zu is outside the %zu blocks of the cache",
                         static_cast<long long>(block), i, num_blocks);
      }
    }
  }
  return 0;
}

bool read_cache(const Call& call, int keys, int values, DType dtype, KvCache& cache) {
  const bool quantized = call.dtype(keys) == DType::kInt8;
  const size_t scale = quantized ? kScaleBytes : 0;
  auto fits = [&](int parameter) {
    return call.rank(parameter) == 4 && call.dtype(parameter) == (quantized ? DType::kInt8 : dtype) &&
           call.dim(parameter, 1) % kGroupTokens == 0 && call.dim(parameter, 1) > 0 &&
           call.dim(parameter, 3) >= scale && (call.dim(parameter, 3) - scale) % kPanelWidth == 0;
  };
  if (!is_float(dtype) || !fits(keys) || !fits(values)) return false;
  for (const int axis : {0, 1, 2}) {
    if (call.dim(keys, axis) != call.dim(values, axis)) return false;
  }
  cache = {call.data<char>(keys),     call.data<char>(values),     dtype,
           call.dim(keys, 0),         call.dim(keys, 1),           call.dim(keys, 2),
           call.dim(keys, 3) - scale, call.dim(values, 3) - scale, quantized};
  return true;
}

bool read_latent_cache(const Call& call, int keys, size_t value_dim, DType dtype, KvCache& cache) {
  if (!read_cache(call, keys, keys, dtype, cache) || cache.quantized) return false;
  cache.value_dim = value_dim;
  cache.values_in_keys = true;
  return value_dim % kPanelWidth == 0 && value_dim <= cache.key_dim;
}

void store_kv(const KvCache& cache, const KvRows& rows, size_t tokens) {
  for_token_runs(tokens, [&](size_t first, size_t last) { store_run(cache, rows, first, last); });
}

AttentionArgs plain_attention(const AttendArgs& args, const void* q) {
  const KvCache& cache = args.cache;
  const Requests& requests = *args.requests;
  AttentionArgs attention = {q,
                             cache.keys,
                             cache.values,
                             args.y,
                             requests.block_tables.data(),
                             requests.query_lens.data(),
                             requests.context_lens.data(),
                             cache.dtype,
                             args.tokens,
                             requests.query_lens.size(),
                             requests.table_width,
                             cache.block_size,
                             args.num_heads,
                             cache.heads,
                             cache.values_in_keys ? cache.value_dim : cache.key_dim,
                             args.scale};
  if (cache.values_in_keys) attention.key_dim = cache.key_dim;
  return attention;
}

void attend(const AttendArgs& args) {
  static OperatorClock clock("Attention");
  const Timed timed(clock);
  const KvCache& cache = args.cache;
  const size_t width = args.num_heads * cache.key_dim;
  Heads q = {args.q, args.q_stride};
  if (args.rows.k != nullptr) {
    const size_t bytes = element_size(cache.dtype, nullptr);
    const size_t kv_width = cache.heads * cache.key_dim;
    const bool changes = args.cos != nullptr || args.q_gamma != nullptr || args.k_gamma != nullptr;
    const size_t room = changes ? args.tokens * (width + kv_width) * bytes : 0;
    char* memory = static_cast<char*>(scratch(Scratch::kActivations, room + 1));
    const Preparation of_q = {args, args.num_heads, args.q_gamma, args.q_gamma_dtype, memory};
    const Preparation of_k = {
        args,        cache.heads,  args.k_gamma, args.k_gamma_dtype, memory + args.tokens * width * bytes,
        args.k_bias, args.k_offset};
    const Heads k = {args.rows.k, args.rows.k_stride};
    const Heads stored = of_k.prepared(k);
    const KvRows rows = {stored.x, stored.stride, args.rows.v, args.rows.v_stride, args.rows.slots};
    for_token_runs(args.tokens, [&](size_t first, size_t last) {
      of_q.run(q, first, last);
      of_k.run(k, first, last);
      store_run(cache, rows, first, last);
    });
    q = of_q.prepared(q);
  }
  AttentionArgs attention = plain_attention(args, q.x);
  attention.quantized = cache.quantized;
  attention.y_layout = args.y_layout;
  attention.q_stride = q.stride;
  attention.causal = args.causal;
  attention.window = args.window;
  attention.chunk = args.chunk;
  attention.cap = args.cap;
  attention.slopes = args.slopes;
  attention.sinks = args.sinks;
  attention.q_rope = args.q_rope;
  attention.rope_stride = args.rope_stride;
  attention.rope_dim = cache.value_dim;
  kernels().attention(attention);
}

}  // namespace llm
