// Sleeping until a word changes, and the clock that bounds the sleep. The word may lie in memory
// that processes share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace shardcomm {

// Protocols between threads and ranks read and write everything through these names. So
// tests/cpp/model can put its own types in their place, and try every order.
template <class T>
using Atomic = std::atomic<T>;
using Mutex = std::mutex;
using Clock = std::chrono::steady_clock;

// Memory that is not atomic: something else must order its readers after its writers.
template <class T>
class Plain {
 public:
  const T& read() const { return value_; }
  T& write() { return value_; }

 private:
  T value_;
};

// For how long a thread looks at a word again and again before it sleeps: being woken costs more.
std::chrono::microseconds polling_time();
// Sleeps while `word` is `value`. Returns also after a wake, after `timeout`, or without a reason.
void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds timeout);
// Wakes all threads that sleep on `word`.
void wake_all(const Atomic<std::uint32_t>& word) noexcept;

}  // namespace shardcomm
