// Streams of the host: what is queued runs, in order and to its end, and whoever waits is woken.
#include "shardcomm/stream.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "stream/futex.h"
#include "stream/wait_check.h"
#include "stream/waiting.h"

namespace {

using shardcomm::Clock;
using shardcomm::Event;
using shardcomm::NativeStream;
using shardcomm::Stream;

void require(bool holds, const std::string& claim) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", claim.c_str());
  std::exit(1);
}

void a_stream_that_is_dropped_runs_what_is_queued() {
  for (int round = 0; round < 3; ++round) {
    auto stream = shardcomm::make_thread_stream();
    std::promise<void> dropping;
    std::vector<int> ran;
    stream->enqueue([&](NativeStream) {
      dropping.get_future().wait();
      // Long enough for the other thread to begin with the destructor; right however long that is.
      const auto end = Clock::now() + std::chrono::milliseconds(20);
      while (Clock::now() < end) std::this_thread::yield();
    });
    for (int i = 0; i < 5; ++i) stream->enqueue([&ran, i](NativeStream) { ran.push_back(i); });
    const auto event = stream->record();
    dropping.set_value();
    stream.reset();
    require(ran == std::vector<int>({0, 1, 2, 3, 4}), "all that was queued has run, in order");
    require(event->query(), "the event that was queued last has fired");
  }
}

void a_stream_waits_for_the_event_of_another() {
  const auto first = shardcomm::make_thread_stream();
  const auto second = shardcomm::make_thread_stream();
  std::promise<void> gate;
  int done = 0;
  int seen = -1;
  first->enqueue([&](NativeStream) {
    gate.get_future().wait();
    done = 1;
  });
  second->wait(first->record());
  second->enqueue([&](NativeStream) { seen = done; });
  const auto end = second->record();
  require(!end->wait_for(std::chrono::milliseconds(200)), "the second stream waits for the first");
  gate.set_value();
  end->wait();
  require(seen == 1, "what the first did comes before what the second does");
}

void an_error_skips_what_comes_later_and_every_event_tells_it() {
  const auto stream = shardcomm::make_thread_stream();
  const auto before = stream->record();
  bool ran = false;
  stream->enqueue([](NativeStream) { throw std::runtime_error("lost"); });
  stream->enqueue([&](NativeStream) { ran = true; });
  before->wait();
  for (int i = 0; i < 2; ++i) {
    const auto event = stream->record();
    try {
      event->wait();
      require(false, "an event behind the error throws it");
    } catch (const std::runtime_error& error) {
      require(std::string(error.what()) == "lost", "the error is the operation's own");
    }
  }
  require(!ran, "what is behind an error does not run");
}

// Two threads: the later of them counts.
void whoever_waits_for_an_event_is_woken() {
  using Seconds = std::chrono::duration<double>;
  Seconds least = Seconds::max();
  for (int round = 0; round < 8; ++round) {
    const auto stream = shardcomm::make_thread_stream();
    std::promise<void> gate;
    Clock::time_point fires;
    stream->enqueue([&](NativeStream) {
      gate.get_future().wait();
      fires = Clock::now();
    });
    const auto event = stream->record();
    std::atomic<int> waiting{0};
    std::vector<Clock::time_point> woken(2);
    std::vector<std::thread> threads;
    for (Clock::time_point& at : woken) {
      threads.emplace_back([&] {
        ++waiting;
        event->wait();
        at = Clock::now();
      });
    }
    while (waiting < 2) std::this_thread::yield();
    // Mostly they sleep by now. On a busy machine a yield takes as long as the others want.
    for (const auto end = Clock::now() + std::chrono::milliseconds(1); Clock::now() < end;) {
      std::this_thread::yield();
    }
    gate.set_value();
    for (std::thread& thread : threads) thread.join();
    least = std::min<Seconds>(least, *std::max_element(woken.begin(), woken.end()) - fires);
  }
  require(least < shardcomm::kWaitSlice / 2, "an event that fires wakes all that wait for it");
}

void a_wait_lasts_until_the_event_has_fired_unless_it_is_interrupted() {
  const auto stream = shardcomm::make_thread_stream();
  std::atomic<bool> goes_on{true};
  stream->enqueue([&](NativeStream) {
    while (goes_on) std::this_thread::yield();
  });
  const auto event = stream->record();
  int checks = 0;
  try {
    const shardcomm::WaitCheck check([&] {
      if (++checks == 3) throw std::runtime_error("^C");
    });
    event->wait();
    require(false, "a wait is interrupted");
  } catch (const std::runtime_error& error) {
    require(std::string(error.what()) == "^C", "a wait throws what interrupts it");
  }
  const shardcomm::WaitCheck check([&] {
    if (++checks == 6) goes_on = false;  // several slices later
  });
  event->wait();
  require(event->query() && checks >= 6, "a wait lasts until the event has fired");
}

// Ends by enqueueing; Python's callables, too, take locks when they are let go of.
void what_an_operation_held_is_let_go_of_outside_the_lock() {
  const auto stream = shardcomm::make_thread_stream();
  std::promise<void> ran;
  {
    const std::shared_ptr<void> held(
        nullptr, [&](void*) { stream->enqueue([&](NativeStream) { ran.set_value(); }); });
    stream->enqueue([held](NativeStream) {});
  }
  require(ran.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready,
          "what an operation held may use the stream when it is let go of");
}

