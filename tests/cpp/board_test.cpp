// What a rank leaves behind that is stopped, or ends, in the middle of a meeting: written by hand
// into the memory that ranks share, as it would have written it.
#include "comm/board.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "shardcomm/error.h"
#include "stream/wait_check.h"

namespace {

using shardcomm::Board;
using shardcomm::BoardMemory;
using shardcomm::Call;
using shardcomm::CommError;
using shardcomm::Group;
using shardcomm::GroupMemory;
using shardcomm::Op;

void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::exit(1);
}

// Zeroed memory for a T of so many bytes, which forked children share.
template <class T>
std::shared_ptr<T> zeroed(std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(data != MAP_FAILED, "there is memory");
  return {static_cast<T*>(data), [bytes](T* held) { munmap(held, bytes); }};
}

// A group of two, seen by rank 0; rank 1 is what the test writes.
struct Pair {
  static constexpr int kSize = 2;
  double deadline_s = 0.2;
  std::shared_ptr<GroupMemory> group_memory = zeroed<GroupMemory>(GroupMemory::bytes(kSize));
  std::shared_ptr<BoardMemory> gathers = zeroed<BoardMemory>(BoardMemory::bytes(kSize));
  std::shared_ptr<BoardMemory> reduces = zeroed<BoardMemory>(BoardMemory::bytes(kSize));
  std::function<bool(int)> has_ended = [](int) { return false; };
  Group group{
      group_memory.get(), {gathers.get(), reduces.get()}, 0, kSize, deadline_s, [this](int rank) {
        return has_ended(rank);
      }};
  bool stuck = false;
  Board board{group, 0, /*reads_addresses=*/false, [this] { return stuck; }};

  Call barrier(std::uint64_t sequence) const {
    Call call;
    call.op = Op::barrier;
    call.sequence = sequence;
    return call;
  }
  // Rank 1 posts a barrier and comes to its meeting, and is stopped before it can wake who sleeps.
  void comes(std::uint32_t meeting) {
    // A stretch is one call long here.
    auto& posted = gathers->ranks[1].calls[meeting % 2 == 1 ? 0 : shardcomm::kStretch];
    posted.post(barrier(meeting));
    posted.arrival.store(meeting);
  }
};

