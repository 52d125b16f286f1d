// How a thread treats subnormal numbers.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace llm {

// Sets, for the life of an object, whether subnormal inputs and results count as zero. It is part of what fixes the
// bits of a result: threads of other origin may come with either setting.
template <bool kAsZero>
class SubnormalMode {
 public:
#if defined(__x86_64__)
  // Inlined always: a copy compiled for one instruction set must not serve the others.
  __attribute__((always_inline)) SubnormalMode() : before_(_mm_getcsr()) {
    _mm_setcsr(kAsZero ? before_ | kZeroBits : before_ & ~kZeroBits);
  }
  __attribute__((always_inline)) ~SubnormalMode() { _mm_setcsr(before_); }
#else
  SubnormalMode() {}
  ~SubnormalMode() {}
#endif
  SubnormalMode(const SubnormalMode&) = delete;
  SubnormalMode& operator=(const SubnormalMode&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kZeroBits = 0x8040;  // of results and of inputs
  unsigned before_;
#endif
};

// Spares the microcode that subnormals need.
using SubnormalsAsZero = SubnormalMode<true>;
// As IEEE 754 and NumPy have it.
using SubnormalsKept = SubnormalMode<false>;

}  // namespace llm
