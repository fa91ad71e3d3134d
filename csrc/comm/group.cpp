#include "comm/group.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sstream>
#include <utility>

#include "shardcomm/error.h"
#include "stream/fork.h"

namespace shardcomm {
namespace {

// One word, so that the first failure wins and nobody sees half of one.
struct Failure {
  Trouble trouble = Trouble::none;
  int culprit = 0;
  int reporter = 0;

  static constexpr std::uint64_t kRankMask = 0xffffff;
  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(trouble) | static_cast<std::uint64_t>(culprit) << 8 |
           static_cast<std::uint64_t>(reporter) << 32;
  }
  static Failure unpack(std::uint64_t word) {
    return {static_cast<Trouble>(word & 0xff), static_cast<int>((word >> 8) & kRankMask),
            static_cast<int>((word >> 32) & kRankMask)};
  }
};

// As much of it as there is room for, in UTF-8. Like all that ends the group, it takes no memory:
// that there is none may be the reason.
std::string_view whole_characters(std::string_view text) {
  std::size_t end = std::min({text.find('\0'), text.size(), GroupMemory::kReasonBytes - 1});
  if (end == text.size()) return text;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

const char* kind_of(Trouble trouble) {
  switch (trouble) {
    case Trouble::died:
      return "died";
    case Trouble::late:
    case Trouble::late_hosts:
      return "late";
    case Trouble::closed:
      return "closed";
    case Trouble::aborted:
      return "aborted";
    case Trouble::mismatch:
    case Trouble::deadlock:
      return "mismatch";
    case Trouble::lost_hosts:
    case Trouble::none:
      break;
  }
  return "backend";
}

std::uint64_t nanoseconds(Clock::time_point time) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

std::int64_t now_ns() { return static_cast<std::int64_t>(nanoseconds(Clock::now())); }

}  // namespace

Group::Group(GroupMemory* memory, Boards boards, int rank, int size, double deadline_s,
             std::function<bool(int)> has_ended, const TagNames* names)
    : memory_(memory),
      boards_(boards),
      rank_(rank),
      size_(size),
      deadline_s_(deadline_s),
      has_ended_(std::move(has_ended)),
      names_(names),
      forks_(forks()) {}

bool Group::forked() const { return forks() != forks_; }

int Group::find_dead() const {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && has_ended(r)) return r;
  }
  return -1;
}

std::optional<LastCall> Group::last_call(int rank, int channel) const {
  const BoardMemory::Rank& state = board(channel).ranks[rank];
  std::optional<Call> latest;
  for (const PostedCall& posted : state.calls) {
    Call call;
    if (posted.read(call) && (!latest || call.sequence > latest->sequence)) latest = call;
  }
  if (!latest) return std::nullopt;
  const auto past = [](std::uint64_t since) {
    return since == 0 ? 0 : now_ns() - static_cast<std::int64_t>(since);
  };
  return LastCall{*latest, latest->sequence > state.finished.load(),
                  past(state.waiting_since.load()), past(state.across_since.load())};
}

void Group::tell_wait_across(int channel, std::optional<Clock::time_point> since) {
  const auto ns =
      since
          ? std::chrono::duration_cast<std::chrono::nanoseconds>(since->time_since_epoch()).count()
          : 0;
  board(channel).ranks[rank_].across_since.store(static_cast<std::uint64_t>(ns));
}

std::optional<LastCall> Group::message(int rank) const {
  const GroupMemory::Rank& state = memory_->ranks[rank];
  const auto since = static_cast<std::int64_t>(state.message_since.load());
  LastCall last;
  if (since == 0 || !state.message.read(last.call)) return std::nullopt;
  last.call.sequence = std::exchange(last.call.handle, 0);
  last.pending = true;
  last.waiting_ns = now_ns() - since;
  return last;
}

void Group::tell_message(const std::optional<Call>& call, Clock::time_point since) {
  GroupMemory::Rank& own = memory_->ranks[rank_];
  if (call) {
    // A rank may sleep in one message twice. Each time it posts under a number of its own, by which
    // a reader tells the one from the other; the message's own number goes into the handle.
    Call told = *call;
    told.handle = told.sequence;
    told.sequence = ++messages_told_;
    own.message.post(told);
  }
  own.message_since.store(call ? nanoseconds(since) : 0);
}

std::optional<std::string> Group::failure() const {
  const std::uint64_t word = memory_->failure.load();
  if (word == 0) return std::nullopt;
  const Failure failure = Failure::unpack(word);
  const std::string culprit = who(failure.culprit);
  std::ostringstream text;
  switch (failure.trouble) {
    case Trouble::deadlock:
      text << "ranks wait for each other in different collectives: " << pending_calls();
      break;
    case Trouble::mismatch:
    case Trouble::lost_hosts:
    case Trouble::late_hosts:
      text << memory_->ranks[failure.culprit].reason.read().data();
      break;
    case Trouble::died:
      text << culprit << " died";
      break;
    case Trouble::closed:
      text << culprit << " closed the communicator";
      break;
    case Trouble::late:
      text << culprit << " did not come within "
           << memory_->ranks[failure.reporter].reason.read().data() << " s";
      break;
    case Trouble::aborted:
      text << culprit << " aborted: " << memory_->ranks[failure.culprit].reason.read().data();
      break;
    case Trouble::none:
      break;
  }
  return text.str();
}

