#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace llm {

#if defined(__x86_64__)
namespace amx {
extern const Kernels kKernels;
}
namespace amx_emulated {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace avx512_vnni {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx_vnni {
extern const Kernels kKernels;
}
namespace avx_vnni_evex {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
#endif
namespace plain {
extern const Kernels kKernels;
}

namespace {

constexpr size_t kMaxSets = 8;

#if defined(__x86_64__)
// Whether the CPU has AMX tiles of bfloat16 and int8, and the system grants this process their registers.
bool has_amx() {
  constexpr unsigned kTiles = 1u << 24 | 1u << 22 | 1u << 25;  // amx_tile, amx_bf16, amx_int8
  constexpr long kRequestPermission = 0x1023;                  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kTiles) != kTiles) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Whether the CPU has vpdpbusd on 256 bits without AVX-512.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}
#endif

struct Supported {
  const Kernels* sets[kMaxSets] = {};

  Supported() {
    size_t count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (bf16 && has_amx()) sets[count++] = &amx::kKernels;
    if (bf16) sets[count++] = &avx512_bf16::kKernels;
    if (vnni) sets[count++] = &avx512_vnni::kKernels;
    if (avx512) sets[count++] = &avx512::kKernels;
    if (avx2 && has_avx_vnni()) sets[count++] = &avx_vnni::kKernels;
    if (avx2) sets[count++] = &avx2::kKernels;
#endif
    sets[count++] = &plain::kKernels;
  }

  const Kernels* find(const char* isa) const {
    for (const Kernels* const* set = sets; *set != nullptr; set++) {
      if (std::strcmp((*set)->isa, isa) == 0) return *set;
    }
#if defined(__x86_64__)
    // For tests: the AMX code with loops in place of its instructions.
    if (std::strcmp(isa, "amx_emulated") == 0 && find("avx512") != nullptr) return &amx_emulated::kKernels;
    // For tests: the AVX-VNNI code with the instruction in its AVX-512 encoding.
    if (std::strcmp(isa, "avx_vnni_evex") == 0 && find("avx512_vnni") != nullptr) return &avx_vnni_evex::kKernels;
#endif
    return nullptr;
  }
};

const Supported& supported() {
  static const Supported instance;
  return instance;
}

const Kernels* choose() {
  const char* wanted = std::getenv("LLM_SERVING_ISA");
  if (wanted == nullptr || *wanted == '\0') return supported().sets[0];
  if (const Kernels* set = supported().find(wanted)) return set;
  std::fprintf(stderr, "llm_serving: LLM_SERVING_ISA=%s is not available on this CPU, using %s\n", wanted,
               supported().sets[0]->isa);
  return supported().sets[0];
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> instance{choose()};
  return instance;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

bool select_kernels(const char* isa) {
  const Kernels* set = supported().find(isa);
  if (set != nullptr) current().store(set);
  return set != nullptr;
}

const char* supported_isa(size_t i) {
  return i < kMaxSets && supported().sets[i] != nullptr ? supported().sets[i]->isa : nullptr;
}

}  // namespace llm
