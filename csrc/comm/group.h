// A rank's view of its group: who is there, what each rank is in, and the first failure, which ends
// everything on all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/board_memory.h"

namespace shardcomm {

enum class Trouble : std::uint8_t { none, died, late, closed, aborted, deadlock };

// What a rank called last on a channel.
struct LastCall {
  Call call;
  bool pending = false;         // it has not ended, or ended in an error
  std::int64_t waiting_ns = 0;  // it has been asleep so long, for others to come
};

class Group {
 public:
  static constexpr int kChannels = 2;  // gathers, reduces
  using Boards = std::array<BoardMemory*, kChannels>;

  // `find_dead` tells a rank whose process has ended, or -1. Threads have none: never.
  Group(GroupMemory* memory, Boards boards, int rank, int size, double deadline_s,
        std::function<int()> find_dead);

  int rank() const { return rank_; }
  int size() const { return size_; }
  double deadline_s() const { return deadline_s_; }
  BoardMemory& board(int channel) const { return *boards_[static_cast<std::size_t>(channel)]; }

  // Whether this process is a child of the one whose rank this is.
  bool forked() const;
  bool closed(int rank) const { return memory_->ranks[rank].closed.load() != 0; }
  int find_dead() const { return find_dead_(); }
  std::optional<LastCall> last_call(int rank, int channel) const;

  // Throws CommError if the group has failed, for a rank whose latest call on a channel was `own`.
  void throw_if_failed(const Call& own) const;
  // Ends the group, unless it has failed already.
  void fail(Trouble trouble, int culprit) noexcept;
  void abort(const std::string& reason) noexcept;
  void close() noexcept;

  // "rank 1 (pid 4711)"
  std::string who(int rank) const;

 private:
  std::string last_calls(int rank) const;
  std::string pending_calls() const;

  GroupMemory* memory_;
  Boards boards_;
  int rank_;
  int size_;
  double deadline_s_;
  std::function<int()> find_dead_;
  int forks_;
  Mutex reason_mutex_;  // threads of this rank may abort at once
};

}  // namespace shardcomm
