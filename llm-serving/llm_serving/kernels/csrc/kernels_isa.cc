// The kernels of one instruction set: compiled once for each, with its name in LLM_ISA and the compiler flags it needs,
// into a library of their own.
#if defined(LLM_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention.h"
#include "blocks.h"
#include "causal_conv.h"
#include "elementwise.h"
#include "fixed_point.h"
#include "key_scores.h"
#include "linear.h"
#include "recurrence.h"
#include "routing.h"
#include "sampling.h"
#include "streams.h"
#include "w4a8.h"
#include "w8a8.h"
#include "weight_only.h"
#include "weight_only_blocks.h"

#define LLM_TEXT_OF(name) #name
#define LLM_TEXT(name) LLM_TEXT_OF(name)

namespace llm::LLM_ISA {
namespace {

template <bool kCentred>
void norm(const RmsNormArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    if (args.gamma_dtype == DType::kFloat32) {
      rms_norm_rows<Element, float, kCentred>(args);
    } else {
      rms_norm_rows<Element, Element, kCentred>(args);
    }
  });
}

void rms_norm(const RmsNormArgs& args) { args.centred ? norm<true>(args) : norm<false>(args); }

void rotary(const RotaryArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    if (args.table_dtype == DType::kFloat32) {
      rotate_rows<Element, float>(args);
    } else {
      rotate_rows<Element, Element>(args);
    }
  });
}

void swiglu(const SwigluArgs& args) {
  with_element(args.dtype, [&](auto tag) {
    using Element = typename decltype(tag)::Element;
    switch (args.gate) {
      case Gate::kGeluTanh:
        return swiglu_rows<Element, Gate::kGeluTanh>(args);
      case Gate::kGelu:
        return swiglu_rows<Element, Gate::kGelu>(args);
      case Gate::kClamped:
        return swiglu_rows<Element, Gate::kClamped>(args);
      case Gate::kTanh:
        return swiglu_rows<Element, Gate::kTanh>(args);
      default:
        return swiglu_rows<Element, Gate::kSilu>(args);
    }
  });
}

void add(const AddArgs& args) {
  with_element(args.dtype, [&](auto tag) { add_elements<typename decltype(tag)::Element>(args); });
}

void multiply(const AddArgs& args) {
  with_element(args.dtype, [&](auto tag) { multiply_elements<typename decltype(tag)::Element>(args); });
}

void silu(const SigmoidArgs& args) {
  with_element(args.dtype, [&](auto tag) { silu_elements<typename decltype(tag)::Element>(args); });
}

void sigmoid(const SigmoidArgs& args) {
  with_element(args.dtype, [&](auto tag) { sigmoid_elements<typename decltype(tag)::Element>(args); });
}

void round(const RoundArgs& args) {
  with_element(args.dtype, [&](auto tag) { round_rows<typename decltype(tag)::Element>(args); });
}

void sigmoid_gate(const SigmoidGateArgs& args) {
  with_element(args.dtype, [&](auto tag) { sigmoid_gate_rows<typename decltype(tag)::Element>(args); });
}

void encode(const EncodeArgs& args) {
  with_element(args.dtype, [&](auto tag) { encode_rows<typename decltype(tag)::Element>(args); });
}

void rotate_one(float* x, size_t size) { rotate_row(x, size, x); }

TiledLayout layout(DType dtype, size_t m, size_t k, const WeightQValues* qvalues) {
  TiledLayout result = {m, k};
  if (qvalues != nullptr) return result;  // quantized first
  with_element(dtype, [&](auto tag) {
    const ActivationForm<typename decltype(tag)::Element> form(m, k);
    if (!form.converts) result = form.layout;
  });
  return result;
}

#if defined(LLM_FIXED_POINT)
constexpr auto kToFixedPoint = weight_to_fixed_point;
#else
constexpr std::nullptr_t kToFixedPoint = nullptr;
inline void fixed_point_linear(const LinearArgs&) {}  // never called: see `can_multiply`
#endif

void linear_of_format(const LinearArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  if (args.adapters != nullptr) {
    with_element(args.dtype, [&](auto tag) { multiply_by_a<typename decltype(tag)::Element>(args); });
  }
  if (args.qvalues == nullptr) return linear(args);
  switch (args.qvalues->format) {
    case WeightFormat::kFixedPoint:
      return fixed_point_linear(args);
    case WeightFormat::kW8A8:
      return w8a8_linear(args);
    case WeightFormat::kW4A8:
      return w4a8_linear(args);
    case WeightFormat::kWeightOnly:
      return weight_only_linear(args);
    case WeightFormat::kBlocks:
      return args.qvalues->weight_only ? weight_only_blocks_linear(args) : blocks_linear(args);
  }
}

}  // namespace

const Kernels kKernels = {LLM_TEXT(LLM_ISA),
                          linear_of_format,
                          layout,
                          kToFixedPoint,
                          rms_norm,
                          rotary,
                          swiglu,
                          add,
                          multiply,
                          silu,
                          sigmoid,
                          round,
                          sigmoid_gate,
                          cap_logits,
                          route_rows,
                          gather_sum,
                          encode,
                          rotate_one,
                          attention,
                          sample,
                          causal_conv,
                          recurrence,
                          mix_streams,
                          match_streams,
                          sparsify,
                          key_scores};

}  // namespace llm::LLM_ISA

// Returns the kernels, or null if the system does not permit this process their instructions.
LLM_EXPORT const void* llm_kernels() {
#if defined(LLM_AMX) && !defined(LLM_AMX_EMULATED)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM: for the registers of the tiles
  constexpr long kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return nullptr;
#endif
  return &llm::LLM_ISA::kKernels;
}
