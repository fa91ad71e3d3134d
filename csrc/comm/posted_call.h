// What a rank tells in a meeting, in memory that all ranks see: that it has come, what it has
// called, and few elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "comm/call.h"
#include "stream/futex.h"

namespace shardcomm {

// A cache line from one core to another is most of what a small collective costs. So whatever all
// ranks must know is in one, and the elements begin there; where operands lie, which few calls
// tell, comes last.
//
//   line 0     version · arrival · what ranks compare of the call · 16 bytes of elements
//   lines 1-4  256 bytes of elements
//   line 5     the call's places and handle
//
// The call is a sequence lock (H.-J. Boehm, "Can seqlocks get along with programming language
// memory models?", MSPC 2012), whose words are atomic: a rank that reads it while its owner posts
// the next one sees the whole of one call or nothing, and never half of each. Zeroed memory is a
// valid one, to which nothing was posted. The version is the call's number and two flags.
class alignas(64) PostedCall {
 public:
  static constexpr std::size_t kElementBytes = 16 + 256;

  // `call.sequence`: another one than those before.
  void post(const Call& call) {
    const bool has_places = call.tells_places();
    const auto* bytes = reinterpret_cast<const std::byte*>(&call);
    // Relaxed: the release of each word comes after it, and carries it along.
    version_.store(kBeingWritten, std::memory_order_relaxed);
    store(near_, bytes);
    if (has_places) store(far_, bytes + kFarAt);
    const std::uint64_t whole = has_places ? kWhole | kWithPlaces : kWhole;
    version_.store(call.sequence << 2 | whole, std::memory_order_release);
  }

  // False: there is no whole call, and `call` has no meaning.
  bool read(Call& call) const {
    const std::uint64_t version = version_.load(std::memory_order_acquire);
    if (version == kBeingWritten) return false;
    auto* bytes = reinterpret_cast<std::byte*>(&call);
    load(bytes, near_);
    call.sequence = version >> 2;
    call.send = call.recv = {};
    call.handle = 0;
    if ((version & kWithPlaces) != 0) load(bytes + kFarAt, far_);
    // Who acquires a word of a later call has seen the version being cleared before that, and finds
    // it changed: this second look may be relaxed, and not before those.
    return version_.load(std::memory_order_relaxed) == version;
  }

 private:
  static_assert(std::is_trivially_copyable_v<Call>);
  using Word = std::uint64_t;
  static constexpr std::size_t kFarAt = offsetof(Call, send);
  static constexpr std::size_t kNear = offsetof(Call, sequence) / sizeof(Word);
  static constexpr std::size_t kFar = (sizeof(Call) - kFarAt) / sizeof(Word);
  static_assert(sizeof(Call) == (kNear + 1 + kFar) * sizeof(Word));
  static constexpr std::uint64_t kBeingWritten = 0;  // also before anything was posted
  static constexpr std::uint64_t kWhole = 1;
  static constexpr std::uint64_t kWithPlaces = 2;

  // A word at a time, since a processor that loads more than it has stored at once waits for it.
  template <std::size_t N>
  static void store(std::array<Atomic<Word>, N>& words, const std::byte* from) {
    for (std::size_t i = 0; i < N; ++i) {
      Word value;
      std::memcpy(&value, from + i * sizeof(Word), sizeof(Word));
      words[i].store(value, std::memory_order_release);
    }
  }
  template <std::size_t N>
  static void load(std::byte* into, const std::array<Atomic<Word>, N>& words) {
    for (std::size_t i = 0; i < N; ++i) {
      const Word value = words[i].load(std::memory_order_acquire);
      std::memcpy(into + i * sizeof(Word), &value, sizeof(Word));
    }
  }

  Atomic<std::uint64_t> version_;

 public:
  Atomic<std::uint64_t> arrival;  // the latest meeting to which its rank has come in this call

 private:
  std::array<Atomic<Word>, kNear> near_;

 public:
  std::byte elements[kElementBytes];

 private:
  std::array<Atomic<Word>, kFar> far_;
};

static_assert(sizeof(PostedCall) == 6 * 64);

}  // namespace shardcomm
