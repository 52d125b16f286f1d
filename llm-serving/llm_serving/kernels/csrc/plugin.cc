// Exports for MindSpore and Python: the list of operators, and functions that return a status (kThrown after an
// exception).
#include <cstring>
#include <vector>

#include "call.h"
#include "ending.h"
#include "kernels.h"
#include "packed_weights.h"
#include "parts.h"
#include "rounding.h"
#include "thread_pool.h"

namespace {

const char* kOperators[] = {"MatMul",
                            "Gather",
                            "SplitWithSize",
                            "StridedSlice",
                            "Transpose",
                            "RmsNorm",
                            "AddRmsNorm",
                            "Swiglu",
                            "AddExt",
                            "Add",
                            "Mul",
                            "Greater",
                            "Cast",
                            "SiLU",
                            "Sigmoid",
                            "ApplyRotaryPosEmb",
                            "ReshapeAndCache",
                            "PagedAttention",
                            "FlashAttentionScore",
                            "DynamicQuantExt",
                            "QuantBatchMatmul",
                            "MoeGatingTopKSoftmax",
                            "MoeInitRoutingV2",
                            "GroupedMatmulV4",
                            "InnerMoeTokenUnpermute",
                            "MoveTo",
                            "Reshape"};
constexpr int kNumOperators = static_cast<int>(sizeof(kOperators) / sizeof(kOperators[0]));
const char* kNone[] = {nullptr};

}  // namespace

// Without kernels in use there are no operators: an inherited environment variable may make MindSpore load a library
// that Python has not prepared.
LLM_EXPORT bool IsKernelRegistered(const char* name) {
  if (!llm::has_kernels()) return false;
  for (const char* known : kOperators) {
    if (std::strcmp(known, name) == 0) return true;
  }
  return false;
}

LLM_EXPORT int GetRegisteredOpCount() { return llm::has_kernels() ? kNumOperators : 0; }
LLM_EXPORT const char** GetAllRegisteredOps() { return kOperators; }

// Operators whose output shape depends on values: none.
LLM_EXPORT int GetComputeDependOpCount() { return 0; }
LLM_EXPORT const char** GetAllComputeDependOps() { return kNone; }

// Packs the `n` rows of a weight, of `k` elements each, into `target` and registers `target` as packed. 1: unknown
// type, nothing is packed; 2: packed, but an element is infinite or NaN.
LLM_EXPORT int llm_pack_weight(const void* const* rows, void* target, const char* dtype, int64_t n, int64_t k) {
  const llm::DType type = llm::parse_dtype(dtype);
  if (!llm::is_float(type) || n < 0 || k < 0) return 1;
  return llm::guarded("llm_pack_weight", [&] {
    const bool finite = llm::pack_rows(rows, target, type, static_cast<size_t>(n), static_cast<size_t>(k));
    llm::register_packed(target, type, static_cast<size_t>(n), static_cast<size_t>(k));
    return finite ? 0 : 2;
  });
}

// `weight_only`: for unquantized rows; otherwise for rows of 8 bits.
static llm::WeightFormat format_of(int64_t weight_only, int64_t bits) {
  if (weight_only != 0) return llm::WeightFormat::kWeightOnly;
  return bits == 4 ? llm::WeightFormat::kW4A8 : llm::WeightFormat::kW8A8;
}

// Bytes of packed qvalues [n, k].
LLM_EXPORT int64_t llm_packed_qvalues_bytes(int64_t weight_only, int64_t bits, int64_t n, int64_t k) {
  const size_t bytes =
      llm::panel_bytes(format_of(weight_only, bits), static_cast<size_t>(bits), static_cast<size_t>(k));
  return static_cast<int64_t>(llm::TiledLayout::padded(static_cast<size_t>(n), llm::kPanelWidth) / llm::kPanelWidth *
                              bytes);
}

// Packs qvalues as `QuantizedWeight` describes them into `target`, which MindSpore sees as int8 [n, columns]. Non-zero:
// an unknown type, or a form that no product supports.
LLM_EXPORT int llm_pack_qvalues(int64_t weight_only, int64_t bits, const uint8_t* qvalues, const float* scale,
                                const uint8_t* zero, int64_t group, int64_t rotated, void* target, const char* dtype,
                                int64_t n, int64_t k, int64_t columns) {
  auto size = [](int64_t number) { return static_cast<size_t>(number); };
  const llm::DType type = llm::parse_dtype(dtype);
  if (!llm::is_float(type) || n < 0 || k < 0 || group < 1 || (bits != 4 && bits != 8)) return 1;
  const llm::QuantizedWeight weight = {format_of(weight_only, bits),
                                       type,
                                       size(bits),
                                       qvalues,
                                       scale,
                                       zero,
                                       size(n),
                                       size(k),
                                       size(group),
                                       rotated != 0};
  if (!llm::can_pack(weight)) return 1;
  return llm::guarded("llm_pack_qvalues", [&] {
    llm::pack_qvalues(weight, target);
    llm::register_qvalues(target, weight, size(columns));
    return 0;
  });
}

// Rows of one form, as formats/block_tensor.py describes them; the pointers are those of `BlockRows`.
struct BlockArgs {
  int64_t bits, zero, group, n;
  const uint8_t* qvalues;
  const void* scales;
  const void* minima;
  const uint16_t* units;
  const uint16_t* minima_units;
};

