#include "comm/filler.h"

#include <algorithm>
#include <chrono>

#include "copy/copy_bytes.h"

namespace shardcomm {
namespace {

using Clock = std::chrono::steady_clock;

// At first each way is tried twice, ordinary stores in the first and the fourth copy: a copy that
// comes to pages for the first time is slow, and must not decide.
constexpr std::uint32_t kFirst = 4;
// How many times as fast as ordinary stores are those past the caches that are worth it.
constexpr double kWorthIt = 1.5;
// By which factor one copy can make a rate slower: the system may have stopped this rank meanwhile.
constexpr double kSlower = 1.25;

int floor_log2(std::size_t bytes) { return 63 - __builtin_clzll(bytes); }

}  // namespace

bool CopyRates::past_caches() const {
  if (copies_ < kFirst) return copies_ == 1 || copies_ == 2;
  const bool worth_it = past_caches_ * kWorthIt < ordinary_;
  return copies_ % kTries == 0 ? !worth_it : worth_it;
}

void CopyRates::took(bool past_caches, double ns_per_byte) {
  double& rate = past_caches ? past_caches_ : ordinary_;
  rate = rate == 0 ? ns_per_byte : std::min(ns_per_byte, rate * kSlower);
  ++copies_;
}

void Filler::copy(void* dst, const void* src, std::size_t bytes) {
  if (bytes == 0) return;  // what is empty may have no address
  const int size = floor_log2(bytes) - kSmallestLog2;
  if (!kHasStreamingStores || size < 0 || size >= kSizes) return copy_bytes(dst, src, bytes);
  CopyRates& rates = rates_[static_cast<std::size_t>(size)];
  const bool past_caches = rates.past_caches();
  const Clock::time_point start = Clock::now();
  (past_caches ? copy_past_caches : copy_bytes)(dst, src, bytes);
  const std::chrono::duration<double, std::nano> taken = Clock::now() - start;
  rates.took(past_caches, taken.count() / static_cast<double>(bytes));
}

}  // namespace shardcomm
