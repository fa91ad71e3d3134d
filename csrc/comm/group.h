// A rank's view of its group: the state of the ranks, what each rank is in, and the first failure,
// which ends everything on all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/board_memory.h"
#include "comm/waited.h"

namespace shardcomm {

enum class Trouble : std::uint8_t {
  none,
  died,
  late,
  closed,
  aborted,
  mismatch,
  deadlock,
  lost_hosts,  // by the rank that noticed, and by no fault of a rank of this host
  late_hosts,
};

// The latest call of a rank on a channel.
struct LastCall {
  Call call;
  bool pending = false;         // whether it has not ended, or has ended in an error
  std::int64_t waiting_ns = 0;  // how long the rank has been asleep, waiting for others
  std::int64_t across_ns = 0;   // the same, waiting for other hosts
};

class Group {
 public:
  static constexpr int kChannels = 2;  // gathers, reduces
  using Boards = std::array<BoardMemory*, kChannels>;

  // `deadline_s`: 0 for a reader that is none of the ranks. `has_ended` tells whether the process
  // of another rank has ended. Ranks that are threads have no process of their own, and so none
  // has.
  Group(GroupMemory* memory, Boards boards, int rank, int size, double deadline_s,
        std::function<bool(int)> has_ended, const TagNames* names = nullptr);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // A group may be the ranks of one host among several, of which each has as many.
  void join_hosts(int host, int hosts) {
    memory_->host.store(host);
    memory_->hosts.store(hosts);
  }
  int host() const { return memory_->host.load(); }
  int hosts() const { return memory_->hosts.load(); }
  // What users call the rank.
  int number(int rank) const { return memory_->host.load() * size_ + rank; }
  // Of this thread's calls.
  double deadline_s() const { return thread_deadline_s > 0 ? thread_deadline_s : deadline_s_; }
  BoardMemory& board(int channel) const { return *boards_[static_cast<std::size_t>(channel)]; }

  // Whether this process was forked from the one that is the rank.
  bool forked() const;
  std::int32_t pid(int rank) const { return memory_->ranks[rank].pid.load(); }
  bool closed(int rank) const { return memory_->ranks[rank].closed.load() != 0; }
  bool has_ended(int rank) const { return has_ended_(rank); }
  // A rank whose process has ended, or -1.
  int find_dead() const;
  std::optional<LastCall> last_call(int rank, int channel) const;
  // Tells of this rank's wait for other hosts. Without a time it waits for none.
  void tell_wait_across(int channel, std::optional<Clock::time_point> since);
  // The send or receive in which the rank is asleep, or has failed.
  std::optional<LastCall> message(int rank) const;
  // Tells of this rank's; without one, that it is in none. One thread at a time may call it.
  void tell_message(const std::optional<Call>& call, Clock::time_point since);
  Doorbell& doorbell(int rank) const { return memory_->ranks[rank].doorbell; }

  bool has_failed() const { return memory_->failure.load() != 0; }
  // Why the group has failed; nothing if it has not.
  std::optional<std::string> failure() const;
  // Throws CommError if the group has failed. `own` is this rank's latest call on a channel.
  void throw_if_failed(const Call& own) const {
    if (has_failed()) throw_failed(own);
  }
  // The same if it has failed, or if this process has closed it or was forked from the rank's.
  void throw_if_ended(const Call& own) const {
    if (forked() || has_failed() || closed(rank_)) throw_ended(own);
  }
  // Throws CommError, because ranks called different collectives; this rank called `own`.
  [[noreturn]] void throw_mismatch(const std::string& text, const Call& own);
  // Ends the group, unless it has failed already.
  void fail(Trouble trouble, int culprit) noexcept;
  void abort(std::string_view reason) noexcept { end_for(Trouble::aborted, reason); }
  // Ends the group for what this rank says in `reason`.
  void end_for(Trouble trouble, std::string_view reason) noexcept {
    fail_for(trouble, rank_, reason);
  }
  // Ends the group because `culprit` was late. All ranks then say whose deadline it was, since
  // ranks may have different ones.
  void late(int culprit) noexcept;
  void close() noexcept;

  // What every rank is in: "rank 0 is in barrier() #3; rank 1 is in none".
  std::string pending_calls() const;
  // The sentences of call.h, with the names of this group's tags.
  std::string signature(const Call& call) const { return shardcomm::signature(call, names_); }
  std::string describe(const Call& call) const { return shardcomm::describe(call, names_); }
  // "rank 1 (pid 4711)"
  std::string who(int rank) const;

 private:
  [[noreturn]] void throw_failed(const Call& own) const;
  [[noreturn]] void throw_ended(const Call& own) const;
  void fail_for(Trouble trouble, int culprit, std::string_view reason) noexcept;
  std::string last_calls(int rank) const;
  void wake_sleepers() noexcept;

  GroupMemory* memory_;
  Boards boards_;
  int rank_;
  int size_;
  double deadline_s_;
  std::function<bool(int)> has_ended_;
  const TagNames* names_;
  int forks_;
  std::uint64_t messages_told_ = 0;
  Mutex reason_mutex_;  // threads of this rank may abort at once
};

}  // namespace shardcomm
