// How a thread treats subnormal numbers.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace llm {

// Sets whether subnormal inputs and results count as zero, for the lifetime of an object. The setting affects bits of
// results, and threads that other code created may have either.
template <bool kAsZero>
class SubnormalMode {
 public:
#if defined(__x86_64__)
  // Always inlined, because a copy compiled for one instruction set must not be used by another.
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
  static constexpr unsigned kZeroBits = 0x8040;  // bits for results and for inputs
  unsigned before_;
#endif
};

// Avoids the slow microcode for subnormal numbers.
using SubnormalsAsZero = SubnormalMode<true>;
// The behaviour of IEEE 754 and NumPy.
using SubnormalsKept = SubnormalMode<false>;

}  // namespace llm
