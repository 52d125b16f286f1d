// A network encoded as integers, and the data of a step that its instructions use.
//
// `instructions` int32 [1 + n, L]: a header, then one operation a row: its number, outputs, inputs, weights and
// attributes in the order that its source file states; -1 is absent, floats are stored as their bits. Outputs and
// inputs are indices of operands, weights indices of the weights of the call. op_program.cc lists the operation
// numbers.
//
// The header: version, number of weights, number of layers, bytes of memory per row, L (length of an
// instruction), model dtype (0 float32, 1 float16, 2 bfloat16), number of states, number of slots of adapters. The
// weight of a matmul may be int8, packed as qvalues.
//
// `operands` int32 [m, 6]: columns of a buffer that has a row for each token of the step or, if it is `selected`, for
// each sampled row.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "call.h"
#include "paged_attention.h"
#include "parts.h"

namespace llm {

// Parameters of the operator. The weights are followed by the keys and values of each layer, by the states and, if
// there are any, state_in [B] and state_out [T], by adapter_slots [T] of a program with adapters, then the result.
enum ProgramParameter {
  kInstructions,
  kOperands,
  kTokenIds,
  kPositions,
  kSlotMapping,
  kBlockTables,
  kQueryLens,
  kContextLens,
  kSampleIndices,
  kWeights
};

struct Operand {
  size_t place;    // bytes for each row before its buffer
  size_t columns;  // elements from a row of the buffer to the next
  size_t start, width;
  bool selected;
  DType dtype;
};

// An operand in a step: `count` rows of `width` elements.
struct Rows {
  char* data;
  size_t stride;  // elements from a row to the next
  size_t count, width;

  // The current layout. A single row has no stride.
  TiledLayout layout() const { return {count, count == 1 ? width : stride}; }
};

class Program {
 public:
  explicit Program(const Call& call) : call_(call) {}

  // Reads header, operands and the arguments of the step; returns a status as operators do.
  int read();
  // Allocates memory for the operands; returns a status as operators do. Called after the instructions have been
  // checked.
  int begin();

  const Call& call() const { return call_; }
  DType dtype() const { return dtype_; }
  size_t element_bytes() const { return element_size(dtype_, nullptr); }
  size_t num_instructions() const { return call_.dim(kInstructions, 0) - 1; }
  size_t length() const { return call_.dim(kInstructions, 1); }
  const int32_t* instruction(size_t i) const { return call_.data<const int32_t>(kInstructions) + (i + 1) * length(); }
  size_t num_weights() const { return num_weights_; }
  size_t num_layers() const { return num_layers_; }
  size_t num_states() const { return num_states_; }
  // Index of a state among the parameters of the call: float32 [slots, ..].
  int state_parameter(size_t i) const { return kWeights + static_cast<int>(num_weights_ + 2 * num_layers_ + i); }
  const std::vector<Operand>& operands() const { return operands_; }
  size_t num_adapter_slots() const { return num_adapter_slots_; }
  // The rows of the step or, if `selected`, the sampled rows that have an adapter.
  AdapterRows adapter_rows(bool selected) const { return adapter_rows_[selected].rows(); }
  int result() const { return call_.count() - 1; }
  size_t result_width() const { return call_.dim(result(), 1); }

  // Null if it is not a packed weight of the model's type.
  const Weight* weight(size_t i) const { return weights_[i].has_value() ? &*weights_[i] : nullptr; }

  size_t tokens() const { return tokens_; }
  size_t samples() const { return call_.elements(kSampleIndices); }
  size_t count(bool selected) const { return selected ? samples() : tokens_; }
  Rows rows(const Operand& operand) const;
  // Whether a buffer has room for `width` columns in the layout of any reader.
  bool has_room(const Operand& operand) const;

  const int64_t* positions() const { return positions_.data(); }
  // Groups of layers with slots and block tables of their own.
  size_t num_groups() const { return requests_.size(); }
  const int64_t* slots(size_t group) const { return slots_.data() + group * tokens_; }
  const Requests& requests(size_t group = 0) const { return requests_[group]; }
  // The sequences of a program with states.
  Sequences sequences() const;
  int check_positions(size_t rows_of_tables) const;
  int check_slots(size_t group, size_t slots) const;
  // Refuses blocks outside of the cache.
  int check_blocks(size_t group, size_t num_blocks, size_t block_size, size_t window);

 private:
  int read_header();
  int read_operands();
  int read_step();
  // Reads which slots the states of the sequences come from and go to.
  int read_states();
  int read_adapter_slots();
  void read_weights();

  struct RowsByAdapter {
    std::vector<int32_t> slots;
    std::vector<uint32_t> order;
    std::vector<AdapterSpan> spans;

    // Fills `order` and `spans`.
    void sort();
    AdapterRows rows() const { return {slots.data(), order.data(), spans.data(), spans.size()}; }
  };

  struct CheckedBlocks {
    size_t group, num_blocks, block_size, window;
  };

