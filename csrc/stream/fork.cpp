#include "stream/fork.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>

namespace shardcomm {
namespace {

std::atomic<int> count{0};

const bool counting = [] {
  if (pthread_atfork(nullptr, nullptr, [] { ++count; }) != 0) {
    throw std::runtime_error("shardcomm: pthread_atfork failed");
  }
  return true;
}();

}  // namespace

int forks() noexcept { return count.load(std::memory_order_relaxed); }

}  // namespace shardcomm
