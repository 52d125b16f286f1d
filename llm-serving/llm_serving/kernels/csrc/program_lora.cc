// The operation that adds the low-rank changes of adapters: lora.
#include <algorithm>
#include <cstring>
#include <vector>

#include "program.h"
#include "thread_pool.h"

namespace llm {
namespace {

// lora: y | base x | a b ranks |. y = base + B (A x) with the matrices in the slot of the row's adapter; y = base for a
// row without adapter. The sum is rounded once. a [slots, R / 16, k, 16], b [slots, R, n, padded to a multiple of 16],
// both of the model's type; ranks float32 [slots]: rows of b in use.

int check_lora(const Instruction& in) {
  const Operand *y = in.output(0), *base = in.input(0), *x = in.input(1);
  if (y == nullptr) return in.fail("y is absent");
  if (const int status = in.check_rows("y", y, y->selected)) return status;
  if (const int status = in.check_rows("base", base, y->selected)) return status;
  if (const int status = in.check_rows("x", x, y->selected)) return status;
  if (const int status = in.check_width("base", *base, y->width)) return status;
  if (in.program().adapter_slots() == nullptr) return in.fail("the step has no slots of adapters");
  for (int i = 0; i < 3; i++) {
    if (!in.has_weight(i)) return in.fail("weight %d is absent", i);
  }
  const Call& call = in.call();
  const int a = in.parameter(0), b = in.parameter(1), ranks = in.parameter(2);
  const DType dtype = in.program().dtype();
  if (call.rank(a) != 4 || call.rank(b) != 3 || call.dtype(a) != dtype || call.dtype(b) != dtype) {
    return in.fail("a and b must be of the model's type, of four and three dimensions");
  }
  const size_t slots = in.program().num_adapter_slots();
  if (call.dtype(ranks) != DType::kFloat32 || call.elements(ranks) != slots || call.dim(a, 0) != slots ||
      call.dim(b, 0) != slots) {
    return in.fail("a, b and ranks must have %zu slots", slots);
  }
  const size_t n = (y->width + kPanelWidth - 1) / kPanelWidth * kPanelWidth;
  if (call.dim(a, 2) != x->width || call.dim(a, 3) != kPanelWidth || call.dim(b, 2) != n ||
      call.dim(b, 1) != call.dim(a, 1) * kPanelWidth) {
    return in.fail("a must be [slots, R / 16, %zu, 16], b [slots, R, %zu]", x->width, n);
  }
  const float* used = call.data<const float>(ranks);
  for (size_t i = 0; i < slots; i++) {
    if (!(used[i] >= 0.0f && used[i] <= static_cast<float>(call.dim(b, 1)))) return in.fail("rank %zu is too large", i);
  }
  return 0;
}

int run_lora(const Instruction& in) {
  static OperatorClock clock("Lora");
  const Timed timed(clock);
  const Rows y = in.rows(in.output(0)), base = in.rows(in.input(0)), x = in.rows(in.input(1));
  const Program& program = in.program();
  const size_t bytes = program.element_bytes();
  const float* ranks = in.call().data<const float>(in.parameter(2));
  // The rows of each adapter follow one another, in their own order.
  std::vector<uint32_t> rows;
  std::vector<int32_t> slots;
  for (size_t row = 0; row < y.count; row++) {
    const int32_t slot = program.adapter_slot(row, in.output(0)->selected);
    const char* from = base.data + row * base.stride * bytes;
    char* to = y.data + row * y.stride * bytes;
    if (slot >= 0 && ranks[slot] > 0.0f) {
      rows.push_back(static_cast<uint32_t>(row));
      slots.push_back(slot);
    } else if (from != to) {
      std::memcpy(to, from, y.width * bytes);
    }
  }
  if (rows.empty()) return 0;
  std::vector<uint32_t> order(rows.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<uint32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t i, uint32_t j) { return slots[i] < slots[j]; });
  std::vector<uint32_t> sorted(rows.size());
  std::vector<LoraItem> items;
  for (size_t i = 0; i < order.size(); i++) {
    sorted[i] = rows[order[i]];
    const int32_t slot = slots[order[i]];
    if (items.empty() || items.back().slot != slot || items.back().count == kLoraRows) items.push_back({slot, i, 0});
    items.back().count++;
  }
  const size_t max_rank = in.call().dim(in.parameter(1), 1);
  auto* shrunk = static_cast<float*>(scratch(Scratch::kItems, y.count * max_rank * sizeof(float)));
  kernels().lora({base.data, x.data, y.data, in.weight_data(0), in.weight_data(1), ranks, shrunk, sorted.data(),
                  items.data(), items.size(), program.dtype(), y.width, x.width, max_rank,
                  in.call().dim(in.parameter(1), 2), base.stride, x.stride, y.stride});
  return 0;
}

}  // namespace

const Operation kLora = {{"lora", 1, 2, 3, 0}, check_lora, run_lora};

}  // namespace llm
