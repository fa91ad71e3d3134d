// How long calls wait, in the C library and here.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shardcomm.h"

namespace shardcomm_torch {

// While alive, calls of this thread wait at most so long, whatever the group's timeout was when it
// was made. A signal handler may make another one, in a call of another group.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout) {
    shc_get_deadline(&outer_s_);
    shc_set_deadline(std::chrono::duration<double>(timeout).count());
  }
  ~Deadline() { shc_set_deadline(outer_s_); }
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  double outer_s_ = 0;
};

// `timeout` from now, at most 30 years, which the clock can count.
inline std::chrono::steady_clock::time_point time_after(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kMost = std::chrono::hours(30 * 365 * 24);
  return std::chrono::steady_clock::now() + std::min(timeout, kMost);
}

// What a thread that carries for a call between hosts may wait: as long as the call.
inline std::chrono::milliseconds thread_timeout() {
  double deadline_s = 0;
  shc_get_deadline(&deadline_s);
  const std::chrono::milliseconds timeout(std::lround(1e3 * deadline_s));
  return timeout.count() == 0 ? c10d::kUnsetTimeout : timeout;
}

}  // namespace shardcomm_torch
