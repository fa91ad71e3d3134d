// What a rank leaves behind that is stopped, or ends, in the middle of a meeting: written by hand
// into the memory that ranks share, as it would have written it.
#include "comm/board.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
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

// Zeroed memory for a T of so many bytes.
template <class T>
std::shared_ptr<T> zeroed(std::size_t bytes) {
  void* data = ::operator new(bytes, std::align_val_t{64});
  std::fill_n(static_cast<unsigned char*>(data), bytes, static_cast<unsigned char>(0));
  return {static_cast<T*>(data), [](T* held) { ::operator delete(held, std::align_val_t{64}); }};
}

// A group of two, seen by rank 0; rank 1 is what the test writes.
struct Pair {
  static constexpr int kSize = 2;
  std::shared_ptr<GroupMemory> group_memory = zeroed<GroupMemory>(GroupMemory::bytes(kSize));
  std::shared_ptr<BoardMemory> gathers = zeroed<BoardMemory>(BoardMemory::bytes(kSize));
  std::shared_ptr<BoardMemory> reduces = zeroed<BoardMemory>(BoardMemory::bytes(kSize));
  std::function<int()> find_dead = [] { return -1; };
  Group group{group_memory.get(), {gathers.get(), reduces.get()}, 0, kSize,
              /*deadline_s=*/0.2, [this] { return find_dead(); }};
  Board board{group, 0, /*reads_addresses=*/false, [] { return false; }};

  Call barrier(std::uint64_t sequence) const {
    Call call;
    call.op = Op::barrier;
    call.sequence = sequence;
    return call;
  }
  // Rank 1 posts a barrier and comes to its meeting, and is stopped before it can say that all
  // have.
  void comes(std::uint32_t meeting) {
    gathers->ranks[1].calls[meeting & 1].post(barrier(meeting));
    gathers->arrival(1, kSize).store(meeting);
  }
};

void a_rank_that_came_last_and_was_stopped_keeps_nobody_waiting() {
  Pair pair;
  pair.comes(1);
  pair.board.begin(pair.barrier(0));
  pair.board.end();
  require(pair.gathers->completed.load() == 1,
          "the rank that is not stopped completes the meeting");
}

std::string what_rank_0_hears(Pair& pair) {
  try {
    pair.board.begin(pair.barrier(0));
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

void a_rank_that_was_stopped_before_it_came_is_late() {
  Pair pair;
  pair.gathers->ranks[1].calls[1].post(pair.barrier(1));
  const std::string heard = what_rank_0_hears(pair);
  require(heard.find("rank 1 did not come within 0.2 s") == 0, "rank 1 is late: " + heard);
}

void a_rank_that_waits_in_the_other_channel_is_not_late() {
  Pair pair;
  pair.reduces->arrival(1, Pair::kSize).store(1);
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
  auto& torn = pair.gathers->ranks[1].calls[0];
  torn.post(second);
  reinterpret_cast<shardcomm::Atomic<std::uint64_t>*>(&torn)->store(0);
  const auto last = pair.group.last_call(1, 0);
  require(last.has_value() && last->call.sequence == 1, "the whole call before it is read");
}

// It dies, and closes, once it is done; who waited had looked at it before it came.
void a_rank_that_comes_while_another_looks_for_trouble_is_not_blamed() {
  for (const bool closes : {false, true}) {
    Pair pair;
    pair.find_dead = [&] {
      pair.comes(1);
      if (closes) pair.group_memory->ranks[1].closed.store(1);
      return closes ? -1 : 1;
    };
    if (closes) pair.group_memory->ranks[1].closed.store(1);
    const std::string heard = what_rank_0_hears(pair);
    require(heard.empty(), "the meeting was complete: " + heard);
  }
}

// A wake that is missing is made up for by the end of a slice of the wait, which nobody notices but
// by the clock.
class Waits {
 public:
  // How long rank 0 still waited, in its first meeting, once `end` was called; the least of a few.
  static void end_at_once(const char* what, const std::function<void(Pair&)>& end) {
    using Seconds = std::chrono::duration<double>;
    Seconds least = Seconds::max();
    for (int round = 0; round < 8; ++round) {
      Pair pair;
      shardcomm::Clock::time_point returned;
      std::thread rank_0([&] {
        what_rank_0_hears(pair);
        returned = shardcomm::Clock::now();
      });
      while (pair.gathers->sleepers.load() == 0) std::this_thread::yield();
      const auto begin = shardcomm::Clock::now();
      end(pair);
      rank_0.join();
      least = std::min<Seconds>(least, returned - begin);
    }
    require(least < shardcomm::kWaitSlice / 2, what);
  }
};

Group rank_1_of(Pair& pair) {
  return {pair.group_memory.get(),
          {pair.gathers.get(), pair.reduces.get()},
          1,
          Pair::kSize,
          /*deadline_s=*/0.2,
          [] { return -1; }};
}

void whoever_waits_is_woken() {
  Waits::end_at_once("the rank that comes last wakes those that wait", [](Pair& pair) {
    Group group = rank_1_of(pair);
    Board(group, 0, false, [] { return false; }).begin(pair.barrier(0));
  });
  Waits::end_at_once("a rank that aborts wakes those that wait",
                     [](Pair& pair) { rank_1_of(pair).abort("enough"); });
  Waits::end_at_once("a rank that closes wakes those that wait",
                     [](Pair& pair) { rank_1_of(pair).close(); });
}

}  // namespace

int main() {
  a_rank_that_came_last_and_was_stopped_keeps_nobody_waiting();
  a_rank_that_was_stopped_before_it_came_is_late();
  a_rank_that_waits_in_the_other_channel_is_not_late();
  half_a_call_is_never_read();
  a_rank_that_comes_while_another_looks_for_trouble_is_not_blamed();
  whoever_waits_is_woken();
  std::puts("ok");
  return 0;
}
