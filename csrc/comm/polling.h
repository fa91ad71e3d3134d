// How a thread waits before it sleeps: ranks that run side by side mostly meet within that.
#pragma once

#include <chrono>
#include <thread>

#include "stream/futex.h"

namespace shardcomm {

// A thread that waits longer, or that may have a core which another rank needs, gives its core away
// between two looks.
constexpr std::chrono::microseconds kSpin{5};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");  // to the core's other threads; the core stays this thread's
#else
  std::this_thread::yield();
#endif
}

// Whether each rank of a group on this machine can have a core.
inline bool has_core(int size) {
  return static_cast<unsigned>(size) <= std::thread::hardware_concurrency();
}

// Looks for a short while.
template <class IsOver>
bool spin(bool has_core, IsOver&& is_over) {
  for (int i = 0; has_core && i < 64; ++i) {
    if (is_over()) return true;
    pause();
  }
  return false;
}

// Looks from `since` until the polling time is over, and returns the last look.
template <class IsOver>
bool poll(bool has_core, Clock::time_point since, IsOver&& is_over) {
  const Clock::time_point until = since + polling_time();
  const Clock::time_point spin_until = has_core ? since + kSpin : since;
  for (Clock::time_point now = since; now < until; now = Clock::now()) {
    if (now < spin_until) {
      if (spin(has_core, is_over)) return true;
    } else {
      if (is_over()) return true;
      std::this_thread::yield();
    }
  }
  return is_over();
}

}  // namespace shardcomm
