// Streams of the host: what is queued runs, in order and to its end, and whoever waits is woken.
#include "shardcomm/stream.h"

#include <algorithm>
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
  require(!end->query(), "the second stream waits for the first");
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
    std::promise<void> waiting;
    Clock::time_point woken;
    std::thread waits([&] {
      waiting.set_value();
      event->wait();
      woken = Clock::now();
    });
    waiting.get_future().wait();
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();  // mostly it sleeps by now
    gate.set_value();
    waits.join();
    least = std::min<Seconds>(least, woken - fires);
  }
  require(least < shardcomm::kWaitSlice / 2, "an event that fires wakes those that wait for it");
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
  a_stream_that_is_dropped_runs_what_is_queued();
  a_stream_waits_for_the_event_of_another();
  an_error_skips_what_comes_later_and_every_event_tells_it();
  whoever_waits_for_an_event_is_woken();
  an_event_knows_when_it_fired();
  std::puts("ok");
  return 0;
}
