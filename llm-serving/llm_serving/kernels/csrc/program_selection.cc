// The operation select_keys.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kv_layout.h"
#include "program.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Bytes of the scores that are computed before keys are selected.
constexpr size_t kScoreBytes = size_t{16} << 20;

// Writes the positions of the `top_k` largest of `count` scores, ascending, then -1. Of equal scores, the first one is
// larger; NaN is smallest.
void select_largest(float* scores, size_t count, int32_t* positions, size_t top_k) {
  if (count <= top_k) {
    std::iota(positions, positions + count, 0);
    std::fill(positions + count, positions + top_k, -1);
    return;
  }
  for (size_t i = 0; i < count; i++) {
    if (scores[i] != scores[i]) scores[i] = -std::numeric_limits<float>::infinity();
  }
  std::vector<float> sorted(scores, scores + count);
  const auto last = sorted.begin() + static_cast<ptrdiff_t>(top_k) - 1;
  std::nth_element(sorted.begin(), last, sorted.end(), std::greater<float>());
  const float least = *last;
  auto equal = top_k - static_cast<size_t>(std::count_if(sorted.begin(), last, [&](float x) { return x > least; }));
  for (size_t i = 0; i < count; i++) {
    if (scores[i] < least || (scores[i] == least && equal == 0)) continue;
    if (scores[i] == least) equal--;
    *positions++ = static_cast<int32_t>(i);
  }
}

// select_keys: selected | q weights | | layer top_k.

int check_select_keys(const Instruction& in) {
  const Operand *selected = in.output(0), *q = in.input(0), *weights = in.input(1);
  KvCache cache;
  if (const int status = in.read_layer(in.integer(0), cache)) return status;
  if (cache.quantized || cache.heads != 1) return in.fail("keys must have one head, and no qvalues");
  if (const int status = in.check_rows("selected", selected, DType::kInt32, false)) return status;
  if (in.integer(1) < 1) return in.fail("top_k must be 1 or more, is %d", in.integer(1));
  if (const int status = in.check_width("selected", *selected, static_cast<size_t>(in.integer(1)))) return status;
  if (const int status = in.check_rows("q", q, false)) return status;
  if (const int status = in.check_rows("weights", weights, false)) return status;
  if (const int status = in.check_width("q", *q, weights->width * cache.key_dim)) return status;
  return in.program().check_blocks(0, cache.num_blocks, cache.block_size, 0);
}

int run_select_keys(const Instruction& in) {
  static OperatorClock clock("SelectKeys");
  const Timed timed(clock);
  KvCache cache;
  if (const int status = in.read_layer(in.integer(0), cache)) return status;
  const Rows selected = in.rows(in.output(0)), q = in.rows(in.input(0)), weights = in.rows(in.input(1));
  const Requests& requests = in.program().requests();
  const std::vector<RowOwner> owners = row_owners(requests);
  const size_t top_k = selected.width, bytes = in.program().element_bytes();
  auto* chosen = reinterpret_cast<int32_t*>(selected.data);
  for (size_t first = 0, end = 0; first < owners.size(); first = end) {
    // As many rows as scores fit. Rows that read all keys need none.
    const bool scored = owners[first].position >= top_k;
    size_t longest = 0;
    for (end = first; end < owners.size(); end++) {
      if ((owners[end].position >= top_k) != scored) break;
      const size_t padded = owners[end].position / kChunkTokens * kChunkTokens + kChunkTokens;
      if (end > first && std::max(longest, padded) * (end + 1 - first) * sizeof(float) > kScoreBytes) break;
      longest = std::max(longest, padded);
    }
    float* scores = nullptr;
    if (scored) {
      scores = static_cast<float*>(scratch(Scratch::kScores, (end - first) * longest * sizeof(float)));
      kernels().key_scores({q.data + first * q.stride * bytes, weights.data + first * weights.stride * bytes,
                            cache.keys, requests.block_tables.data(), owners.data() + first, scores,
                            in.program().dtype(), end - first, weights.width, cache.key_dim, q.stride, weights.stride,
                            longest, requests.table_width, cache.block_size});
    }
    auto select = [&](size_t i) {
      select_largest(scored ? scores + i * longest : nullptr, owners[first + i].position + 1,
                     chosen + (first + i) * selected.stride, top_k);
    };
    parallel_for(end - first, select);
  }
  return 0;
}

}  // namespace

const Operation kSelectKeys = {{"select_keys", 1, 2, 0, 2}, check_select_keys, run_select_keys};

}  // namespace llm
