// How a thread treats subnormal numbers.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace llm {

// Subnormal inputs and results count as zero while this lives. It is part of what fixes the bits of a result: threads
// of other origin may come with either setting. It also spares the microcode that subnormals need.
class SubnormalsAsZero {
 public:
#if defined(__x86_64__)
  SubnormalsAsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kZeroInputs); }
  ~SubnormalsAsZero() { _mm_setcsr(before_); }
#else
  SubnormalsAsZero() {}
  ~SubnormalsAsZero() {}
#endif
  SubnormalsAsZero(const SubnormalsAsZero&) = delete;
  SubnormalsAsZero& operator=(const SubnormalsAsZero&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kFlushResults = 0x8000;
  static constexpr unsigned kZeroInputs = 0x0040;
  unsigned before_;
#endif
};

}  // namespace llm
