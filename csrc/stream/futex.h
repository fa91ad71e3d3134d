// Sleeping until a word changes, and the clock that bounds the sleep. The word may lie in memory
// that processes share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace shardcomm {

// Everything that protocols between threads and ranks read and write goes through these names, so
// that tests/cpp/model can put its own in their place and try every order.
template <class T>
using Atomic = std::atomic<T>;
using Mutex = std::mutex;
using Clock = std::chrono::steady_clock;

// Memory that is not atomic: something else must order those who read it after those who write it.
template <class T>
class Plain {
 public:
  const T& read() const { return value_; }
  T& write() { return value_; }

 private:
  T value_;
};

// Returns when `word` is not `value`, after a wake, after `timeout`, or for no reason.
void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds timeout);
// Wakes all that sleep on it.
void wake_all(const Atomic<std::uint32_t>& word) noexcept;

}  // namespace shardcomm
