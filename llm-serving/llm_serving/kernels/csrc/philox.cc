// Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
#include "philox.h"

namespace llm {

double philox_uniform(uint64_t seed, uint32_t position) {
  constexpr int kRounds = 10;
  uint32_t counter[4] = {position, 0, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < kRounds; round++) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(product0);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  const uint64_t bits = uint64_t{counter[0]} << 21 | counter[1] >> 11;  // 32 + 21 bits
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace llm
