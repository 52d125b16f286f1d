// Attention as a part of larger operators: reading its parameters, and the computation from new rows to results.
#pragma once

#include <cstdint>
#include <vector>

#include "call.h"
#include "kernels.h"

namespace llm {

// The requests of a step, read from integer parameters.
struct Requests {
  std::vector<int64_t> block_tables;  // [B, table_width]
  std::vector<int64_t> query_lens, context_lens;
  size_t table_width = 0;
};

// Reads the requests that own `rows` rows; without query_lens (-1 or absent), each has one row. `block_tables`
// [groups * B, W] has tables of all requests for each group of layers: `requests` has an entry for each group. Returns
// a status as operators do.
int read_requests(const Call& call, int block_tables, int query_lens, int context_lens, size_t rows, size_t groups,
                  std::vector<Requests>& requests);

// Returns the owners of all rows of a step, in order.
std::vector<RowOwner> row_owners(const Requests& requests);

// Refuses requests whose block tables lack a block of the cache for a token that a row sees.
int check_blocks(const Call& call, const Requests& requests, size_t num_blocks, size_t block_size, size_t window);

// Keys and values of a layer (kv_layout.h).
struct KvCache {
  char *keys, *values;
  DType dtype;  // type of the rows
  size_t num_blocks, block_size, heads, key_dim, value_dim;
  bool quantized;
  bool values_in_keys = false;  // the first value_dim elements of a key are its value; `values` is not used

  size_t slots() const { return num_blocks * block_size; }
};

// Reads a cache from two parameters; false if they have neither this type nor qvalues.
bool read_cache(const Call& call, int keys, int values, DType dtype, KvCache& cache);

// Reads a cache of latent keys, whose first `value_dim` elements are their values; false if it has another type.
bool read_latent_cache(const Call& call, int keys, size_t value_dim, DType dtype, KvCache& cache);

extern const char kCacheRule[];

// Rows of new keys and values, `stride` elements apart, and their slots; -1 skips a row.
struct KvRows {
  const char* k;
  size_t k_stride;
  const char* v;
  size_t v_stride;
  const int64_t* slots;
};

// Stores all of `tokens` rows, with several threads.
void store_kv(const KvCache& cache, const KvRows& rows, size_t tokens);

// Arguments of an attention. Norm weights are [dim of a head], of the type of the cache or float32; cos and sin have a
// row for each position and are of either type.
struct AttendArgs {
  const char* q;
  size_t q_stride;
  KvRows rows;  // without k: all keys and values are already stored
  KvCache cache;
  const Requests* requests;
  size_t tokens, num_heads;
  const int64_t* positions;
  const void *cos = nullptr, *sin = nullptr;  // null: no rotary embedding
  DType table_dtype = DType::kNone;
  const float *k_bias = nullptr, *k_offset = nullptr;  // of the rotary embedding of keys (RotaryArgs)
  const void *q_gamma = nullptr, *k_gamma = nullptr;   // null: no norm of heads
  DType q_gamma_dtype = DType::kNone, k_gamma_dtype = DType::kNone;
  float eps = 0.0f;
  float scale = 1.0f;
  bool causal = true;
  size_t window = 0;
  size_t chunk = 0;
  float cap = 0.0f;
  const float* slopes = nullptr;
  const float* sinks = nullptr;
  const char* q_rope = nullptr;  // null: keys are not latent (see AttentionArgs)
  size_t rope_stride = 0;
  void* y = nullptr;
  TiledLayout y_layout = {};
};

// Normalises and rotates heads of queries and keys, stores keys and values, and attends; bit-identical to the separate
// operations.
void attend(const AttendArgs& args);

// Returns the arguments for the rows `q` of `args`, without window, cap and the like.
AttentionArgs plain_attention(const AttendArgs& args, const void* q);

}  // namespace llm