  const Call& call_;
  DType dtype_ = DType::kNone;
  size_t num_weights_ = 0, num_layers_ = 0, num_states_ = 0, num_adapter_slots_ = 0;
  size_t memory_ = 0;  // bytes for each row
  std::vector<Operand> operands_;
  std::vector<std::optional<Weight>> weights_;
  size_t tokens_ = 0, row_capacity_ = 0;
  std::vector<int64_t> positions_, slots_;  // slots [groups, T]
  int64_t last_position_ = -1;
  std::vector<Requests> requests_;  // of each group
  std::vector<int64_t> first_rows_, state_in_, state_out_;
  RowsByAdapter adapter_rows_[2];  // of the step, and of the sampled rows
  std::vector<CheckedBlocks> checked_blocks_;
  char* data_ = nullptr;
};

// Numbers of outputs, inputs, weights and attributes of an operation.
struct Signature {
  const char* name;
  int outputs, inputs, weights, attributes;
};

// One instruction: its numbers by kind, each in the order of its signature.
class Instruction {
 public:
  Instruction(Program& program, size_t index, const Signature& signature)
      : program_(program), index_(index), signature_(signature), numbers_(program.instruction(index) + 1) {}

  // Refuses operands and weights that do not exist.
  int check() const;

  Program& program() const { return program_; }
  const Call& call() const { return program_.call(); }

  // Null if absent.
  const Operand* output(int i) const { return operand(numbers_[i]); }
  const Operand* input(int i) const { return operand(numbers_[signature_.outputs + i]); }
  Rows rows(const Operand* operand) const { return program_.rows(*operand); }

  bool has_weight(int i) const { return weight_number(i) >= 0; }
  // Index among the parameters of the call.
  int parameter(int i) const { return kWeights + weight_number(i); }
  int weight_number(int i) const { return numbers_[signature_.outputs + signature_.inputs + i]; }
  const Weight& weight(int i) const { return *program_.weight(static_cast<size_t>(weight_number(i))); }
  const char* weight_data(int i) const { return has_weight(i) ? call().data<const char>(parameter(i)) : nullptr; }

  int32_t integer(int i) const { return numbers_[signature_.outputs + signature_.inputs + signature_.weights + i]; }
  float number(int i) const;
  // The weight that attribute i refers to; null for -1. It must have been checked.
  const Weight* consumer(int i) const {
    return integer(i) < 0 ? nullptr : program_.weight(static_cast<size_t>(integer(i)));
  }

  // Like Call::fail, for this instruction.
  int fail(const char* format, ...) const __attribute__((format(printf, 2, 3)));

  // Reads the cache of a layer; returns a status as operators do.
  int read_layer(int32_t layer, KvCache& cache) const;

  // Checks that several operations share; they return a status as operators do.
  // Checks that an operand exists, has the type, and has the rows of `like`.
  int check_rows(const char* name, const Operand* operand, DType dtype, bool selected) const;
  int check_rows(const char* name, const Operand* operand, bool selected) const {
    return check_rows(name, operand, program_.dtype(), selected);
  }
  int check_width(const char* name, const Operand& operand, size_t width) const;
  // Checks that weight i is packed, [n, k], and that the kernels in use can read it.
  int check_product(const char* name, int i, size_t n, size_t k) const;
  // Checks that weight i, if present, has `size` elements of the model's type or, if `wide`, float32.
  int check_vector(const char* name, int i, size_t size, bool wide) const;
  // Checks that attribute i is -1 or a packed weight that reads `y`, and that y has room for its layout.
  int check_consumer(int i, const Operand& y) const;

 private:
  const Operand* operand(int32_t number) const {
    return number < 0 ? nullptr : &program_.operands()[static_cast<size_t>(number)];
  }

  Program& program_;
  const size_t index_;
  const Signature& signature_;
  const int32_t* const numbers_;
};

// An operation. `run` can compute what `check` accepts, unless stated otherwise; both return a status as operators do.
struct Operation {
  Signature signature;
  int (*check)(const Instruction&);
  int (*run)(const Instruction&);
};

// The numbers of an operation are listed where it is defined.
extern const Operation kEmbedding, kRmsNorm, kGatedActivation, kActivation, kAdd, kSelectRows, kSigmoidGate, kMultiply,
    kHiddenStates;                                             // program_rows.cc
extern const Operation kLinear, kLmHead;                       // program_products.cc
extern const Operation kRope, kStoreKv, kAttention;            // program_attention.cc
extern const Operation kRoute, kExperts;                       // program_experts.cc
extern const Operation kAllReduce;                             // program_ranks.cc
extern const Operation kCausalConv, kDeltaRule, kSsm;          // program_states.cc
extern const Operation kMixStreams, kMatchStreams, kSparsify;  // program_streams.cc
extern const Operation kSelectKeys;                            // program_selection.cc

// Whether attribute `function` is a gate: 0 none, 1 silu, 2 gelu_tanh, 3 gelu, 4 clamped. 5 (sigmoid) and 6 (tanh) are
// not gates.
inline bool is_gate(int32_t function) { return function >= 1 && function <= 4; }
inline Gate gate_of(int32_t function) { return is_gate(function) ? static_cast<Gate>(function) : Gate::kNone; }

// Returns the layout of y: that of the weight that reads it, or rows.
inline TiledLayout passes_for(const Weight* consumer, const Rows& y) {
  return consumer == nullptr ? y.layout() : consumer->layout(y.count);
}

}  // namespace llm
