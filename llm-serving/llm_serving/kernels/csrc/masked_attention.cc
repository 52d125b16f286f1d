#include "masked_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kv_layout.h"
#include "thread_pool.h"

#define LLM_ISA masked
#include "simd.h"

namespace llm {
namespace {

using namespace masked;

// A key whose score is reduced this much has no weight beside an unreduced one: 10,000 in bfloat16.
constexpr float kHidden = -9984.0f;

// A query row: its request, and the index of its own key.
struct QueryRow {
  size_t request, row, position, context;
};

std::vector<QueryRow> query_rows(const AttentionArgs& args) {
  std::vector<QueryRow> rows;
  rows.reserve(args.rows);
  for (size_t request = 0; request < args.batch; request++) {
    const auto queries = static_cast<size_t>(args.query_lens[request]);
    const auto context = static_cast<size_t>(args.context_lens[request]);
    for (size_t i = 0; i < queries; i++) rows.push_back({request, rows.size(), context - queries + i, context});
  }
  return rows;
}

// Reads the mask values for the first `context` keys of a row.
void read_mask(const AttentionMask& mask, const QueryRow& row, float* residual) {
  if (mask.values == nullptr) {
    std::fill_n(residual, row.context, 0.0f);
    return;
  }
  const size_t square = row.position / mask.width * mask.width;
  const size_t first = mask.is_tile ? square : 0;
  const size_t end = mask.is_tile ? std::min(square + mask.width, row.context) : row.context;
  std::fill_n(residual, first, 0.0f);
  std::fill(residual + end, residual + row.context, -std::numeric_limits<float>::infinity());
  const size_t at = (mask.is_tile ? row.position - square : row.row) * mask.width;
  with_element(mask.dtype, [&](auto tag) {
    const auto* values = static_cast<const typename decltype(tag)::Element*>(mask.values) + at;
    for (size_t i = 0; first + i < end; i += kLanes) {
      const size_t count = std::min(kLanes, end - first - i);
      store_first(residual + first + i, load_first(values + i, count) * broadcast(mask.factor), count);
    }
  });
}

bool is_causal_row(const AttentionMask& mask, const QueryRow& row, std::vector<float>& residual) {
  if (mask.values == nullptr) return row.position + 1 == row.context;
  residual.resize(row.context);
  read_mask(mask, row, residual.data());
  // Counted without an early exit, so that the loops are vectorised.
  size_t others = 0;
  for (size_t i = 0; i <= row.position; i++) others += residual[i] != 0.0f;
  for (size_t i = row.position + 1; i < row.context; i++) others += !(residual[i] <= kHidden);
  return others == 0;
}

// Computes the attention of one row in all heads that share a KV head.
template <class Element>
class MaskedRow {
 public:
  MaskedRow(const AttentionArgs& args, const QueryRow& row, size_t head, const float* residual)
      : args_(args),
        row_(row),
        head_(head),
        residual_(residual),
        shared_(args.num_heads / args.num_kv_heads),
        dim_(args.head_dim),
        key_dim_(args.key_dim > 0 ? args.key_dim : dim_),
        group_(kGroupTokens * key_dim_),
        queries_(shared_ * key_dim_),
        weights_(shared_ * row.context),
        sums_(shared_ * dim_) {}

  void run() {
    const size_t stride = args_.q_stride > 0 ? args_.q_stride : args_.num_heads * key_dim_;
    widen(static_cast<const Element*>(args_.q) + row_.row * stride + head_ * shared_ * key_dim_, queries_.data(),
          queries_.size());
    for_keys(args_.key_cache, key_dim_, [&](size_t key, size_t lane) {
      for (size_t head = 0; head < shared_; head++) {
        const float* query = queries_.data() + head * key_dim_;
        float score = 0.0f;
        for (size_t i = 0; i < key_dim_; i++) score += query[i] * group_[key_offset(lane, i, kPairs)];
        weights_[head * row_.context + key] = score * args_.scale + residual_[key];
      }
    });
    for (size_t head = 0; head < shared_; head++) online_softmax(weights_.data() + head * row_.context);
    const bool is_latent = args_.key_dim > 0;
    for_keys(is_latent ? args_.key_cache : args_.value_cache, key_dim_, [&](size_t key, size_t lane) {
      for (size_t head = 0; head < shared_; head++) {
        const float weight = weights_[head * row_.context + key];
        if (weight == 0.0f) continue;  // a hidden value may be NaN
        for (size_t i = 0; i < dim_; i++) {
          const size_t at = is_latent ? key_offset(lane, i, kPairs) : value_offset(lane, i, kPairs);
          sums_[head * dim_ + i] += weight * group_[at];
        }
      }
    });
    Element* y = static_cast<Element*>(args_.y) + (row_.row * args_.num_heads + head_ * shared_) * dim_;
    for (size_t i = 0; i < sums_.size(); i += kLanes) store(y + i, load(sums_.data() + i));
  }

