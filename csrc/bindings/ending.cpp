#include "bindings/ending.h"

#include <chrono>
#include <cstdint>

#include "bindings/bindings.h"
#include "bindings/interrupt.h"
#include "bindings/lock.h"
#include "stream/futex.h"

namespace shardcomm::bindings {
namespace {

Atomic<std::uint32_t> held{0};
Atomic<std::uint32_t> ending{0};

// At the interpreter's exit: no thread may come for it afterwards.
void wait_for_held() {
  constexpr std::chrono::seconds kSilent{1};
  ending.store(1);
  try {
    const InterruptibleWait scope;
    const Clock::time_point begin = Clock::now();
    bool said = false;
    while (const std::uint32_t left = held.load()) {
      sleep_while(held, left, kWaitSlice);
      check_wait();
      if (said || Clock::now() - begin < kSilent) continue;
      said = true;
      with_lock([left] {
        PySys_WriteStderr(
            "shardcomm: this process ends when its streams have run what they were given, and "
            "other hosts have answered; Python callables left: %d (Ctrl-C drops them)\n",
            static_cast<int>(left));
      });
    }
  } catch (const Interrupted&) {
    PySys_WriteStderr("shardcomm: Python callables of streams that are dropped: %d\n",
                      static_cast<int>(held.load()));
  }
}

}  // namespace

bool is_ending() { return ending.load() != 0; }

bool any_held() { return held.load() != 0; }

Held::Held() { held.fetch_add(1); }

Held::~Held() {
  if (made_at_ != forks()) return;  // counted in the parent
  held.fetch_sub(1);
  if (is_ending()) wake_all(held);
}

void bind_ending(py::module_&) {
  at_fork(nullptr, nullptr, [] { held.store(0); });
  py::module_::import("atexit").attr("register")(py::cpp_function(&wait_for_held));
}

}  // namespace shardcomm::bindings
