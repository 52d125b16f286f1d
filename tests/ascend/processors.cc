// Loaded before the C library: reports FAKE_PROCESSORS processors, by which MindSpore chooses its threads.

#include <cstdlib>

extern "C" {

int get_nprocs() {
  const char* number = getenv("FAKE_PROCESSORS");
  return number != nullptr ? atoi(number) : 32;
}

int get_nprocs_conf() { return get_nprocs(); }

}  // extern "C"
