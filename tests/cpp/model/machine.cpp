// What the protocol uses of the machine: clocks, sleep, and the scheduler.
#include <sched.h>

#include <thread>

#include "run.h"

namespace shardcomm {

using namespace model;

// Two readings in one wait are more than the time for spinning apart, and less than a deadline.
Clock::time_point Clock::now() {
  if (running < 0) return Clock::time_point();
  Fiber& fiber = me();
  fiber.last_load = kNone;
  if (!fiber.clocked) {
    fiber.clocked = true;
    fiber.since = epoch;
  }
  remember(fiber, epoch > fiber.since ? 2 : 1);
  const int reads = fiber.clock_reads < 3 ? fiber.clock_reads++ : 3;
  return Clock::time_point(std::chrono::hours(24) * static_cast<int>(epoch) +
                           std::chrono::microseconds(30) * reads);
}

void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::nanoseconds) {
  const WordId id = id_of(&word);
  note_use(id, false);
  before_access("goes to sleep on", id);
  Fiber& fiber = me();
  fiber.last_load = kNone;
  if (raw(&word, 4) == value) {
    fiber.state = State::asleep;
    fiber.waits_on = id;
    fiber.doing = "goes on after its sleep on";
    // Awake, it looks at everything anew.
    fiber.history = mix(mix(fiber.locals, id), value);
    fiber.clock_reads = 3;
    go_on();
  }
  fiber.clock_reads = 3;
  fiber.history = mix(mix(fiber.locals, id), mix(value, 1));
}

std::chrono::microseconds polling_time() { return std::chrono::microseconds(world.spins ? 1 : 0); }

void wake_all(const Atomic<std::uint32_t>& word) noexcept {
  if (running < 0) return;
  const WordId id = id_of(&word);
  before_access("wakes those on", id);
  me().last_load = kNone;
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (fiber.state == State::asleep && fiber.waits_on == id) {
      fiber.state = State::ready;
      fiber.owed = false;
    }
  }
  remember(me(), id);
}

}  // namespace shardcomm

// In `Board::leave`: waits until what was loaded last has changed.
extern "C" int sched_yield() noexcept {
  using namespace model;
  if (running < 0 || world.spins) return 0;
  Fiber& fiber = me();
  fiber.state = State::polls;
  fiber.waits_on = fiber.polled;
  fiber.waits_value = fiber.polled_value;
  fiber.history = fiber.before_poll;
  fiber.last_load = kNone;
  fiber.doing = "sees a change of";
  fiber.at = fiber.waits_on;
  go_on();
  return 0;
}

unsigned int std::thread::hardware_concurrency() noexcept { return model::world.spins ? 64 : 1; }
