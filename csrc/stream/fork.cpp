#include "stream/fork.h"

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace shardcomm {
namespace {

std::atomic<int> count{0};

const bool counting = [] {
  at_fork(nullptr, nullptr, [] { ++count; });
  return true;
}();

}  // namespace

// Relaxed: it changes only in a fresh child, while that has one thread.
int forks() noexcept { return count.load(std::memory_order_relaxed); }

void at_fork(void (*before)(), void (*after)(), void (*in_child)()) {
  const int error = pthread_atfork(before, after, in_child);
  if (error != 0) {
    throw std::runtime_error(std::string("cannot tell when this process is forked: ") +
                             std::strerror(error));
  }
}

}  // namespace shardcomm
