// Threads that share one run.
#pragma once

#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace shardcomm {

// A thread costs tens of microseconds to start; it gets at least this many elements to be worth it.
constexpr std::int64_t kElementsPerThread = std::int64_t{1} << 18;

// Threads that are joined whatever happens.
class Workers {
 public:
  ~Workers() {
    for (std::thread& thread : threads_) thread.join();
  }
  template <class Task>
  void start(Task task) {
    threads_.emplace_back(std::move(task));
  }

 private:
  std::vector<std::thread> threads_;
};

}  // namespace shardcomm
