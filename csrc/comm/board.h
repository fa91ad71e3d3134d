// The board: where ranks post what they call, meet, and learn that one of them is gone. One per
// channel, in memory that all ranks see (a shared window, or, for threads, any memory).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/call.h"

namespace shardcomm {

// Every field of both is right when zero, so fresh memory is a fresh group and a fresh board.
//
// What all channels share: who is there, and the first failure of any of them, which ends all.
struct GroupMemory {
  static constexpr std::size_t kReasonBytes = 256;

  struct alignas(64) Rank {
    std::atomic<std::int32_t> pid;      // 0: not attached, or a thread
    std::atomic<std::uint32_t> closed;  // this rank left
    char reason[kReasonBytes];          // of its abort
  };

  alignas(64) std::atomic<std::uint64_t> failure;  // 0, or the first failure, packed
  Rank ranks[1];                                   // `size` of them

  static std::size_t bytes(int size) {
    return sizeof(GroupMemory) + sizeof(Rank) * static_cast<std::size_t>(size - 1);
  }
};

struct BoardMemory {
  struct alignas(64) Rank {
    std::atomic<std::uint64_t> arrived;  // meetings it came to
    Call calls[2];  // the latest two, by sequence: a slow rank may still read the one before
  };

  alignas(64) std::atomic<std::uint32_t> generation;  // meetings completed; the futex
  alignas(64) std::atomic<std::uint32_t> arrivals;    // of the meeting under way
  std::atomic<std::uint32_t> sleepers;
  Rank ranks[1];  // `size` of them

  static std::size_t bytes(int size) {
    return sizeof(BoardMemory) + sizeof(Rank) * static_cast<std::size_t>(size - 1);
  }
};

// Tells whether a rank's process has ended. Threads have none: never.
using FindDead = std::function<int()>;  // a rank, or -1

class Board {
 public:
  // `other` is the other channel's: where a rank is that does not come here.
  Board(GroupMemory* group, BoardMemory* memory, const BoardMemory* other, int rank, int size,
        std::chrono::duration<double> deadline, FindDead find_dead);

  // Posts what this rank calls, meets the others, and compares: all ranks called the same, or all
  // throw CommError. Until the next `begin`, `call_of` tells what rank r posted.
  void begin(Call call);
  const Call& call_of(int rank) const;

  // Returns when every rank has come here. What a rank wrote before it came, all see afterwards.
  void meet();

  // This rank found a reason why nobody can go on. Throws it.
  [[noreturn]] void fail(const std::string& reason);

  void abort(const std::string& reason) noexcept;
  void close() noexcept;

  std::uint64_t sequence() const { return call_.sequence; }

 private:
  enum class Trouble : std::uint8_t { none, died, late, closed, aborted };

  BoardMemory::Rank& rank_state(int rank) const { return memory_->ranks[rank]; }
  bool spin(std::uint32_t generation) const;
  void sleep_until_changed(std::uint32_t generation);
  void look_for_trouble(std::uint32_t generation, std::chrono::steady_clock::time_point started);
  void report(Trouble trouble, int culprit) noexcept;
  void throw_if_failed() const;
  [[noreturn]] void throw_mismatch();
  std::string who(int rank) const;
  std::string last_calls(int rank) const;
  void wake() const noexcept;

  GroupMemory* group_;
  BoardMemory* memory_;
  const BoardMemory* other_;
  int rank_;
  int size_;
  std::chrono::duration<double> deadline_;
  FindDead find_dead_;
  bool may_spin_;
  Call call_;
};

}  // namespace shardcomm