// A thread that waits for a stream is stuck there, unless another stream does work of its: given by
// itself, or by what works for it.
void a_thread_is_stuck_only_where_nothing_works_for_it() {
  for (const bool given_by_a_stream : {false, true}) {
    const auto user = shardcomm::caller();
    const auto first = shardcomm::make_thread_stream();
    const auto second = shardcomm::make_thread_stream();
    std::atomic<bool> begun{false};
    std::atomic<bool> goes_on{true};
    const auto give = [&] {
      second->enqueue([&](NativeStream) {
        begun = true;
        while (goes_on) std::this_thread::yield();
      });
    };
    if (!given_by_a_stream) give();
    first->enqueue([&](NativeStream) {
      if (given_by_a_stream) give();
      while (!begun) std::this_thread::yield();
      // The user mostly waits by now.
      auto end = Clock::now() + std::chrono::milliseconds(50);
      while (Clock::now() < end) {
        require(!shardcomm::is_stuck(user), "who has work under way elsewhere is not stuck");
      }
      goes_on = false;
      end = Clock::now() + std::chrono::seconds(20);
      while (!shardcomm::is_stuck(user)) {
        require(Clock::now() < end, "who waits for this stream alone is stuck");
        std::this_thread::yield();
      }
    });
    first->record()->wait();
  }
}

void a_stream_that_its_own_operation_lets_go_of_still_runs_what_is_queued() {
  std::promise<void> enqueued;
  std::promise<int> ran;
  auto stream = shardcomm::make_thread_stream();
  stream->enqueue([&](NativeStream) {
    enqueued.get_future().wait();
    stream.reset();
  });
  stream->enqueue([&](NativeStream) { ran.set_value(1); });
  enqueued.set_value();
  require(ran.get_future().get() == 1, "what was queued runs");
}

// The error of whoever waits for `event`, which is not to come.
std::string refusal(const Event& event) {
  try {
    event.wait();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "none";
}

void streams_that_wait_in_a_ring_are_told() {
  for (const int size : {1, 2, 3}) {
    const std::string refused = "this wait would never end: ";
    std::vector<std::unique_ptr<Stream>> streams;
    for (int i = 0; i < size; ++i) streams.push_back(shardcomm::make_thread_stream());
    std::atomic<int> begun{0};
    std::vector<std::shared_ptr<Event>> ends;
    for (int i = 0; i < size; ++i) {
      Stream* next = streams[static_cast<std::size_t>((i + 1) % size)].get();
      streams[static_cast<std::size_t>(i)]->enqueue([&begun, next, size](NativeStream) {
        ++begun;
        while (begun < size) std::this_thread::yield();
        next->record()->wait();
      });
      ends.push_back(streams[static_cast<std::size_t>(i)]->record());
    }
    for (const auto& end : ends) {
      require(refusal(*end).compare(0, refused.size(), refused) == 0,
              "each stream of the ring, and who waits for it, is told");
    }
  }
}

// Each from an operation of the other, at once: whoever is the second does not wait.
void streams_that_destroy_each_other_end() {
  std::array<std::unique_ptr<Stream>, 2> streams{shardcomm::make_thread_stream(),
                                                 shardcomm::make_thread_stream()};
  std::array<std::promise<void>, 2> destroyed;
  std::atomic<int> begun{-1};  // until both are enqueued
  for (const std::size_t i : {0U, 1U}) {
    streams[i]->enqueue([&, i](NativeStream) {
      while (begun < 0) std::this_thread::yield();
      ++begun;
      while (begun < 2) std::this_thread::yield();
      streams[1 - i].reset();
      destroyed[i].set_value();
    });
  }
  begun = 0;
  for (auto& one : destroyed) one.get_future().wait();
}

void an_operation_may_wait_for_an_event_that_its_stream_has_passed() {
  const auto stream = shardcomm::make_thread_stream();
  const auto before = stream->record();
  bool ran = false;
  stream->enqueue([&](NativeStream) {
    before->wait();
    ran = true;
  });
  stream->record()->wait();
  require(ran, "an event that was recorded before has fired");
}

void an_event_knows_when_it_fired() {
  const auto stream = shardcomm::make_thread_stream();
  const auto first = stream->record(true);
  stream->enqueue([](NativeStream) {
    const auto end = Clock::now() + std::chrono::milliseconds(5);
    while (Clock::now() < end) std::this_thread::yield();
  });
  const auto second = stream->record(true);
  second->wait();
  require(second->seconds_since(*first) >= 0.005, "the time between two events is what passed");
}

}  // namespace

int main() {
  alarm(30);  // a hang is a failure
  a_stream_that_is_dropped_runs_what_is_queued();
  a_stream_waits_for_the_event_of_another();
  an_error_skips_what_comes_later_and_every_event_tells_it();
  whoever_waits_for_an_event_is_woken();
  a_wait_lasts_until_the_event_has_fired_unless_it_is_interrupted();
  what_an_operation_held_is_let_go_of_outside_the_lock();
  a_thread_is_stuck_only_where_nothing_works_for_it();
  a_stream_that_its_own_operation_lets_go_of_still_runs_what_is_queued();
  streams_that_wait_in_a_ring_are_told();
  streams_that_destroy_each_other_end();
  an_operation_may_wait_for_an_event_that_its_stream_has_passed();
  an_event_knows_when_it_fired();
  std::puts("ok");
  return 0;
}
