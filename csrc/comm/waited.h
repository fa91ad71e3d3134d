// How long a rank has waited for others, for its deadline.
#pragma once

#include <algorithm>
#include <chrono>

#include "stream/futex.h"
#include "stream/wait_check.h"

namespace shardcomm {

// How long a rank has waited while it ran. If the rank itself was stopped, as by Ctrl-Z, that time
// does not count against the others: between two looks at most two slices count.
class Waited {
 public:
  explicit Waited(Clock::time_point since) : looked_(since) {}

  std::chrono::duration<double> until_now() {
    const Clock::time_point now = Clock::now();
    time_ += std::min<Clock::duration>(now - looked_, 2 * kWaitSlice);
    looked_ = now;
    return time_;
  }

 private:
  Clock::time_point looked_;
  Clock::duration time_{};
};

}  // namespace shardcomm
