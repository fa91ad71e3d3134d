// A call in memory that all ranks see. A rank that reads it while its owner posts the next one sees
// the whole of one call or nothing, and never half of each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "comm/call.h"
#include "stream/futex.h"

namespace shardcomm {

// A sequence lock (H.-J. Boehm, "Can seqlocks get along with programming language memory models?",
// MSPC 2012), whose words are atomic. Zeroed memory is a valid one, to which nothing was posted.
class alignas(128) PostedCall {
 public:
  void post(const Call& call) { post(call, call.sequence); }
  // `version`: not 0, and another one than those before.
  void post(const Call& call, std::uint64_t version) {
    Words words{};
    std::memcpy(words.data(), &call, sizeof(Call));
    // Relaxed: the release of each word comes after it, and carries it along.
    version_.store(kBeingWritten, std::memory_order_relaxed);
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
    version_.store(version, std::memory_order_release);
  }

  std::optional<Call> read() const {
    const std::uint64_t version = version_.load(std::memory_order_acquire);
    if (version == kBeingWritten) return std::nullopt;
    Words words;
    // Who acquires a word of a later call has seen the version being cleared before that, and finds
    // it changed: the second look may be relaxed, and not before these.
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (version_.load(std::memory_order_relaxed) != version) return std::nullopt;
    Call call;
    std::memcpy(static_cast<void*>(&call), words.data(), sizeof(Call));
    return call;
  }

 private:
  static_assert(std::is_trivially_copyable_v<Call> && sizeof(Call) % sizeof(std::uint64_t) == 0);
  static constexpr std::size_t kWords = sizeof(Call) / sizeof(std::uint64_t);
  // Also the version before anything was posted; sequences start at 1.
  static constexpr std::uint64_t kBeingWritten = 0;
  using Words = std::array<std::uint64_t, kWords>;

  Atomic<std::uint64_t> version_;
  std::array<Atomic<std::uint64_t>, kWords> words_;
};

}  // namespace shardcomm
