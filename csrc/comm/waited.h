// How long a rank has waited for others, and how long it may.
#pragma once

#include <algorithm>
#include <chrono>

#include "stream/futex.h"
#include "stream/wait_check.h"

namespace shardcomm {

// The longest wait of this thread's calls for other ranks, in place of their groups' deadlines. 0:
// the groups' hold.
inline thread_local double thread_deadline_s = 0;

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
