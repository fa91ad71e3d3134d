// Points of a process at which a fault may strike: each call that the core makes of the system or
// of the allocator, and each step of its boards. points.cpp has them.
#pragma once

#include <atomic>
#include <cstdint>

namespace faults {

enum class Kind : std::uint8_t {
  kill,        // the process ends before the call
  kill_after,  // the call is made, and the process ends before it sees the result
  stop,        // the same, but it is stopped (SIGSTOP)
  stop_after,
  delay,     // the call is made later than others expect it
  error,     // the call is not made: it reports one of the errors that its manual page has
  error_on,  // so do all later calls of the same name
};

struct Fault {
  Kind kind = Kind::kill;
  int point = 0;  // counted from 1, over all threads
  int error = 0;  // which of the point's errors, counted from 0
};

// What came of it. In memory that the test sees, too, after the process is gone.
struct Report {
  std::atomic<bool> reached{false};  // the process came to the point
  std::atomic<bool> fired{false};
  std::atomic<bool> leaks{false};  // the fault itself leaves something behind: munmap was not done
  std::atomic<bool> interrupted{false};  // the error is that a signal came
  std::atomic<int> errors{0};            // how many there are at that point
  std::atomic<std::int64_t> fired_ns{0};
  char name[32] = {};  // of the point
};

std::int64_t now_ns();  // on the same clock as `fired_ns`

// From now on the points of this process count, until `disarm`.
void arm(const Fault& fault, Report* report);
void disarm();

}  // namespace faults
