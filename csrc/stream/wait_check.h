// A check that long waits of a thread call now and then, for instance to notice Ctrl-C.
#pragma once

#include <chrono>
#include <functional>

namespace shardcomm {

// While alive, long waits of this thread call `check` now and then. An exception of `check` ends
// the wait.
class WaitCheck {
 public:
  explicit WaitCheck(std::function<void()> check);
  ~WaitCheck();
  WaitCheck(const WaitCheck&) = delete;
  WaitCheck& operator=(const WaitCheck&) = delete;

 private:
  std::function<void()> before_;
};

// Makes long waits of this thread call `check` from now on; an empty one ends that.
void set_wait_check(std::function<void()> check);

// A base class for the exception of a check if a person, and no error, ends the wait, as by Ctrl-C.
class Interruption {
 protected:
  ~Interruption() = default;
};

// Runs the check. Functions that wait call it between two slices of their wait.
void check_wait();
constexpr std::chrono::milliseconds kWaitSlice{50};

}  // namespace shardcomm
