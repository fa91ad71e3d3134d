#include "comm/board.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "comm/polling.h"
#include "shardcomm/error.h"
#include "stream/wait_check.h"

namespace shardcomm {

Board::Board(Group& group, int channel, bool reads_addresses, std::function<bool()> stuck)
    : group_(group),
      memory_(&group.board(channel)),
      other_(&group.board(1 - channel)),
      reads_addresses_(reads_addresses),
      stuck_(std::move(stuck)),
      has_core_(has_core(group.size())),
      calls_(static_cast<std::size_t>(group.size())) {}

void Board::check() const {
  static const Call none;
  group_.throw_if_ended(in_call_ ? call_ : none);
}

void Board::begin(const Call& call) {
  check();
  const std::uint64_t sequence = call_.sequence + 1;
  call_ = call;
  call_.sequence = sequence;
  in_call_ = true;
  posted(group_.rank()).post(call_);
  meet();
  for (int r = 0; r < group_.size(); ++r) {
    // Nobody posts there again before this rank has come to the next call.
    posted(r).read(calls_[static_cast<std::size_t>(r)]);
  }
  for (const Call& theirs : calls_) {
    if (!call_.same_as(theirs)) throw_mismatch();
  }
}

void Board::start_reading() {
  if (!reads_addresses_) return;
  state(group_.rank()).reading.store(1);
  // After it: a rank that leaves sees this rank read, or this rank sees it leave.
  group_.throw_if_failed(call_);
}

void Board::end() noexcept {
  if (!in_call_) return;  // of one rank alone
  BoardMemory::Rank& own = state(group_.rank());
  // Release: who sees them sees the copies before as done. Seen late, `finished` shows this call
  // as pending for a little longer, and a rank that leaves waits a little longer.
  own.finished.store(call_.sequence, std::memory_order_release);
  if (reads_addresses_) own.reading.store(0, std::memory_order_release);
  in_call_ = false;
}

void Board::leave(std::string_view reason) noexcept {
  group_.abort(reason);
  if (!reads_addresses_ || group_.forked()) return;
  state(group_.rank()).reading.store(0);
  for (int r = 0; r < group_.size(); ++r) {
    while (state(r).reading.load() != 0) std::this_thread::yield();  // as long as a copy takes
  }
}

void Board::meet() {
  group_.throw_if_failed(call_);
  const std::uint32_t meeting = ++meetings_;
  posted(group_.rank()).arrival.store(meeting);
  if (all_have_come(meeting)) return wake_sleepers();
  const auto is_over = [&] { return all_have_come(meeting); };
  if (spin(has_core_, is_over)) return;
  const Clock::time_point since = Clock::now();
  if (poll(has_core_, since, is_over)) return;
  Atomic<std::uint64_t>& waiting_since = state(group_.rank()).waiting_since;
  waiting_since.store(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since.time_since_epoch()).count()));
  Waited waited(since);
  while (true) {
    sleep(meeting);
    if (all_have_come(meeting)) break;
    look_for_trouble(meeting, waited);
    check_wait();
  }
  waiting_since.store(0);
}

bool Board::has_come(int rank, std::uint32_t meeting) const {
  return !is_after(meeting, posted(rank).arrival.load());
}

// Each rank says that it has come, and then looks who else has: so the last one, at least, sees
// all.
bool Board::all_have_come(std::uint32_t meeting) const {
  for (int r = 0; r < group_.size(); ++r) {
    if (!has_come(r, meeting)) return false;
  }
  return true;
}

// The last one to come does.
void Board::wake_sleepers() const noexcept {
  if (memory_->sleepers.load() == 0) return;
  memory_->wakes.fetch_add(1);
  wake_all(memory_->wakes);
}

// It is counted, and knows the number of wakes, before it looks once more. So a rank that comes
// after that look finds it counted, and it finds itself woken.
void Board::sleep(std::uint32_t meeting) const {
  memory_->sleepers.fetch_add(1);
  const std::uint32_t wakes = memory_->wakes.load();
  if (!all_have_come(meeting)) sleep_while(memory_->wakes, wakes, kWaitSlice);
  memory_->sleepers.fetch_sub(1);
}

void Board::look_for_trouble(std::uint32_t meeting, Waited& waited) {
  // Before the looks: who has not come by then is late, whatever comes while this rank looks.
  const bool overdue = waited.until_now().count() > group_.deadline_s();
  int closed = group_.closed(group_.rank()) ? group_.rank() : -1;  // by another thread, meanwhile
  int late = -1;
  for (int r = group_.size() - 1; r >= 0; --r) {
    if (has_come(r, meeting)) continue;
    if (group_.closed(r)) closed = r;
    if (!waits_elsewhere(r)) late = r;
  }
  const int dead = group_.find_dead();
  const bool deadlock = is_deadlock(meeting);
  // A rank may have come, and ended in peace, since the first look.
  if (all_have_come(meeting)) return;
  if (closed >= 0) {
    group_.fail(Trouble::closed, closed);
  } else if (dead >= 0) {
    group_.fail(Trouble::died, dead);
  } else if (deadlock || (overdue && late < 0)) {
    group_.fail(Trouble::deadlock, group_.rank());
  } else if (overdue) {
    group_.late(late);
  }
  group_.throw_if_failed(call_);
}

bool Board::waits_elsewhere(int rank) const {
  return is_after(other_->ranks[rank].came_to(), other_->all_came_to(group_.size()));
}

// This rank cannot come to the other channel before this meeting is over, and a rank that waits
// there for this one cannot come here. What ranks say of themselves here stays true: neither
// meeting ends.
bool Board::is_deadlock(std::uint32_t meeting) const {
  const bool stuck = stuck_();
  state(group_.rank()).stuck_in.store(stuck ? meeting : meeting - 1);
  if (!stuck) return false;
  const std::uint32_t theirs = other_->all_came_to(group_.size()) + 1;
  if (other_->ranks[group_.rank()].came_to() == theirs) return false;
  for (int r = 0; r < group_.size(); ++r) {
    const BoardMemory::Rank& elsewhere = other_->ranks[r];
    if (!has_come(r, meeting) && elsewhere.came_to() == theirs &&
        elsewhere.stuck_in.load() == theirs) {
      return true;
    }
  }
  return false;
}

void Board::throw_mismatch() {
  std::ostringstream text;
  text << "ranks called different collectives:";
  for (int r = 0; r < group_.size(); ++r) {
    text << (r == 0 ? " " : "; ") << group_.who(r) << " called " << group_.describe(call_of(r));
  }
  group_.throw_mismatch(text.str(), call_);
}

}  // namespace shardcomm
