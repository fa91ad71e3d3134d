#include "comm/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <limits>
#include <sstream>
#include <thread>
#include <utility>

#include "stream/wait_check.h"

namespace shardcomm {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that run side by side mostly meet within this; then no rank pays for being woken.
constexpr std::chrono::microseconds kSpin{20};

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value,
           const timespec* timeout) {
  static_assert(sizeof(*word) == sizeof(std::uint32_t) &&
                std::atomic<std::uint32_t>::is_always_lock_free);
  // Not FUTEX_PRIVATE_FLAG: the word may be shared between processes.
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), operation, value, timeout,
                 nullptr, 0);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// One word, so that the first failure wins and nobody sees half of one.
struct Failure {
  std::uint8_t trouble = 0;
  int culprit = 0;
  int reporter = 0;

  static constexpr std::uint64_t kRankMask = 0xffffff;
  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(trouble) | static_cast<std::uint64_t>(culprit) << 8 |
           static_cast<std::uint64_t>(reporter) << 32;
  }
  static Failure unpack(std::uint64_t word) {
    return {static_cast<std::uint8_t>(word & 0xff), static_cast<int>((word >> 8) & kRankMask),
            static_cast<int>((word >> 32) & kRankMask)};
  }
};

}  // namespace

Board::Board(GroupMemory* group, BoardMemory* memory, const BoardMemory* other, int rank, int size,
             std::chrono::duration<double> deadline, FindDead find_dead)
    : group_(group),
      memory_(memory),
      other_(other),
      rank_(rank),
      size_(size),
      deadline_(deadline),
      find_dead_(std::move(find_dead)),
      may_spin_(static_cast<unsigned>(size) <= std::thread::hardware_concurrency()) {}

void Board::begin(Call call) {
  throw_if_failed();
  if (group_->ranks[rank_].closed.load() != 0) {
    throw CommError(who(rank_) + " has closed this communicator; it cannot be used any more");
  }
  call.sequence = call_.sequence + 1;
  call_ = call;
  rank_state(rank_).calls[call.sequence & 1] = call;
  meet();
  for (int r = 0; r < size_; ++r) {
    if (!call_.same_as(call_of(r))) throw_mismatch();
  }
}

const Call& Board::call_of(int rank) const { return rank_state(rank).calls[call_.sequence & 1]; }

void Board::meet() {
  throw_if_failed();
  // Before arriving: afterwards the last rank may complete this meeting at any moment.
  const std::uint32_t generation = memory_->generation.load();
  rank_state(rank_).arrived.fetch_add(1);
  if (memory_->arrivals.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
    memory_->arrivals.store(0);
    memory_->generation.store(generation + 1);
    if (memory_->sleepers.load() > 0) wake();
    return;
  }
  if (spin(generation)) return;
  const Clock::time_point started = Clock::now();
  while (true) {
    sleep_until_changed(generation);
    if (memory_->generation.load() != generation) return;
    look_for_trouble(generation, started);
    try {
      check_wait();
    } catch (...) {
      abort("interrupted while waiting in " + describe(call_));
      throw;
    }
  }
}

bool Board::spin(std::uint32_t generation) const {
  if (!may_spin_) return memory_->generation.load() != generation;
  const Clock::time_point until = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (memory_->generation.load(std::memory_order_acquire) != generation) return true;
      pause();
    }
  } while (Clock::now() < until);
  return false;
}

void Board::sleep_until_changed(std::uint32_t generation) {
  const timespec slice{0, std::chrono::nanoseconds(kWaitSlice).count()};
  memory_->sleepers.fetch_add(1);
  futex(&memory_->generation, FUTEX_WAIT, generation, &slice);
  memory_->sleepers.fetch_sub(1);
}

