// A whole network as one operator: MindSpore spends more time on a step's operators than a small model computes, and
// for a large one its own data evicts that of the kernels from the caches after each layer.
#include "addressed.h"
#include "ending.h"
#include "program.h"

namespace llm {
namespace {

// Operations in the order of their numbers.
const Operation* const kOperations[] = {&kEmbedding,  &kLinear,          &kRmsNorm,     &kRope,         &kStoreKv,
                                        &kAttention,  &kGatedActivation, &kAdd,         &kRoute,        &kExperts,
                                        &kLmHead,     &kSelectRows,      &kSigmoidGate, &kHiddenStates, &kAllReduce,
                                        &kActivation, &kMultiply,        &kCausalConv,  &kDeltaRule,    &kSsm,
                                        &kMixStreams, &kMatchStreams,    &kSparsify,    &kSelectKeys};
constexpr size_t kNumOperations = sizeof(kOperations) / sizeof(kOperations[0]);

const Operation* operation(const Program& program, size_t i) {
  return kOperations[static_cast<size_t>(*program.instruction(i))];
}

int check_instructions(Program& program) {
  const Call& call = program.call();
  for (size_t i = 0; i < program.num_instructions(); i++) {
    const int32_t number = *program.instruction(i);
    if (number < 0 || static_cast<size_t>(number) >= kNumOperations) {
      return call.fail("instruction %zu: there is no operation %d", i, number);
    }
    const Operation& op = *operation(program, i);
    const Signature& signature = op.signature;
    const Instruction instruction(program, i, signature);
    const int numbers = 1 + signature.outputs + signature.inputs + signature.weights + signature.attributes;
    if (static_cast<size_t>(numbers) > program.length())
      return instruction.fail("has more than %zu numbers", program.length());
    if (const int status = instruction.check()) return status;
    if (const int status = op.check(instruction)) return status;
  }
  return 0;
}

int run_program(const Call& call) {
  Program program(call);
  if (const int status = program.read()) return status;
  if (const int status = check_instructions(program)) return status;
  if (const int status = program.begin()) return status;
  size_t layers = 0, attended = 0;
  for (size_t i = 0; i < program.num_instructions(); i++) layers += operation(program, i) == &kAttention;
  Ending ending(layers);
  for (size_t i = 0; i < program.num_instructions(); i++) {
    const Operation* op = operation(program, i);
    // A layer is done when the next one attends, the last one before the result.
    const bool next_layer = op == &kAttention && attended++ > 0;
    if (next_layer || op == &kLmHead || op == &kHiddenStates) ending.layer_done();
    if (const int status = op->run(Instruction(program, i, op->signature))) return status;
  }
  return 0;
}

}  // namespace
}  // namespace llm

// A table of addresses: instructions, operands, token_ids [T], positions [T], slot_mapping [G * T], block_tables
// [G * B, W] of G groups of layers, query_lens [B], context_lens [B], sample_indices [S]; weights, of which the first
// is the LM head [V, H]; key_cache and value_cache of each layer, or of layers in different groups; the states and, if
// there are any, state_in [B] and state_out [T]; with adapters, adapter_slots [T]; the result, float32 [S, V] for the
// sampled rows, or [S, H] for a program that ends in hidden states. The bits of an operation do not depend on the other
// operations.
LLM_OPERATOR(program) {
  llm::AddressedCall addressed(call);
  if (const int status = addressed.read()) return status;
  return llm::run_program(addressed.call());
}
