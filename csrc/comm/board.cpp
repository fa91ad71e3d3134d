#include "comm/board.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "comm/polling.h"
#include "shardcomm/error.h"
#include "stream/wait_check.h"

namespace shardcomm {

Board::Board(Group& group, int channel, bool reads_addresses, std::function<bool()> stuck)
    : group_(group),
      channel_(channel),
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
  post(call);
  meet();
  for (int r = 0; r < group_.size(); ++r) read_call(r);
  for (const Call& theirs : calls_) {
    if (!call_.same_as(theirs)) throw_mismatch();
  }
}

void Board::begin_from_root(const Call& call) {
  if (place_ % kStretch == kStretch - 1) return begin(call);
  Call one_way = call;
  one_way.from_root = true;
  post(one_way);
  meet(call.root);
  // The root compares with who has come before it; who comes after it compares with the root.
  const bool is_root = group_.rank() == call.root;
  for (int r = 0; r < group_.size(); ++r) {
    if (r != call.root && !(is_root && has_come(r, meetings_))) continue;
    read_call(r);
    if (!call_.same_as(call_of(r))) throw_mismatch();
  }
}

void Board::require_one_place() {
  for (int r = 0; r < group_.size(); ++r) {
    if (call_of(r).recv == call_.recv) continue;
    group_.throw_mismatch("ranks " + std::to_string(group_.number(group_.rank())) + " and " +
                              std::to_string(group_.number(r)) +
                              " each wrote a share of a buffer, and it is not one buffer of both",
                          call_);
  }
}

void Board::post(const Call& call) {
  check();
  const std::uint64_t sequence = call_.sequence + 1;
  call_ = call;
  call_.sequence = sequence;
  in_call_ = true;
  ends_stretch_ = false;
  posted(group_.rank()).post(call_);
}

// Nobody posts there again before this rank has come to the end of the next stretch.
void Board::read_call(int rank) { posted(rank).read(calls_[static_cast<std::size_t>(rank)]); }

void Board::start_reading() {
  if (!reads_addresses_) return;
  state(group_.rank()).reading.store(1);
  // Only after the store: a rank that leaves sees this rank read, or this rank sees it leave.
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
  const int next_stretch = place_ < kStretch ? kStretch : 0;
  place_ = ends_stretch_ ? next_stretch : place_ + 1;
}

void Board::leave(std::string_view reason) noexcept {
  group_.abort(reason);
  if (!reads_addresses_ || group_.forked()) return;
  state(group_.rank()).reading.store(0);
  for (int r = 0; r < group_.size(); ++r) {
    while (state(r).reading.load() != 0) std::this_thread::yield();  // as long as a copy takes
  }
}

void Board::meet() { meet(kAll); }

void Board::meet(int awaited) {
  group_.throw_if_failed(call_);
  awaited_ = awaited;
  if (awaited == kAll) ends_stretch_ = true;
  const std::uint64_t meeting = ++meetings_;
  posted(group_.rank()).arrival.store(meeting);
  if (is_over(meeting)) return wake_sleepers();
  const auto is_over = [&] { return this->is_over(meeting); };
  if (spin(has_core_, is_over)) return;
  const Clock::time_point since = Clock::now();
  if (poll(has_core_, since, is_over)) return;
  Atomic<std::uint64_t>& waiting_since = state(group_.rank()).waiting_since;
  waiting_since.store(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since.time_since_epoch()).count()));
  Waited waited(since);
  while (true) {
    sleep(meeting);
    if (is_over()) break;
    look_for_trouble(meeting, waited);
    check_wait();
  }
  waiting_since.store(0);
}

bool Board::has_come(int rank, std::uint64_t meeting) const {
  return posted(rank).arrival.load() >= meeting;
}

// Whether those have come for whom this rank waits. Each rank says that it has come, and then looks
// who else has: so the last one, at least, sees all.
bool Board::is_over(std::uint64_t meeting) const {
  for (int r = 0; r < group_.size(); ++r) {
    if (awaits(r) && !has_come(r, meeting)) return false;
  }
  return true;
}

// The last rank to come calls it.
void Board::wake_sleepers() const noexcept {
  if (memory_->sleepers.load() == 0) return;
  memory_->wakes.fetch_add(1);
  wake_all(memory_->wakes);
}

// This rank counts as a sleeper, and has read the number of wakes, before it looks once more. So a
// rank that comes after that look finds the sleeper and changes the number, and this rank does not
// sleep on.
void Board::sleep(std::uint64_t meeting) const {
  memory_->sleepers.fetch_add(1);
  const std::uint32_t wakes = memory_->wakes.load();
  if (!is_over(meeting)) sleep_while(memory_->wakes, wakes, kWaitSlice);
  memory_->sleepers.fetch_sub(1);
}

void Board::look_for_trouble(std::uint64_t meeting, Waited& waited) {
  // Before the looks: who has not come by then is late, whatever comes while this rank looks.
  const bool overdue = waited.until_now().count() > group_.deadline_s();
  int closed = group_.closed(group_.rank()) ? group_.rank() : -1;  // by another thread, meanwhile
  int late = -1;
  for (int r = group_.size() - 1; r >= 0; --r) {
    if (has_come(r, meeting)) continue;
    if (group_.closed(r)) closed = r;
    // One for which this rank waits, if there is one; else one for which those may wait.
    if ((late < 0 || awaits(r) || !awaits(late)) && !waits_elsewhere(r)) late = r;
  }
  const int dead = group_.find_dead();
  const bool deadlock = is_deadlock(meeting);
  // A rank may have come, and ended in peace, since the first look.
  if (is_over(meeting)) return;
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
  const std::uint64_t meeting = other_->ranks[rank].came_to();
  if (other_->all_came_to(group_.size()) >= meeting) return false;
  const std::optional<LastCall> there = group_.last_call(rank, 1 - channel_);
  if (!there || !there->call.from_root) return true;
  return other_->ranks[there->call.root].came_to() < meeting;
}

bool Board::waits_elsewhere_for_this(int rank) const {
  const BoardMemory::Rank& elsewhere = other_->ranks[rank];
  const std::uint64_t meeting = elsewhere.came_to();
  if (other_->ranks[group_.rank()].came_to() >= meeting) return false;
  if (elsewhere.stuck_in.load() != meeting) return false;
  const std::optional<LastCall> there = group_.last_call(rank, 1 - channel_);
  return !there || !there->call.from_root || there->call.root == group_.rank();
}

// This rank cannot come to the other channel before this meeting is over, and a rank that waits
// there for this one cannot come here. What ranks say of themselves here stays true: neither
// meeting ends.
bool Board::is_deadlock(std::uint64_t meeting) const {
  const bool stuck = stuck_();
  state(group_.rank()).stuck_in.store(stuck ? meeting : meeting - 1);
  if (!stuck) return false;
  for (int r = 0; r < group_.size(); ++r) {
    if (awaits(r) && !has_come(r, meeting) && waits_elsewhere_for_this(r)) return true;
  }
  return false;
}

void Board::throw_mismatch() {
  std::ostringstream text;
  text << "ranks called different collectives:";
  const char* before = " ";
  for (int r = 0; r < group_.size(); ++r) {
    const Call& call = r == group_.rank() ? call_ : call_of(r);
    if (call.sequence != call_.sequence) continue;  // it has not come, or nobody has looked
    text << before << group_.who(r) << " called " << group_.describe(call);
    before = "; ";
  }
  group_.throw_mismatch(text.str(), call_);
}

}  // namespace shardcomm
