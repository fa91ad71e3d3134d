// What must hold of the ranks, between any two steps and at the end: the properties of
// docs/protocol.md.
#include <cstdlib>

#include "ranks.h"

namespace model {
namespace {

// GroupMemory::failure, as group.cpp packs it.
Trouble trouble_of(std::uint64_t failure) { return static_cast<Trouble>(failure & 0xff); }
int culprit_of(std::uint64_t failure) { return static_cast<int>(failure >> 8 & 0xffffff); }

}  // namespace

void Ranks::check_call(const Call& call, int rank, int channel, const char* where) const {
  const int variant = static_cast<int>(call.count / 1000) - 1;
  const Call whole =
      call_by(rank, channel, call.sequence, variant, call.op == shardcomm::Op::barrier);
  if (call.same_as(whole) && call.send == whole.send && call.recv == whole.recv &&
      call.handle == whole.handle) {
    return;
  }
  violate("P4",
          std::string(where) + " gives a torn call of " + rank_name(rank) + ": " + describe(call));
}

// The calls that an error tells of are whole, and what it blames is the first failure.
void Ranks::check_error(const std::string& text, int rank) const {
  for (std::size_t at = text.find("count "); at != std::string::npos;
       at = text.find("count ", at + 1)) {
    const long count = std::strtol(text.c_str() + at + 6, nullptr, 10);
    const long sequence = std::strtol(text.c_str() + text.find('#', at) + 1, nullptr, 10);
    if (count % 1000 != sequence) violate("P4", "an error tells of a torn call: " + text);
  }
  const auto begins = [&](const std::string& words) { return text.rfind(words, 0) == 0; };
  if (begins("ranks called different collectives:")) {
    if (!program_.calls_differ) violate("P3", "the calls do not differ: " + text);
    return;
  }
  if (text.find(" each wrote a share of ") != std::string::npos) {
    if (!program_.windows_differ) violate("P3", "the windows do not differ: " + text);
    return;
  }
  const std::uint64_t failure = group_->failure.now();
  const std::string culprit = rank_name(culprit_of(failure));
  if (begins(rank_name(rank) + " has closed this communicator")) {
    if (!memory_.ranks[static_cast<std::size_t>(rank)].closes) violate("P3", text);
    return;
  }
  bool is_right = false;
  switch (trouble_of(failure)) {
    case Trouble::none:
    case Trouble::lost_hosts:
    case Trouble::late_hosts:
      break;
    case Trouble::died:
      is_right = begins(culprit + " died;");
      break;
    case Trouble::late:
      is_right = begins(culprit + " did not come within");
      break;
    case Trouble::closed:
      is_right = begins(culprit + " closed the communicator;");
      break;
    case Trouble::aborted:
      is_right = begins(culprit + " aborted: by hand;") ||
                 begins(culprit + " aborted: interrupted;") || begins(culprit + " aborted: rank");
      break;
    case Trouble::mismatch:  // said above
      break;
    case Trouble::deadlock:
      is_right = begins("ranks wait for each other in different collectives:");
      break;
  }
  if (!is_right) violate("P3", rank_name(rank) + " does not name the first failure: " + text);
}

// Called when the failure word has just been written.
void Ranks::check_failure(int reporter_thread) const {
  const std::uint64_t failure = group_->failure.now();
  const Trouble trouble = trouble_of(failure);
  const int culprit = culprit_of(failure);
  const std::string name = rank_name(culprit);
  if (reporter_thread < 0 || culprit >= program_.ranks) violate("P3", "nobody has failed");
  if ((program_.troubles & may(trouble)) == 0) {
    violate("P3", name + " is blamed for what cannot be (" +
                      std::to_string(static_cast<int>(trouble)) + ")");
  }
  const RankMemory& blamed = memory_.ranks[static_cast<std::size_t>(culprit)];
  const ThreadMemory& reporter = memory_.threads[static_cast<std::size_t>(reporter_thread)];
  const auto c = static_cast<std::size_t>(reporter.channel);
  const int other = 1 - reporter.channel;
  const int self = rank_of(reporter_thread);
  switch (trouble) {
    case Trouble::none:
    case Trouble::lost_hosts:  // there are none here
    case Trouble::late_hosts:
      return;
    case Trouble::died:
      if (!has_died(culprit)) violate("P3", name + " is called dead, and lives");
      if (blamed.passed[c] >= reporter.meeting) {
        violate("P3", name + " is called dead, and had come: it died later");
      }
      return;
    case Trouble::closed:
      if (!blamed.closes) violate("P3", name + " is said to have closed, and has not");
      if (blamed.passed_before_close[c] >= reporter.meeting) {
        violate("P3", name + " is blamed for closing, and had come: it closed later");
      }
      return;
    case Trouble::aborted:
      if (!blamed.aborts) violate("P3", name + " is said to have aborted, and has not");
      return;
    case Trouble::mismatch:
      if (!program_.calls_differ && !program_.windows_differ)
        violate("P3", "ranks are said to differ, and do not");
      return;
    case Trouble::late: {
      if ((reporter.missing >> culprit & 1) == 0) {
        violate("P3", name + " is called late, and had come when the deadline passed");
      }
      const std::uint32_t waits = reporter.elsewhere[static_cast<std::size_t>(culprit)];
      if (waits != 0 && waits == waits_in(culprit, other)) {
        violate("P3", name + " is called late, and itself waits for others");
      }
      return;
    }
    case Trouble::deadlock: {
      if (is_overdue(reporter_thread)) return;
      for (int r = 0; r < program_.ranks; ++r) {
        const std::uint32_t waits = waits_in(r, other);
        const Mask theirs =
            memory_.ranks[static_cast<std::size_t>(r)].awaits[static_cast<std::size_t>(other)];
        const Mask own = memory_.ranks[static_cast<std::size_t>(self)].awaits[c];
        if (waits != 0 && (own >> r & 1) != 0 && (theirs >> self & 1) != 0 &&
            !has_come(r, reporter.channel, reporter.meeting) && !has_come(self, other, waits)) {
          return;
        }
      }
      violate("P3", "ranks are said to wait for each other, and do not");
    }
  }
}

void Ranks::look(int thread) {
  Mask closed = 0;
  for (int r = 0; r < program_.ranks; ++r) closed |= group_->ranks[r].closed.now() << r;
  if (closed != memory_.closed) {
    memory_.closed = closed;
    owe_wakes(thread);
  }
  const std::uint64_t failure = group_->failure.now();
  if (failure == memory_.failure) return;
  if (memory_.failure != 0) violate("P2", "the first failure is overwritten");
  memory_.failure = failure;
  owe_wakes(thread);
  check_failure(thread);
}

void Ranks::time_passes() {
  for (int t = 0; t < threads(); ++t) {
    ThreadMemory& thread = memory_.threads[static_cast<std::size_t>(t)];
    if (thread.meeting == 0 || !is_waiting_for_time(t)) continue;
    for (int r = 0; r < program_.ranks; ++r) {
      if (has_come(r, thread.channel, thread.meeting)) continue;
      thread.missing |= 1U << r;
      thread.elsewhere[static_cast<std::size_t>(r)] = waits_in(r, 1 - thread.channel);
    }
  }
}

void Ranks::died(int rank) { store_from_outside(&deaths_[rank], 1); }

void Ranks::ended() {
  if (!program_.all_throw) return;
  for (int r = 0; r < program_.ranks; ++r) {
    if (!is_halted(r) && !memory_.ranks[static_cast<std::size_t>(r)].threw) {
      violate("P2", rank_name(r) + " never learns of the failure");
    }
  }
}

}  // namespace model
