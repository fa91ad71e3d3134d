// The memory that the ranks of a group share to meet, and to learn that one of them is gone. All
// ranks see it: it is a shared window or, for threads, any memory. Fresh memory, which is zero, is
// a fresh group.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "comm/doorbell.h"
#include "comm/posted_call.h"
#include "comm/stretch.h"
#include "stream/futex.h"

namespace shardcomm {

// What all channels share: the state of the ranks, and the first failure of a channel, which ends
// all channels.
struct GroupMemory {
  // The head by which a process that is no rank knows that it can read this memory
  // (comm/inspect.h).
  struct Head {
    std::uint64_t magic;   // written last
    std::uint64_t layout;  // tells apart layouts of the memory that it would read
    std::uint64_t size;    // number of ranks
  };

  static constexpr std::size_t kReasonBytes = 1024;

  struct alignas(64) Rank {
    Atomic<std::int32_t> pid;  // 0: not known yet, or a thread
    Atomic<std::uint64_t> start;
    Atomic<std::uint32_t> attached;
    Atomic<std::uint32_t> closed;  // the rank has left
    // Why the rank ended the group, or its deadline in seconds if another rank was late. Written
    // once, before `failure` points to it.
    Plain<std::array<char, kReasonBytes>> reason;
    // The send or receive in which it is asleep, or has failed, and since when.
    PostedCall message;
    Atomic<std::uint64_t> message_since;  // on the steady clock, in nanoseconds; 0: it is in none
    Doorbell doorbell;
  };

  Head head;  // zero for ranks that are threads, whose memory no other process can read
  alignas(64) Atomic<std::uint64_t> failure;  // 0, or the first failure, packed
  // Of several hosts with as many ranks each: how many, and this one's number. 0: there is one.
  Atomic<std::int32_t> hosts;
  Atomic<std::int32_t> host;
  Rank ranks[1];  // `size` of them

  static std::size_t bytes(int size) {
    return sizeof(GroupMemory) + sizeof(Rank) * static_cast<std::size_t>(size - 1);
  }
};

// The board of one channel. The ranks meet any number of times; meetings are counted from 1.
struct BoardMemory {
  struct alignas(64) Rank {
    // The calls of two stretches: a slow rank may still read those of the stretch before.
    PostedCall calls[2 * kStretch];

    // The latest meeting to which it has come.
    std::uint64_t came_to() const;
    Atomic<std::uint64_t> finished;       // sequence of its latest call that has ended well
    Atomic<std::uint64_t> waiting_since;  // on the steady clock, in nanoseconds; 0: not asleep
    Atomic<std::uint64_t> across_since;   // the same, of a wait for other hosts
    // A meeting that must be over before the rank can use the other channel; 0: there is none.
    Atomic<std::uint64_t> stuck_in;
    Atomic<std::uint32_t> reading;  // it may be reading other ranks' operands by their addresses
  };

  alignas(64) Atomic<std::uint32_t> wakes;  // how often sleepers were woken; also the futex
  Atomic<std::uint32_t> sleepers;           // how many may be asleep
  Rank ranks[1];                            // `size` of them

  // The latest meeting to which all ranks have come.
  std::uint64_t all_came_to(int size) const;

  static std::size_t bytes(int size) {
    return sizeof(BoardMemory) + sizeof(Rank) * static_cast<std::size_t>(size - 1);
  }
};

// All arrivals of a place only grow. So what this returns was the latest while it looked; the same
// goes for all ranks'.
inline std::uint64_t BoardMemory::Rank::came_to() const {
  std::uint64_t latest = 0;
  for (const PostedCall& call : calls) latest = std::max(latest, call.arrival.load());
  return latest;
}

inline std::uint64_t BoardMemory::all_came_to(int size) const {
  std::uint64_t least = ranks[0].came_to();
  for (int r = 1; r < size; ++r) least = std::min(least, ranks[r].came_to());
  return least;
}

}  // namespace shardcomm
