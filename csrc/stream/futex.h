// Sleeping until a word changes, and the clock that bounds the sleep. The word may lie in memory
// that processes share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace shardcomm {

// Everything that protocols between threads and ranks read and write goes through these two names,
// so that tests/cpp/model can put its own in their place and try every order.
template <class T>
using Atomic = std::atomic<T>;
using Clock = std::chrono::steady_clock;

// Returns when `word` is not `value`, after a wake, after `timeout`, or for no reason.
void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds timeout);
// Wakes all that sleep on it.
void wake_all(const Atomic<std::uint32_t>& word) noexcept;

}  // namespace shardcomm
