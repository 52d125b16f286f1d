#include "program.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <new>

#include "kv_layout.h"
#include "thread_pool.h"

namespace llm {
namespace {

constexpr int32_t kVersion = 12;
constexpr size_t kHeaderLength = 8;
constexpr size_t kOperandLength = 6;

}  // namespace

int Program::read() {
  if (const int status = read_header()) return status;
  if (const int status = read_operands()) return status;
  if (const int status = read_step()) return status;
  if (const int status = read_states()) return status;
  if (const int status = read_adapter_slots()) return status;
  read_weights();
  return 0;
}

int Program::read_header() {
  if (call_.count() <= kWeights + 1)
    return call_.fail("expects more than %d parameters, got %d", kWeights + 1, call_.count());
  if (call_.dtype(kInstructions) != DType::kInt32 || call_.rank(kInstructions) != 2 ||
      call_.dim(kInstructions, 0) < 1 || call_.dim(kInstructions, 1) < kHeaderLength) {
    return call_.fail("instructions must be int32 [1 + n, L], L at least %zu", kHeaderLength);
  }
  const int32_t* header = call_.data<const int32_t>(kInstructions);
  if (header[0] != kVersion) return call_.fail("the version must be %d, is %d", kVersion, header[0]);
  if (header[4] < 0 || static_cast<size_t>(header[4]) != length()) {
    return call_.fail("instructions have %zu numbers, the header says %d", length(), header[4]);
  }
  if (header[1] < 1 || header[2] < 0 || header[3] < 0 || header[6] < 0 || header[7] < 0) {
    return call_.fail("the header says %d weights, %d layers, %d bytes a row and %d states", header[1], header[2],
                      header[3], header[6]);
  }
  const int64_t states = header[6] > 0 ? int64_t{header[6]} + 2 : 0;
  if (call_.count() != kWeights + int64_t{header[1]} + 2 * int64_t{header[2]} + states + (header[7] > 0) + 1) {
    return call_.fail(
        "expects %d parameters, %d weights, keys and values of %d layers, %d states with their slots and a result, "
        "got %d",
        kWeights, header[1], header[2], header[6], call_.count());
  }
  num_weights_ = static_cast<size_t>(header[1]);
  num_layers_ = static_cast<size_t>(header[2]);
  num_states_ = static_cast<size_t>(header[6]);
  num_adapter_slots_ = static_cast<size_t>(header[7]);
  memory_ = static_cast<size_t>(header[3]);
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  if (header[5] < 0 || header[5] > 2) return call_.fail("the model's type must be 0, 1 or 2, is %d", header[5]);
  dtype_ = kTypes[header[5]];
  const DType head = call_.dtype(kWeights);
  if ((head != dtype_ && head != DType::kInt8) || call_.rank(kWeights) != 2) {
    return call_.fail("weight 0 must be [V, H] of the model's type or int8");
  }
  return 0;
}

int Program::read_operands() {
  if (call_.dtype(kOperands) != DType::kInt32 || call_.rank(kOperands) != 2 ||
      call_.dim(kOperands, 1) != kOperandLength) {
    return call_.fail("operands must be int32 [m, %zu]", kOperandLength);
  }
  constexpr DType kNone = DType::kNone;
  const DType kinds[] = {dtype_, DType::kFloat32, DType::kInt32};
  operands_.reserve(call_.dim(kOperands, 0));
  for (size_t i = 0; i < call_.dim(kOperands, 0); i++) {
    const int32_t* row = call_.data<const int32_t>(kOperands) + i * kOperandLength;
    const int64_t place = row[0], columns = row[1], start = row[2], width = row[3];
    const DType dtype = row[5] < 0 || row[5] > 2 ? kNone : kinds[row[5]];
    if (dtype == kNone || row[4] < 0 || row[4] > 1) {
      return call_.fail("operand %zu: selected must be 0 or 1, is %d, and its kind 0, 1 or 2, is %d", i, row[4],
                        row[5]);
    }
    if (start < 0 || width < 1 || start + width > columns) {
      return call_.fail("operand %zu: columns %lld to %lld are not of a buffer of %lld", i,
                        static_cast<long long>(start), static_cast<long long>(start + width),
                        static_cast<long long>(columns));
    }
    const int64_t end = place + columns * static_cast<int64_t>(element_size(dtype, nullptr));
    if (place < 0 || place % 4 != 0 || end > static_cast<int64_t>(memory_)) {
      return call_.fail("operand %zu: bytes %lld to %lld are not whole words of the %zu of a row", i,
                        static_cast<long long>(place), static_cast<long long>(end), memory_);
    }
    auto size = [](int64_t number) { return static_cast<size_t>(number); };
    operands_.push_back({size(place), size(columns), size(start), size(width), row[4] == 1, dtype});
  }
  return 0;
}

int Program::read_step() {
  tokens_ = call_.elements(kTokenIds);
  if (!call_.is_integer(kTokenIds)) return call_.fail("token_ids [T] must be int32 or int64");
  const size_t groups = tokens_ == 0 ? 1 : call_.elements(kSlotMapping) / tokens_;
  auto read = [&](int parameter, const char* name, size_t count, std::vector<int64_t>& values, int64_t least,
                  int64_t& last) {
    if (!call_.is_integer(parameter) || call_.elements(parameter) != count) {
      return call_.fail("%s must be int32 or int64, one for each of %zu rows", name, tokens_);
    }
    values.resize(count);
    for (size_t i = 0; i < count; i++) {
      values[i] = call_.integer(parameter, i);
      if (values[i] < least) {
        return call_.fail("%s[%zu] = %lld is less than %lld", name, i, static_cast<long long>(values[i]),
                          static_cast<long long>(least));
      }
      last = std::max(last, values[i]);
    }
    return 0;
  };
  int64_t last_slot = -1;
  if (const int status = read(kPositions, "positions", tokens_, positions_, 0, last_position_)) return status;
  if (const int status = read(kSlotMapping, "slot_mapping", groups * tokens_, slots_, -1, last_slot)) return status;
  if (!call_.is_integer(kSampleIndices)) return call_.fail("sample_indices [S] must be int32 or int64");
  if (const int status = call_.check_within(kSampleIndices, "sample_indices", 0, tokens_, "rows")) return status;
  if (const int status = read_requests(call_, kBlockTables, kQueryLens, kContextLens, tokens_, groups, requests_))
    return status;
  const int result = call_.count() - 1;
  if (call_.dtype(result) != DType::kFloat32 || call_.rank(result) != 2 || call_.dim(result, 0) != samples()) {
    return call_.fail("the result must be float32, a row for each of %zu that give one", samples());
  }
  return 0;
}

int Program::read_states() {
  if (num_states_ == 0) return 0;
  const size_t batch = requests().query_lens.size();
  for (size_t i = 0; i < num_states_; i++) {
    const int state = state_parameter(i);
    if (call_.dtype(state) != DType::kFloat32 || call_.rank(state) < 2 ||
        call_.dim(state, 0) != call_.dim(state_parameter(0), 0)) {
      return call_.fail("state %zu must be float32 [slots, ..], with as many slots as the others", i);
    }
  }
  const int in = state_parameter(num_states_), out = in + 1;
  const size_t slots = call_.dim(state_parameter(0), 0);
  if (!call_.is_integer(in) || call_.elements(in) != batch) {
    return call_.fail("state_in must be int32 or int64, one for each of %zu requests", batch);
  }
  if (!call_.is_integer(out) || call_.elements(out) != tokens_) {
    return call_.fail("state_out must be int32 or int64, one for each of %zu rows", tokens_);
  }
  if (const int status = call_.check_within(in, "state_in", -1, slots, "slots of the states")) return status;
  if (const int status = call_.check_within(out, "state_out", -1, slots, "slots of the states")) return status;
  // Threads process requests concurrently, so no request may use a slot that another one stores to.
  constexpr size_t kNone = SIZE_MAX;
  std::vector<size_t> owner(slots, kNone);
  size_t row = 0;
  for (size_t request = 0; request < batch; request++) {
    first_rows_.push_back(static_cast<int64_t>(row));
    state_in_.push_back(call_.integer(in, request));
    for (const size_t end = row + static_cast<size_t>(requests().query_lens[request]); row < end; row++) {
      const int64_t slot = call_.integer(out, row);
      state_out_.push_back(slot);
      if (slot < 0) continue;
      size_t& owned = owner[static_cast<size_t>(slot)];
      if (owned != kNone && owned != request) {
        return call_.fail("state_out[%zu] = %lld: request %zu stores to this slot too", row,
                          static_cast<long long>(slot), owned);
      }
      owned = request;
    }
  }
  for (size_t request = 0; request < batch; request++) {
    const int64_t slot = state_in_[request];
    const size_t owned = slot < 0 ? kNone : owner[static_cast<size_t>(slot)];
    if (owned != kNone && owned != request) {
      return call_.fail("state_in[%zu] = %lld: request %zu stores to this slot", request, static_cast<long long>(slot),
                        owned);
    }
  }
  return 0;
}

int Program::read_adapter_slots() {
  if (num_adapter_slots_ == 0) return 0;
  const int slots = result() - 1;
  if (call_.dtype(slots) != DType::kInt32 || call_.elements(slots) != tokens_) {
    return call_.fail("adapter_slots must be int32, one for each of %zu rows", tokens_);
  }
  if (const int status = call_.check_within(slots, "adapter_slots", -1, num_adapter_slots_, "slots of adapters")) {
    return status;
  }
  const auto* given = call_.data<const int32_t>(slots);
  auto& [of_step, of_samples] = adapter_rows_;
  of_step.slots.assign(given, given + tokens_);
  for (size_t i = 0; i < samples(); i++) {
    of_samples.slots.push_back(given[static_cast<size_t>(call_.integer(kSampleIndices, i))]);
  }
  of_step.sort();
  of_samples.sort();
  return 0;
}

void Program::RowsByAdapter::sort() {
  for (size_t row = 0; row < slots.size(); row++) {
    if (slots[row] >= 0) order.push_back(static_cast<uint32_t>(row));
  }
  std::stable_sort(order.begin(), order.end(), [this](uint32_t i, uint32_t j) { return slots[i] < slots[j]; });
  for (uint32_t i = 0; i < order.size(); i++) {
    const int32_t slot = slots[order[i]];
    if (spans.empty() || spans.back().slot != slot || spans.back().count == kAdapterRows) spans.push_back({slot, i, 0});
    spans.back().count++;
  }
}

Sequences Program::sequences() const {
  return {first_rows_.size(), first_rows_.data(), requests().query_lens.data(), state_in_.data(), state_out_.data()};
}

void Program::read_weights() {
  weights_.resize(num_weights_);
  for (size_t i = 0; i < num_weights_; i++) {
    const int parameter = kWeights + static_cast<int>(i);
    const DType dtype = call_.dtype(parameter);
    if (call_.rank(parameter) != 2 || (dtype != dtype_ && dtype != DType::kInt8)) continue;
    const Weight weight(call_, parameter);
    if (weight.is_packed() && weight.dtype() == dtype_) weights_[i].emplace(weight);
  }
}

int Program::begin() {
  row_capacity_ = TiledLayout::padded(std::max(tokens_, samples()), kTileHeight);
  try {
    data_ = static_cast<char*>(scratch(Scratch::kLayer, row_capacity_ * memory_ + 1));
  } catch (const std::bad_alloc&) {
    return call_.fail("there is no memory for %zu rows of %zu bytes", row_capacity_, memory_);
  }
  return 0;
}

Rows Program::rows(const Operand& operand) const {
  char* buffer = data_ + operand.place * row_capacity_;
  return {buffer + operand.start * element_size(operand.dtype, nullptr), operand.columns, count(operand.selected),
          operand.width};
}

bool Program::has_room(const Operand& operand) const {
  const size_t bytes = TiledLayout::padded(operand.width, kMaxPassWidth) * element_size(operand.dtype, nullptr);
  return operand.start == 0 && operand.place + bytes <= memory_;
}

int Program::check_positions(size_t rows_of_tables) const {
  if (last_position_ < static_cast<int64_t>(rows_of_tables)) return 0;
  return call_.check_within(kPositions, "positions", 0, rows_of_tables, "rows of cos and sin");
}

int Program::check_slots(size_t group, size_t slots) const {
  const int64_t* first = this->slots(group);
  const int64_t count = static_cast<int64_t>(slots);
  if (std::all_of(first, first + tokens_, [count](int64_t slot) { return slot < count; })) return 0;
  return call_.check_within(kSlotMapping, "slot_mapping", -1, slots, "slots of the cache");
}

int Program::check_blocks(size_t group, size_t num_blocks, size_t block_size, size_t window) {
  for (const CheckedBlocks& checked : checked_blocks_) {
    if (checked.group == group && checked.num_blocks == num_blocks && checked.block_size == block_size &&
        checked.window == window) {
      return 0;
    }
  }
  checked_blocks_.push_back({group, num_blocks, block_size, window});
  return llm::check_blocks(call_, requests_[group], num_blocks, block_size, window);
}

int Instruction::check() const {
  const int operands = signature_.outputs + signature_.inputs;
  for (int i = 0; i < operands; i++) {
    if (numbers_[i] < -1 || numbers_[i] >= static_cast<int64_t>(program_.operands().size())) {
      return fail("there is no operand %d", numbers_[i]);
    }
  }
  for (int i = 0; i < signature_.weights; i++) {
    if (weight_number(i) < -1 || weight_number(i) >= static_cast<int64_t>(program_.num_weights())) {
      return fail("there is no weight %d", weight_number(i));
    }
  }
  return 0;
}

int Instruction::read_layer(int32_t layer, KvCache& cache) const {
  if (layer < 0 || static_cast<size_t>(layer) >= program_.num_layers()) return fail("there is no layer %d", layer);
  const int keys = kWeights + static_cast<int>(program_.num_weights()) + 2 * layer;
  return read_cache(call(), keys, keys + 1, program_.dtype(), cache) && cache.heads > 0 && cache.key_dim > 0
             ? 0
             : fail("%s; or int8 [.., head_dim + %zu] of codes and scales", kCacheRule, kScaleBytes);
}

float Instruction::number(int i) const {
  const int32_t bits = integer(i);
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

int Instruction::fail(const char* format, ...) const {
  char reason[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason, sizeof(reason), format, arguments);
  va_end(arguments);
  return call().fail("instruction %zu (%s): %s", index_, signature_.name, reason);
}

int Instruction::check_rows(const char* name, const Operand* operand, DType dtype, bool selected) const {
  if (operand == nullptr) return fail("%s is absent", name);
  if (operand->dtype != dtype) return fail("%s is of another type", name);
  if (operand->selected != selected)
    return fail("%s has the rows %s", name, selected ? "of all tokens" : "that sample");
  return 0;
}

int Instruction::check_width(const char* name, const Operand& operand, size_t width) const {
  return operand.width == width ? 0 : fail("%s must have %zu columns, has %zu", name, width, operand.width);
}

int Instruction::check_product(const char* name, int i, size_t n, size_t k) const {
  if (!has_weight(i)) return fail("%s is absent", name);
  const Weight* found = program_.weight(static_cast<size_t>(weight_number(i)));
  if (found == nullptr || found->rows() != n || found->columns() != k) {
    return fail("%s, weight %d, must be packed, [%zu, %zu], of the model's type", name, weight_number(i), n, k);
  }
  return can_multiply(found->qvalues()) ? 0 : fail("%s, weight %d: %s", name, weight_number(i), kOtherKernels);
}

int Instruction::check_vector(const char* name, int i, size_t size, bool wide) const {
  if (!has_weight(i)) return 0;
  const DType dtype = call().dtype(parameter(i));
  if ((dtype != program_.dtype() && !(wide && dtype == DType::kFloat32)) || call().elements(parameter(i)) != size) {
    return fail("%s, weight %d, must have %zu elements of the model's type%s", name, weight_number(i), size,
                wide ? " or float32" : "");
  }
  return 0;
}

int Instruction::check_consumer(int i, const Operand& y) const {
  const int32_t number = integer(i);
  if (number == -1) return 0;
  if (number < 0 || static_cast<size_t>(number) >= program_.num_weights()) return fail("there is no weight %d", number);
  const Weight* found = program_.weight(static_cast<size_t>(number));
  if (found == nullptr || found->columns() != y.width) {
    return fail("the consumer, weight %d, must be packed, of %zu columns", number, y.width);
  }
  if (!program_.has_room(y)) return fail("y has no room for the order in which it is read");
  return 0;
}

}  // namespace llm
