// The threads of the kernels: one pool a process, beside MindSpore's own.
#pragma once

#include <cstddef>

namespace llm {

// Number of threads that share a parallel loop, the caller included; fewer than were set where the system has no more.
size_t num_threads();
void set_num_threads(size_t count);

// Calls body(context, i) once for each i below count, on any thread, in any order, and returns when all are done.
// Runs on the caller alone inside another parallel loop, or while another thread holds the pool. What an item throws is
// thrown once no thread is inside any more; other items may have been left out then.
void parallel_for(size_t count, void (*body)(void*, size_t), void* context);

template <class Body>
void parallel_for(size_t count, Body& body) {
  parallel_for(count, [](void* context, size_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

// Uninitialised memory of this thread, aligned to 64 bytes, valid until the next request for the same slot. The
// slots keep an operator's several buffers apart.
enum class Scratch { kActivations, kPanel, kTile, kScores, kItems, kLayer, kCount };
void* scratch(Scratch slot, size_t bytes);

}  // namespace llm
