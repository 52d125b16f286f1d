#include "selected_attention.h"

#include <algorithm>

#include "kv_layout.h"
#include "thread_pool.h"

namespace llm {
namespace {

// Rows whose keys are copied at once.
constexpr size_t kRowsForEachThread = 4;
// Keys that a thread copies at once.
constexpr size_t kKeysAtOnce = 256;

// The caches of some rows: keys and values [rows, 1, length], with the keys of each row in one block.
struct CopiedKeys {
  char *keys, *values;
  size_t length;
};

// The keys of one row: its block table, the selected positions, and the last position that it may read.
struct RowKeys {
  const int64_t* table;
  const int32_t* positions;
  int32_t last;
};

// Copies one key of `dim` elements, token `from_lane` of a group, to token `to_lane` of group `to`. A group has
// `kInputs` adjacent elements of each token (kv_layout.h).
template <class Element, size_t kInputs>
void copy_key(const Element* from, size_t from_lane, Element* to, size_t to_lane, size_t dim) {
  for (size_t i = 0; i < dim; i += kInputs) {
    __builtin_memcpy(to + i * kGroupTokens + to_lane * kInputs, from + i * kGroupTokens + from_lane * kInputs,
                     kInputs * sizeof(Element));
  }
}

template <class Element, size_t kInputs>
void copy_value(const Element* from, size_t from_lane, Element* to, size_t to_lane, size_t dim) {
  for (size_t i = 0; i < dim; i++) {
    to[value_offset(to_lane, i, kInputs == 2)] = from[value_offset(from_lane, i, kInputs == 2)];
  }
}

// Copies the selected keys of one row from `first` to before `last`.
template <class Element, size_t kInputs>
void copy_selected(const KvCache& cache, const RowKeys& of_row, size_t first, size_t last, size_t row,
                   const CopiedKeys& copied) {
  auto groups = [](char* data, size_t offset) { return reinterpret_cast<Element*>(data) + offset; };
  for (size_t i = first; i < last; i++) {
    const auto position = static_cast<size_t>(std::clamp(of_row.positions[i], 0, of_row.last));
    const size_t in_block = position % cache.block_size;
    const auto block = static_cast<size_t>(of_row.table[position / cache.block_size]);
    auto source = [&](size_t dim) { return group_offset(block, in_block / kGroupTokens, 0, cache.block_size, 1, dim); };
    auto target = [&](size_t dim) { return group_offset(row, i / kGroupTokens, 0, copied.length, 1, dim); };
    copy_key<Element, kInputs>(groups(cache.keys, source(cache.key_dim)), in_block % kGroupTokens,
                               groups(copied.keys, target(cache.key_dim)), i % kGroupTokens, cache.key_dim);
    copy_value<Element, kInputs>(groups(cache.values, source(cache.value_dim)), in_block % kGroupTokens,
                                 groups(copied.values, target(cache.value_dim)), i % kGroupTokens, cache.value_dim);
  }
}

void copy_selected(const KvCache& cache, const RowKeys& of_row, size_t first, size_t last, size_t row,
                   const CopiedKeys& copied) {
  if (cache.dtype == DType::kFloat32) {
    copy_selected<uint32_t, 1>(cache, of_row, first, last, row, copied);
  } else if (cache.dtype == DType::kBFloat16) {
    copy_selected<uint16_t, 2>(cache, of_row, first, last, row, copied);
  } else {
    copy_selected<uint16_t, 1>(cache, of_row, first, last, row, copied);
  }
}

class SelectedAttention {
 public:
  SelectedAttention(const AttendArgs& args, const SelectedKeys& selected)
      : args_(args), selected_(selected), owners_(row_owners(*args.requests)) {}

  void run() {
    for (size_t row = 0; row < owners_.size();) {
      const bool all = reads_all(row);
      size_t end = row + 1;
      while (end < owners_.size() && reads_all(end) == all) end++;
      if (all) {
        attend_to_all(row, end);
      } else {
        const size_t most = kRowsForEachThread * num_threads();
        for (size_t first = row; first < end; first += most) attend_to_copies(first, std::min(first + most, end));
      }
      row = end;
    }
  }

 private:
  bool reads_all(size_t row) const { return owners_[row].position < selected_.top_k; }

  void attend_to_all(size_t first, size_t end) const {
    Requests requests;
    requests.table_width = args_.requests->table_width;
    for (size_t row = first; row < end;) {
      const size_t request = owners_[row].request;
      size_t next = row + 1;
      while (next < end && owners_[next].request == request) next++;
      add(requests, table_of(request), next - row, owners_[next - 1].position + 1);
      row = next;
    }
    attend_rows(first, end, args_.cache, requests);
  }

  void attend_to_copies(size_t first, size_t end) const {
    const KvCache& cache = args_.cache;
    const size_t bytes = element_size(cache.dtype, nullptr), count = end - first;
    const size_t length = (selected_.top_k + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
    const size_t of_keys = count * length * cache.key_dim * bytes;
    auto* memory = static_cast<char*>(scratch(Scratch::kPanel, of_keys + count * length * cache.value_dim * bytes));
    const CopiedKeys copied = {memory, memory + of_keys, length};
    const size_t parts = (selected_.top_k + kKeysAtOnce - 1) / kKeysAtOnce;
    auto copy = [&](size_t i) {
      const size_t row = i / parts, begin = i % parts * kKeysAtOnce;
      const RowOwner& owner = owners_[first + row];
      const RowKeys keys = {table_of(owner.request), selected_.positions + (first + row) * selected_.stride,
                            static_cast<int32_t>(owner.position)};
      copy_selected(cache, keys, begin, std::min(begin + kKeysAtOnce, selected_.top_k), row, copied);
    };
    parallel_for(count * parts, copy);
    Requests requests;
    requests.table_width = 1;
    for (size_t row = 0; row < count; row++) {
      const auto block = static_cast<int64_t>(row);
      add(requests, &block, 1, selected_.top_k);
    }
    KvCache of_copies = cache;
    of_copies.keys = copied.keys;
    of_copies.values = copied.values;
    of_copies.num_blocks = count;
    of_copies.block_size = length;
    attend_rows(first, end, of_copies, requests);
  }

  const int64_t* table_of(size_t request) const {
    return args_.requests->block_tables.data() + request * args_.requests->table_width;
  }

  static void add(Requests& requests, const int64_t* table, size_t rows, size_t context) {
    requests.block_tables.insert(requests.block_tables.end(), table, table + requests.table_width);
    requests.query_lens.push_back(static_cast<int64_t>(rows));
    requests.context_lens.push_back(static_cast<int64_t>(context));
  }

  void attend_rows(size_t first, size_t end, const KvCache& cache, const Requests& requests) const {
    const size_t bytes = element_size(cache.dtype, nullptr);
    AttendArgs args = args_;
    args.q += first * args.q_stride * bytes;
    args.q_rope += first * args.rope_stride * bytes;
    args.y = static_cast<char*>(args.y) + first * args.y_layout.width * bytes;
    args.y_layout.rows = end - first;
    args.tokens = end - first;
    args.cache = cache;
    args.requests = &requests;
    attend(args);
  }

  const AttendArgs& args_;
  const SelectedKeys& selected_;
  const std::vector<RowOwner> owners_;
};

}  // namespace

void attend_to_selected(const AttendArgs& args, const SelectedKeys& selected) {
  SelectedAttention(args, selected).run();
}

}  // namespace llm