void Group::throw_failed(const Call& own) const {
  const std::uint64_t word = memory_->failure.load();
  const Failure failure = Failure::unpack(word);
  std::ostringstream text;
  text << *this->failure();
  CommFault fault = fault_in(own, kind_of(failure.trouble));
  fault.reporter = number(failure.reporter);
  switch (failure.trouble) {
    case Trouble::deadlock:
    case Trouble::mismatch:
    case Trouble::lost_hosts:
    case Trouble::late_hosts:
      throw CommError(text.str(), fault);  // it tells what ranks were in; no rank is the culprit
    default:
      break;
  }
  fault.rank = number(failure.culprit);
  if (own.sequence == 0) {
    text << "; no collective was under way on rank " << number(rank_);
  } else if (own.op == Op::attach && !last_call(failure.culprit, 0)) {
    text << "; it has not connected";
  } else {
    // On the culprit itself, what the rank was in that missed it.
    const bool is_own = failure.culprit == rank_;
    text << "; rank " << number(is_own ? failure.reporter : rank_) << " was in "
         << (is_own ? last_calls(failure.reporter) : describe(own)) << ", the last call of rank "
         << number(failure.culprit) << " was " << last_calls(failure.culprit);
  }
  throw CommError(text.str(), fault);
}

void Group::throw_ended(const Call& own) const {
  const CommFault ended{"closed", number(rank_), {}, 0, number(rank_)};
  if (forked()) {
    throw CommError("this process was forked from " + who(rank_) +
                        " and is not that rank: it cannot use the rank's communicator",
                    ended);
  }
  throw_if_failed(own);
  throw CommError(who(rank_) + " has closed this communicator; it cannot be used any more", ended);
}

void Group::throw_mismatch(const std::string& text, const Call& own) {
  fail_for(Trouble::mismatch, rank_, text);  // all ranks see it, and say so in the same words
  CommFault fault = fault_in(own, kind_of(Trouble::mismatch));
  fault.reporter = number(rank_);
  throw CommError(text, fault);
}

void Group::fail(Trouble trouble, int culprit) noexcept {
  std::uint64_t nothing = 0;
  memory_->failure.compare_exchange_strong(nothing, Failure{trouble, culprit, rank_}.pack());
  wake_sleepers();
}

void Group::wake_sleepers() noexcept {
  for (BoardMemory* board : boards_) wake_all(board->wakes);
  for (int r = 0; r < size_; ++r) doorbell(r).wake();
}

void Group::late(int culprit) noexcept {
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%g", deadline_s());
  fail_for(Trouble::late, culprit, seconds.data());
}

void Group::fail_for(Trouble trouble, int culprit, std::string_view reason) noexcept {
  if (forked()) return;  // it is not the rank
  const std::lock_guard<Mutex> lock(reason_mutex_);
  auto& own = memory_->ranks[rank_].reason;
  // Others read it once `failure` says so; it never changes afterwards.
  if (own.read()[0] == '\0') {
    const std::string_view text = reason.empty() ? "no reason given" : whole_characters(reason);
    std::memcpy(own.write().data(), text.data(), text.size());  // zero follows: nobody has written
  }
  fail(trouble, culprit);
}

void Group::close() noexcept {
  if (forked()) return;  // a child lets go of what its parent has, too
  memory_->ranks[rank_].closed.store(1);
  wake_sleepers();  // who waits for this rank
}

std::string Group::who(int rank) const {
  const std::int32_t pid = this->pid(rank);
  std::string text = "rank " + std::to_string(number(rank));
  return pid == 0 ? text : text + " (pid " + std::to_string(pid) + ")";
}

// Gathers and reduces are ordered apart, so both count as the last.
std::string Group::last_calls(int rank) const {
  std::string text;
  for (int channel = 0; channel < kChannels; ++channel) {
    const std::optional<LastCall> last = last_call(rank, channel);
    if (!last || last->call.op == Op::attach) continue;
    text += (text.empty() ? "" : " and ") + describe(last->call);
  }
  if (const std::optional<LastCall> last = message(rank)) {
    text += (text.empty() ? "" : " and ") + describe(last->call);
  }
  return text.empty() ? "its set-up" : text;
}

std::string Group::pending_calls() const {
  std::string text;
  for (int r = 0; r < size_; ++r) {
    std::string pending;
    for (int channel = 0; channel < kChannels; ++channel) {
      const std::optional<LastCall> last = last_call(r, channel);
      if (last && last->pending) pending += (pending.empty() ? "" : " and ") + describe(last->call);
    }
    if (const std::optional<LastCall> last = message(r)) {
      pending += (pending.empty() ? "" : " and ") + describe(last->call);
    }
    text += (r == 0 ? "" : "; ") + who(r) + " is in " + (pending.empty() ? "none" : pending);
  }
  return text;
}

}  // namespace shardcomm