void Board::look_for_trouble(std::uint32_t generation, Clock::time_point started) {
  const std::uint64_t arrived = rank_state(rank_).arrived.load();
  int missing = -1;
  int closed =
      group_->ranks[rank_].closed.load() != 0 ? rank_ : -1;  // by another thread, meanwhile
  for (int r = size_ - 1; r >= 0; --r) {
    if (rank_state(r).arrived.load() >= arrived) continue;
    missing = r;
    if (group_->ranks[r].closed.load() != 0) closed = r;
  }
  const int dead = find_dead_();
  // A rank may have come, and ended in peace, since the sleep.
  if (memory_->generation.load() != generation) return;
  if (closed >= 0) {
    report(Trouble::closed, closed);
  } else if (dead >= 0) {
    report(Trouble::died, dead);
  } else if (missing >= 0 && Clock::now() - started > deadline_) {
    report(Trouble::late, missing);
  }
  throw_if_failed();
}

void Board::report(Trouble trouble, int culprit) noexcept {
  std::uint64_t nothing = 0;
  group_->failure.compare_exchange_strong(
      nothing, Failure{static_cast<std::uint8_t>(trouble), culprit, rank_}.pack());
  wake();
}

void Board::throw_if_failed() const {
  const std::uint64_t word = group_->failure.load();
  if (word == 0) return;
  const Failure failure = Failure::unpack(word);
  std::ostringstream text;
  text << who(failure.culprit);
  switch (static_cast<Trouble>(failure.trouble)) {
    case Trouble::died:
      text << " died";
      break;
    case Trouble::closed:
      text << " closed the communicator";
      break;
    case Trouble::late:
      text << " did not come within " << deadline_.count() << " s";
      break;
    case Trouble::aborted:
      text << " aborted: " << group_->ranks[failure.culprit].reason;
      break;
    case Trouble::none:
      break;
  }
  if (call_.sequence == 0) {
    text << "; no collective was under way on rank " << rank_;
  } else {
    // On the culprit itself, what the rank was in that missed it.
    const bool own = failure.culprit == rank_;
    text << "; rank " << (own ? failure.reporter : rank_) << " was in "
         << (own ? last_calls(failure.reporter) : describe(call_)) << ", the last call of rank "
         << failure.culprit << " was " << last_calls(failure.culprit);
  }
  throw CommError(text.str());
}

void Board::throw_mismatch() {
  std::ostringstream text;
  text << "ranks called different collectives:";
  for (int r = 0; r < size_; ++r) {
    text << (r == 0 ? " " : "; ") << who(r) << " called " << describe(call_of(r));
  }
  // Everybody sees the same calls and throws this text; the word is for whoever calls again.
  abort(text.str());
  throw CommError(text.str());
}

std::string Board::who(int rank) const {
  const std::int32_t pid = group_->ranks[rank].pid.load();
  std::string text = "rank " + std::to_string(rank);
  return pid == 0 ? text : text + " (pid " + std::to_string(pid) + ")";
}

// Gathers and reduces are ordered apart, so both count as the last.
std::string Board::last_calls(int rank) const {
  std::string text;
  for (const BoardMemory* board : {static_cast<const BoardMemory*>(memory_), other_}) {
    const Call* calls = board->ranks[rank].calls;
    const std::uint64_t latest = std::max(calls[0].sequence, calls[1].sequence);
    if (latest > 0) text += (text.empty() ? "" : " and ") + describe(calls[latest & 1]);
  }
  return text.empty() ? "none" : text;
}

void Board::fail(const std::string& reason) {
  abort(reason);
  throw CommError(reason);
}

void Board::abort(const std::string& reason) noexcept {
  if (group_->failure.load() == 0) {
    std::strncpy(group_->ranks[rank_].reason, reason.c_str(), GroupMemory::kReasonBytes - 1);
  }
  report(Trouble::aborted, rank_);
}

void Board::close() noexcept {
  // A forked child, too, lets go of what its parent has; but it is not the rank.
  const std::int32_t pid = group_->ranks[rank_].pid.load();
  if (pid != 0 && pid != getpid()) return;
  group_->ranks[rank_].closed.store(1);
  wake();  // so that who waits for this rank learns it now
}

void Board::wake() const noexcept {
  futex(&memory_->generation, FUTEX_WAKE,
        static_cast<std::uint32_t>(std::numeric_limits<int>::max()), nullptr);
}

}  // namespace shardcomm