 private:
  static constexpr bool kPairs = sizeof(Element) == 2 && !std::is_same_v<Element, Float16>;

  static void widen(const Element* source, float* target, size_t count) {
    for (size_t i = 0; i < count; i += kLanes) store(target + i, load(source + i));
  }

  // Calls body(key, its index in the group) with each group of a cache of heads of `dim` elements in `group_`, if any
  // of it is visible.
  template <class Body>
  void for_keys(const void* cache, size_t dim, Body body) {
    const int64_t* table = args_.block_tables + row_.request * args_.table_width;
    for (size_t first = 0; first < row_.context; first += kGroupTokens) {
      const auto block = static_cast<size_t>(table[first / args_.block_size]);
      const size_t group = first % args_.block_size / kGroupTokens;
      const size_t at = group_offset(block, group, head_, args_.block_size, args_.num_kv_heads, dim);
      widen(static_cast<const Element*>(cache) + at, group_.data(), group_.size());
      const size_t count = std::min(kGroupTokens, row_.context - first);
      for (size_t lane = 0; lane < count; lane++) body(first + lane, lane);
    }
  }

  // Turns scores into weights that sum to one, or to zeros if all keys are hidden.
  void online_softmax(float* scores) const {
    const float largest = *std::max_element(scores, scores + row_.context);
    const float reference = largest == -std::numeric_limits<float>::infinity() ? 0.0f : largest;
    float total = 0.0f;
    for (size_t i = 0; i < row_.context; i++) {
      scores[i] = std::exp(scores[i] - reference);
      total += scores[i];
    }
    if (total == 0.0f) return;
    for (size_t i = 0; i < row_.context; i++) scores[i] /= total;
  }

  const AttentionArgs& args_;
  const QueryRow& row_;
  const size_t head_;
  const float* residual_;  // [context]
  const size_t shared_, dim_;
  const size_t key_dim_;        // elements of a key; the first dim_ are its value if args.key_dim is set
  std::vector<float> group_;    // keys or values, in the layout of the cache
  std::vector<float> queries_;  // [shared, key_dim]
  std::vector<float> weights_;  // [shared, context], scores first
  std::vector<float> sums_;     // [shared, dim]
};

// Returns the rows whose mask is not causal.
std::vector<QueryRow> other_rows(const AttentionMask& mask, const AttentionArgs& args) {
  const std::vector<QueryRow> rows = query_rows(args);
  std::vector<char> is_other(rows.size());
  auto body = [&](size_t i) {
    thread_local std::vector<float> residual;
    is_other[i] = !is_causal_row(mask, rows[i], residual);
  };
  parallel_for(rows.size(), body);
  std::vector<QueryRow> others;
  for (size_t i = 0; i < rows.size(); i++) {
    if (is_other[i]) others.push_back(rows[i]);
  }
  return others;
}

void attend_by_rows(const AttentionMask& mask, const AttentionArgs& args, const std::vector<QueryRow>& rows) {
  auto body = [&](size_t i) {
    std::vector<float> residual(rows[i].context);
    read_mask(mask, rows[i], residual.data());
    with_element(args.dtype, [&](auto tag) {
      for (size_t head = 0; head < args.num_kv_heads; head++) {
        MaskedRow<typename decltype(tag)::Element>(args, rows[i], head, residual.data()).run();
      }
    });
  };
  parallel_for(rows.size(), body);
}

}  // namespace

void attend_under(const AttentionMask& mask, const AttendArgs& args) {
  const AttentionArgs attention = plain_attention(args, args.q);
  const std::vector<QueryRow> others = other_rows(mask, attention);
  if (others.size() < attention.rows) attend(args);  // also of the other rows, whose results are replaced
  attend_by_rows(mask, attention, others);
}

}  // namespace llm