std::string what_rank_0_hears(Pair& pair) {
  try {
    pair.board.begin(pair.barrier(0));
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

// It wakes nobody: rank 0, which has slept already, finds by itself that all have come.
void a_rank_that_came_last_and_was_stopped_keeps_nobody_waiting() {
  Pair pair{20.0};
  pair.has_ended = [&](int) {
    pair.comes(1);
    return false;
  };
  const std::string heard = what_rank_0_hears(pair);
  require(heard.empty(), "all have come: " + heard);
}

void a_rank_that_was_stopped_before_it_came_is_late() {
  Pair pair;
  Call call = pair.barrier(1);
  call.tag = 7;
  pair.gathers->ranks[1].calls[0].post(call);
  const std::string heard = what_rank_0_hears(pair);
  require(heard ==
              "rank 1 did not come within 0.2 s; rank 0 was in barrier() #1, the last call of "
              "rank 1 was barrier(tag 7) #1",
          heard);
  // Another rank, and who only reads what they say, tells of that deadline and not of its own.
  for (const double deadline_s : {300.0, 0.0}) {
    const Group theirs{pair.group_memory.get(),
                       {pair.gathers.get(), pair.reduces.get()},
                       1,
                       Pair::kSize,
                       deadline_s,
                       [](int) { return false; }};
    require(theirs.failure() == "rank 1 did not come within 0.2 s", *theirs.failure());
  }
}

void a_rank_that_waits_in_the_other_channel_is_not_late() {
  Pair pair;
  pair.reduces->ranks[1].calls[0].arrival.store(1);
  const std::string heard = what_rank_0_hears(pair);
  require(heard.find("ranks wait for each other") == 0, "nobody is blamed: " + heard);
}

void half_a_call_is_never_read() {
  Pair pair;
  pair.comes(1);
  pair.board.begin(pair.barrier(0));
  pair.board.end();
  // Stopped while it writes its second call: there is no version, and some words are new.
  Call second = pair.barrier(2);
  second.count = 7;
  auto& torn = pair.gathers->ranks[1].calls[shardcomm::kStretch];
  torn.post(second);
  reinterpret_cast<shardcomm::Atomic<std::uint64_t>*>(&torn)->store(0);
  const auto last = pair.group.last_call(1, 0);
  require(last.has_value() && last->call.sequence == 1, "the whole call before it is read");
}

void a_rank_that_died_is_told() {
  Pair pair;
  pair.has_ended = [](int rank) { return rank == 1; };
  const std::string heard = what_rank_0_hears(pair);
  require(heard.find("rank 1 died") == 0, heard);
}

// Neither comes to the other's channel before its own meeting is over.
void ranks_that_wait_for_each_other_learn_it_long_before_the_deadline() {
  Pair pair{20.0};
  pair.stuck = true;
  pair.reduces->ranks[1].calls[0].arrival.store(1);
  pair.reduces->ranks[1].stuck_in.store(1);
  const auto begin = shardcomm::Clock::now();
  const std::string heard = what_rank_0_hears(pair);
  require(heard.find("ranks wait for each other") == 0, heard);
  require(shardcomm::Clock::now() - begin < std::chrono::seconds(10), "it is found at once");
}

// Another thread of this rank may call what rank 1 waits for.
void a_rank_that_is_not_stuck_waits_on() {
  Pair pair{20.0};
  pair.reduces->ranks[1].calls[0].arrival.store(1);
  pair.reduces->ranks[1].stuck_in.store(1);
  int looks = 0;
  pair.has_ended = [&](int) {
    if (++looks == 3) pair.comes(1);
    return false;
  };
  require(what_rank_0_hears(pair).empty(), "rank 1 has come in the end");
}

void a_long_reason_is_cut_between_characters() {
  Pair pair;
  std::string reason;
  for (int i = 0; i < 1000; ++i) reason += "\u00e9";
  pair.group.abort(reason);
  const std::string heard = what_rank_0_hears(pair);
  const std::size_t begin = heard.find("\u00e9");
  const std::size_t end = heard.find("; ");
  require(begin != std::string::npos && (end - begin) % 2 == 0 && end - begin > 1000,
          "whole characters are told, as many as there is room for");
}

// It dies, and closes, once it is done; who waited had looked at it before it came.
void a_rank_that_comes_while_another_looks_for_trouble_is_not_blamed() {
  for (const bool closes : {false, true}) {
    Pair pair;
    pair.has_ended = [&](int) {
      pair.comes(1);
      if (closes) pair.group_memory->ranks[1].closed.store(1);
      return !closes;
    };
    if (closes) pair.group_memory->ranks[1].closed.store(1);
    const std::string heard = what_rank_0_hears(pair);
    require(heard.empty(), "the meeting was complete: " + heard);
  }
}

// How long rank 0, a process, still waits in its first meeting once `end` was called; the least of
// a few. Only the clock tells a wake that is missing: the end of a slice of the wait makes up for
// it.
void ends_at_once(const char* what, const std::function<void(Pair&)>& end) {
  using shardcomm::Clock;
  Clock::duration least = Clock::duration::max();
  for (int round = 0; round < 8; ++round) {
    Pair pair;
    const auto returned = zeroed<shardcomm::Atomic<Clock::rep>>(sizeof(Clock::rep));
    const pid_t rank_0 = fork();
    if (rank_0 == 0) {
      alarm(60);
      Group group{pair.group_memory.get(),
                  {pair.gathers.get(), pair.reduces.get()},
                  0,
                  Pair::kSize,
                  /*deadline_s=*/20,
                  [](int) { return false; }};
      try {
        Board(group, 0, false, [] { return false; }).begin(pair.barrier(0));
      } catch (const CommError&) {
      }
      returned->store(Clock::now().time_since_epoch().count());
      _exit(0);
    }
    const auto since = Clock::now();
    while (pair.gathers->ranks[0].waiting_since.load() == 0) {
      require(Clock::now() - since < std::chrono::seconds(20), "a rank that waits says so");
      std::this_thread::yield();
    }
    const auto begin = Clock::now().time_since_epoch().count();
    end(pair);
    waitpid(rank_0, nullptr, 0);
    least = std::min(least, Clock::duration(returned->load() - begin));
  }
  require(least < shardcomm::kWaitSlice / 2, what);
}

Group rank_1_of(Pair& pair) {
  return {pair.group_memory.get(),
          {pair.gathers.get(), pair.reduces.get()},
          1,
          Pair::kSize,
          /*deadline_s=*/0.2,
          [](int) { return false; }};
}

void the_first_failure_and_the_first_reason_stay() {
  Pair pair;
  Group other = rank_1_of(pair);
  pair.group.abort("first");
  pair.group.abort("second");
  other.abort("third");
  for (const Group* group : {&pair.group, &other}) {
    try {
      group->throw_if_failed({});
      require(false, "the group has failed");
    } catch (const CommError& error) {
      require(std::string(error.what()).find("rank 0 aborted: first;") == 0, error.what());
    }
  }
}

void what_a_rank_did_last_is_told_while_it_waits_and_afterwards() {
  Pair pair;
  const auto waiting_since = [&] { return pair.gathers->ranks[0].waiting_since.load(); };
  pair.has_ended = [&](int) {  // while it waits
    require(waiting_since() > 0, "a rank that sleeps says since when");
    require(pair.group.last_call(0, 0)->pending, "its call is pending");
    pair.comes(1);
    return false;
  };
  pair.board.begin(pair.barrier(0));
  require(pair.group.last_call(0, 0)->pending, "a call that has begun is pending");
  pair.board.end();
  require(waiting_since() == 0, "a rank that goes on does not wait");
  require(!pair.group.last_call(0, 0)->pending, "a call that has ended is not pending");
  pair.comes(2);
  pair.board.begin(pair.barrier(0));
  pair.board.end();
  require(pair.group.last_call(0, 0)->call.sequence == 2, "the latest call is told");
  require(!pair.group.last_call(0, 1).has_value(), "the other channel has had none");
}

// A call is there for all before its rank has come: who sees all come reads all calls.
void calls_are_compared_once_all_have_come() {
  Pair pair;
  Call theirs = pair.barrier(1);
  theirs.tag = 7;
  pair.gathers->ranks[1].calls[0].post(theirs);
  pair.gathers->ranks[1].calls[0].arrival.store(1);
  const std::string heard = what_rank_0_hears(pair);
  require(heard ==
              "ranks called different collectives: rank 0 called barrier() #1; rank 1 called "
              "barrier(tag 7) #1",
          heard);
}

Call broadcast_from(int root) {
  Call call;
  call.op = Op::broadcast;
  call.root = root;
  return call;
}

// Rank 1 never comes: the deadline ends the call in which all meet, and none before.
void a_root_waits_for_the_others_at_the_end_of_a_stretch_alone() {
  Pair pair;
  for (int i = 1; i < shardcomm::kStretch; ++i) {
    pair.board.begin_from_root(broadcast_from(0));
    pair.board.end();
  }
  std::string heard;
  try {
    pair.board.begin_from_root(broadcast_from(0));
  } catch (const CommError& error) {
    heard = error.what();
  }
  require(heard.find("rank 1 did not come within 0.2 s") == 0, heard);
}

void a_root_that_comes_later_sees_another_call() {
  Pair pair;
  pair.comes(1);
  std::string heard;
  try {
    pair.board.begin_from_root(broadcast_from(0));
  } catch (const CommError& error) {
    heard = error.what();
  }
  require(
      heard ==
          "ranks called different collectives: rank 0 called broadcast(u8, count 0, root 0) #1; "
          "rank 1 called barrier() #1",
      heard);
}

// Its deadline passes while it is stopped. The others could not come to a rank that does not run.
void a_rank_that_was_stopped_itself_blames_nobody_for_it() {
  constexpr double kDeadlineS = 1;
  Pair pair;
  const auto looks = zeroed<shardcomm::Atomic<int>>(sizeof(int));
  const pid_t rank_0 = fork();
  if (rank_0 == 0) {
    alarm(60);
    Group group{pair.group_memory.get(),
                {pair.gathers.get(), pair.reduces.get()},
                0,
                Pair::kSize,
                kDeadlineS,
                [&](int) { return looks->fetch_add(1), false; }};
    try {
      Board(group, 0, false, [] { return false; }).begin(pair.barrier(0));
    } catch (const CommError& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  const auto looks_again = [&] {
    const int before = looks->load();
    while (looks->load() < before + 2 && waitpid(rank_0, &status, WNOHANG) == 0) usleep(1000);
  };
  looks_again();
  kill(rank_0, SIGSTOP);
  waitpid(rank_0, &status, WUNTRACED);
  require(WIFSTOPPED(status), "it is stopped");
  std::this_thread::sleep_for(std::chrono::duration<double>(1.5 * kDeadlineS));
  kill(rank_0, SIGCONT);
  looks_again();
  pair.comes(1);
  if (WIFSTOPPED(status)) waitpid(rank_0, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "it waits on, and rank 1 comes");
}

void whoever_waits_is_woken() {
  ends_at_once("the rank that comes last wakes those that wait", [](Pair& pair) {
    Group group = rank_1_of(pair);
    Board(group, 0, false, [] { return false; }).begin(pair.barrier(0));
  });
  ends_at_once("a rank that aborts wakes those that wait",
               [](Pair& pair) { rank_1_of(pair).abort("enough"); });
  ends_at_once("a rank that closes wakes those that wait",
               [](Pair& pair) { rank_1_of(pair).close(); });
}

}  // namespace

int main() {
  alarm(30);  // a hang is a failure
  a_rank_that_came_last_and_was_stopped_keeps_nobody_waiting();
  a_rank_that_was_stopped_before_it_came_is_late();
  a_rank_that_waits_in_the_other_channel_is_not_late();
  half_a_call_is_never_read();
  a_rank_that_died_is_told();
  ranks_that_wait_for_each_other_learn_it_long_before_the_deadline();
  a_rank_that_is_not_stuck_waits_on();
  a_long_reason_is_cut_between_characters();
  a_rank_that_comes_while_another_looks_for_trouble_is_not_blamed();
  the_first_failure_and_the_first_reason_stay();
  what_a_rank_did_last_is_told_while_it_waits_and_afterwards();
  calls_are_compared_once_all_have_come();
  a_root_waits_for_the_others_at_the_end_of_a_stretch_alone();
  a_root_that_comes_later_sees_another_call();
  a_rank_that_was_stopped_itself_blames_nobody_for_it();
  whoever_waits_is_woken();
  std::puts("ok");
  return 0;
}
