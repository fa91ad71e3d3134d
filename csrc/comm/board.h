// The board of a channel, as one rank sees it. On it ranks post what they call, meet, and learn
// that they cannot go on. docs/protocol.md says why it is right, and how that is checked.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "comm/board_memory.h"
#include "comm/group.h"
#include "comm/waited.h"

namespace shardcomm {

class Board {
 public:
  // `stuck`: tells whether this rank cannot use the other channel before its present call here has
  // ended. `reads_addresses`: whether ranks read each other's operands at their addresses. A rank
  // that fails must then keep its own operands while others read them (`leave`).
  Board(Group& group, int channel, bool reads_addresses, std::function<bool()> stuck);

  // Throws CommError if this process can call nothing here: the group has failed, the rank has
  // closed it, or this is a forked child of the rank.
  void check() const;
  // Posts what this rank calls, meets the others, and compares. If the ranks did not call the same,
  // all of them throw CommError. Until `end`, `call_of` tells what rank r posted.
  void begin(const Call& call);
  // The same for a call that needs nothing of any rank but `call.root`, which waits for nobody; the
  // others wait for the root alone. Of two ranks whose calls differ, the one that comes later
  // throws at once, and the other one in its next call at the latest. Until `end`, `call_of` tells
  // what the root posted.
  void begin_from_root(const Call& call);
  // Throws CommError, on all ranks, unless all have posted one place as their `recv`.
  void require_one_place();
  const Call& call_of(int rank) const { return calls_[static_cast<std::size_t>(rank)]; }

  // Room for few elements, PostedCall::kElementBytes, that a rank brings to the present call or,
  // between two calls, to the next one. It writes its own before `begin`, and reads the others'
  // after that.
  std::byte* elements(int rank) const { return posted(rank).elements; }

  // Says, until `end`, that this rank reads other ranks' operands, by their addresses if it does
  // so. Throws CommError if the group has failed: operands may be gone.
  void start_reading();

  // Returns when every rank has come here. Afterwards all ranks see what each wrote before it came.
  void meet();

  // Ends the call well.
  void end() noexcept;
  // Ends the call in an error. When it returns, no rank goes on, and none reads this rank's
  // operands any more.
  void leave(std::string_view reason) noexcept;

  // Whether this rank is between `begin` and `end`. After an error it stays true.
  bool in_call() const { return in_call_; }
  std::uint64_t sequence() const { return call_.sequence; }

 private:
  static constexpr int kAll = -1;

  BoardMemory::Rank& state(int rank) const { return memory_->ranks[rank]; }
  // Where `rank` posts the call that is this rank's present one or, between two calls, its next. A
  // rank that has gone on to later calls writes elsewhere, and none can be two stretches ahead.
  PostedCall& posted(int rank) const { return state(rank).calls[place_]; }
  void post(const Call& call);
  void read_call(int rank);
  void meet(int awaited);
  bool has_come(int rank, std::uint64_t meeting) const;
  bool is_over(std::uint64_t meeting) const;
  void wake_sleepers() const noexcept;
  void sleep(std::uint64_t meeting) const;
  void look_for_trouble(std::uint64_t meeting, Waited& waited);
  bool awaits(int rank) const { return awaited_ == kAll || awaited_ == rank; }
  bool waits_elsewhere(int rank) const;
  bool waits_elsewhere_for_this(int rank) const;
  bool is_deadlock(std::uint64_t meeting) const;
  [[noreturn]] void throw_mismatch();

  Group& group_;
  const int channel_;
  BoardMemory* memory_;
  BoardMemory* other_;  // that of the other channel
  bool reads_addresses_;
  std::function<bool()> stuck_;
  bool has_core_;  // while the other ranks have theirs
  std::uint64_t meetings_ = 0;
  int awaited_ = kAll;  // in the present meeting
  bool in_call_ = false;
  int place_ = 0;              // of the present call in `calls`, or of the next one
  bool ends_stretch_ = false;  // whether all ranks meet in the present call
  Call call_;                  // this rank's latest call
  std::vector<Call> calls_;    // the calls of all ranks
};

}  // namespace shardcomm