static std::vector<llm::BlockRows> block_rows(const BlockArgs* segments, int64_t count, int64_t k) {
  std::vector<llm::BlockRows> rows;
  for (int64_t i = 0; i < count; i++) {
    const BlockArgs& each = segments[i];
    const llm::BlockForm form = {static_cast<uint8_t>(each.bits), static_cast<uint8_t>(each.zero),
                                 static_cast<uint8_t>(each.group), each.minima != nullptr, each.units != nullptr};
    rows.push_back({form, each.qvalues, each.scales, each.minima, each.units, each.minima_units,
                    static_cast<size_t>(each.n), static_cast<size_t>(k)});
  }
  return rows;
}

// Bytes of the segments as packed; -1 if no product supports them.
LLM_EXPORT int64_t llm_packed_blocks_bytes(const BlockArgs* segments, int64_t count, int64_t k) {
  size_t bytes = 0;
  const std::vector<llm::BlockRows> all = block_rows(segments, count, k);
  for (const llm::BlockRows& rows : all) {
    const bool is_last = &rows == &all.back();
    if (!llm::can_pack(rows) || (!is_last && rows.n % llm::kPanelWidth != 0)) return -1;
    bytes += llm::packed_bytes(rows);
  }
  return static_cast<int64_t>(bytes);
}

// Packs the segments, one after another, into `target`, which MindSpore sees as int8 [n, columns]. `weight_only`: for
// unquantized rows; otherwise for rows of 8 bits. Non-zero: an unknown type.
LLM_EXPORT int llm_pack_blocks(int64_t weight_only, const BlockArgs* segments, int64_t count, int64_t k, void* target,
                               const char* dtype, int64_t columns) {
  const llm::DType type = llm::parse_dtype(dtype);
  if (!llm::is_float(type) || llm_packed_blocks_bytes(segments, count, k) < 0) return 1;
  return llm::guarded("llm_pack_blocks", [&] {
    const std::vector<llm::BlockRows> all = block_rows(segments, count, k);
    auto* to = static_cast<uint8_t*>(target);
    for (const llm::BlockRows& rows : all) {
      llm::pack_blocks(rows, to);
      to += llm::packed_bytes(rows);
    }
    llm::register_blocks(target, type, weight_only != 0, all, static_cast<size_t>(columns));
    return 0;
  });
}

// Rounds [n, k] elements to qvalues [n, k], a byte each, and scales [n, k / group]; with `rotates`, rows are rotated
// first and divided by their block. Non-zero: 1 if an element is not
// finite, or an error if such qvalues are not supported.
LLM_EXPORT int llm_round_to_qvalues(const void* source, const char* dtype, int64_t n, int64_t k, int64_t bits,
                                    int64_t group, int64_t rotates, uint8_t* qvalues, float* scale) {
  auto size = [](int64_t number) { return static_cast<size_t>(number); };
  const llm::DType type = llm::parse_dtype(dtype);
  if (!llm::is_float(type) || n < 0 || k < 0 || group < 1 || k % group != 0 || (bits != 4 && bits != 8)) return 2;
  return llm::guarded("llm_round_to_qvalues", [&] {
    const bool done =
        llm::round_to_qvalues(source, type, size(n), size(k), size(bits), size(group), rotates != 0, qvalues, scale);
    return done ? 0 : 1;
  });
}

// Must be called before the memory of a packed weight is freed.
LLM_EXPORT void llm_release_weight(const void* target) { llm::release_packed(target); }

LLM_EXPORT const char* llm_isa() { return llm::kernels().isa; }
// Computes with these kernels, the result of `llm_kernels` of another library (kernels_isa.cc).
LLM_EXPORT void llm_use_kernels(const void* set) { llm::use_kernels(static_cast<const llm::Kernels*>(set)); }
LLM_EXPORT int64_t llm_num_threads() { return static_cast<int64_t>(llm::num_threads()); }
LLM_EXPORT void llm_set_num_threads(int64_t count) { llm::set_num_threads(static_cast<size_t>(count < 1 ? 1 : count)); }
LLM_EXPORT int64_t llm_num_calls() { return llm::num_calls(); }
LLM_EXPORT int64_t llm_num_weight_bytes() { return llm::num_weight_bytes(); }
// Starts counting calls and nanoseconds of the operators from zero, or stops.
LLM_EXPORT void llm_set_profiling(int on) { llm::set_profiling(on != 0); }
// Name of the i-th operator called so far and its counts; null behind the last.
LLM_EXPORT const char* llm_profile(int64_t i, int64_t* calls, int64_t* nanoseconds) {
  const llm::OperatorClock* clock = llm::operator_clock(static_cast<size_t>(i));
  if (clock == nullptr) return nullptr;
  *calls = clock->calls.load();
  *nanoseconds = clock->nanoseconds.load();
  return clock->name;
}
// Requests one call of `tell` when the layers of the next step are nearly done; null: no call.
LLM_EXPORT void llm_announce_ending(void (*tell)()) { llm::announce_ending(tell); }
LLM_EXPORT const char* llm_last_error() { return llm::last_error(); }
