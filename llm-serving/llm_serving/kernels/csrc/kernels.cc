#include "kernels.h"

#include <atomic>

namespace llm {
namespace {

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Kernels& kernels() { return *current.load(std::memory_order_relaxed); }

bool has_kernels() { return current.load() != nullptr; }

void use_kernels(const Kernels* set) { current.store(set); }

}  // namespace llm
