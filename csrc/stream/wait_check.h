// How a long wait of a thread lets its caller in, for instance for Ctrl-C.
#pragma once

#include <chrono>
#include <functional>

namespace shardcomm {

// While alive, long waits of this thread call `check` now and then; what it throws ends the wait.
class WaitCheck {
 public:
  explicit WaitCheck(std::function<void()> check);
  ~WaitCheck();
  WaitCheck(const WaitCheck&) = delete;
  WaitCheck& operator=(const WaitCheck&) = delete;

 private:
  std::function<void()> before_;
};

// A base of what a check throws when somebody at this process, and no error, ends the wait: Ctrl-C.
class Interruption {
 protected:
  ~Interruption() = default;
};

// For those who wait: to be called between two slices of a wait.
void check_wait();
constexpr std::chrono::milliseconds kWaitSlice{50};

}  // namespace shardcomm
