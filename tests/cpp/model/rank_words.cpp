// What the words that ranks share mean to the explorer: which count, and what they are called.
#include <cstring>
#include <type_traits>

#include "ranks.h"

namespace model {

using shardcomm::BoardMemory;
using shardcomm::Doorbell;
using shardcomm::kStretch;
using shardcomm::PostedCall;

std::uint64_t Ranks::hash() const {
  static_assert(std::is_trivially_copyable_v<Memory> && sizeof(Memory) % 8 == 0);
  std::uint64_t hash = 0;
  const char* bytes = reinterpret_cast<const char*>(&memory_);
  for (std::size_t i = 0; i < sizeof(Memory); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    if (word != 0) hash ^= mix(i, word);
  }
  return hash;
}

std::uint64_t Ranks::significant(const void* word, std::uint64_t value) const {
  for (const BoardMemory* board : boards_) {
    for (int r = 0; r < program_.ranks; ++r) {
      if (word == &board->ranks[r].waiting_since) return value != 0 ? 1 : 0;
    }
  }
  return value;
}

bool Ranks::is_quiet(const void* word) const {
  if (program_.word_by_word) return false;
  const char* at = static_cast<const char*>(word);
  for (const BoardMemory* board : boards_) {
    for (int r = 0; r < program_.ranks; ++r) {
      const char* calls = reinterpret_cast<const char*>(board->ranks[r].calls);
      if (at < calls || at >= calls + sizeof(board->ranks[r].calls)) continue;
      for (const PostedCall& call : board->ranks[r].calls) {
        if (word == &call.arrival) return false;
      }
      const bool is_version = static_cast<std::size_t>(at - calls) % sizeof(PostedCall) == 0;
      return !is_version || program_.ranks > 2;
    }
  }
  return false;
}

std::string Ranks::name_of(const void* word) const {
  const char* at = static_cast<const char*>(word);
  const auto within = [&](const void* place, std::size_t bytes) {
    const char* begin = static_cast<const char*>(place);
    return at >= begin && at < begin + bytes;
  };
  if (word == &group_->failure) return "failure";
  if (within(posted_, sizeof(PostedCall))) {
    return "the posted call, byte " + std::to_string(at - reinterpret_cast<const char*>(posted_));
  }
  for (int r = 0; r < program_.ranks; ++r) {
    const std::string of = " of rank " + std::to_string(r);
    if (r < 2 && within(&bells_[r], sizeof(Doorbell))) {
      return (word == &bells_[r].rung ? "the bell" : "armed, of the bell") + of;
    }
    if (word == &deaths_[r]) return "the death" + of;
    if (word == &interrupts_[r]) return "the interrupt" + of;
    if (word == &group_->ranks[r].pid) return "pid" + of;
    if (word == &group_->ranks[r].closed) return "closed" + of;
    if (word == &group_->ranks[r].reason) return "reason" + of;
    for (int c = 0; c < kChannels; ++c) {
      const std::string on = of + " on channel " + std::to_string(c);
      const BoardMemory& board = *boards_[static_cast<std::size_t>(c)];
      const BoardMemory::Rank& rank = board.ranks[r];
      const Member& member = members_[static_cast<std::size_t>(r)];
      const auto channel = static_cast<std::size_t>(c);
      if (word == &users_[r * kChannels + c]) return "the user" + on;
      if (word == &board.wakes) return "wakes on channel " + std::to_string(c);
      if (word == &board.sleepers) return "sleepers on channel " + std::to_string(c);
      if (word == &rank.finished) return "finished" + on;
      if (word == &rank.waiting_since) return "waiting_since" + on;
      if (word == &rank.stuck_in) return "stuck_in" + on;
      if (word == &rank.reading) return "reading" + on;
      if (word == member.operands[channel]) return "the operand" + on;
      if (word == member.window[channel]) return "the window's slice" + on;
      for (int half = 0; half < 2; ++half) {
        for (int share = 0; share < program_.ranks; ++share) {
          const auto& shares = member.areas[static_cast<std::size_t>(half)];
          if (word != shares[static_cast<std::size_t>(share)]) continue;
          return "share " + std::to_string(share) + " in half " + std::to_string(half) + of;
        }
      }
      for (int place = 0; place < 2 * kStretch; ++place) {
        const PostedCall& call = rank.calls[place];
        if (word == call.elements) return "elements of call " + std::to_string(place) + on;
        if (word == &call.arrival) return "arrival in call " + std::to_string(place) + on;
        if (within(&call, sizeof(call))) {
          return "call " + std::to_string(place) + on + ", byte " +
                 std::to_string(at - reinterpret_cast<const char*>(&call));
        }
      }
    }
  }
  return "a word of the rank's own";
}

}  // namespace model
