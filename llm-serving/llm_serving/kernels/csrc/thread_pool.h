// The threads of the kernels: one pool for each process, beside MindSpore's own.
#pragma once

#include <cstddef>

#include "dtype.h"

namespace llm {

// Number of threads that share a parallel loop, including the caller; fewer than requested if the system cannot create
// more.
LLM_SHARED size_t num_threads();
void set_num_threads(size_t count);

// Calls body(context, i) once for each i below count, on any thread and in any order, and returns when all are done.
// Inside another parallel loop, or while another thread uses the pool, the caller computes alone. An exception of an
// item is rethrown when no thread is inside any more; other items may have been skipped then.
LLM_SHARED void parallel_for(size_t count, void (*body)(void*, size_t), void* context);

template <class Body>
void parallel_for(size_t count, Body& body) {
  parallel_for(count, [](void* context, size_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// Uninitialised memory of this thread, aligned to 64 bytes, valid until the next request for the same slot. The slots
// separate the buffers of an operator.
enum class Scratch { kActivations, kPanel, kTile, kScores, kItems, kLayer, kAdapters, kCount };
LLM_SHARED void* scratch(Scratch slot, size_t bytes);

}  // namespace llm
