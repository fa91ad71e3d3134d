// Philox4x32-10: random words that are a function of a key and a counter, so that every rank can
// draw the same ones, in any order. J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", 2011.
#pragma once

#include <cstdint>

#include "shardcomm/tile.h"

namespace shardcomm {

struct PhiloxWords {
  std::uint32_t at[4];
};

[[gnu::always_inline]] SHARDCOMM_HOST_DEVICE inline PhiloxWords philox(std::uint64_t key,
                                                                       std::uint64_t counter) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter);
  std::uint32_t c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = 0;
  std::uint32_t c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(key);
  std::uint32_t k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(b);
    c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace shardcomm
