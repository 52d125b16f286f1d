// The choice of tokens as a function for Python: MindSpore has no operator for it.
#include "call.h"
#include "kernels.h"

// Chooses a token for each row; worker/sampler.py fills the arguments.
LLM_EXPORT int llm_sample(const llm::SampleArgs* args) {
  static llm::OperatorClock clock("sample");
  const llm::Timed timed(clock);
  return llm::guarded("llm_sample", [&] {
    llm::kernels().sample(*args);
    return 0;
  });
}

// For a test that the structure of Python has not drifted.
LLM_EXPORT int64_t llm_sample_args_size() { return sizeof(llm::SampleArgs); }
