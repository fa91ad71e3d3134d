// The names of csrc/stream/futex.h, over the explorer: every access to shared memory is a point at
// which another thread may go on, a thread may be asleep as in futex(2), and time is a choice.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace model {

// Accesses of the running thread to shared words of `bytes` bytes; see words.cpp and plain.cpp.
std::uint64_t load(const void* word, std::size_t bytes, std::memory_order order);
void store(void* word, std::size_t bytes, std::uint64_t value, std::memory_order order);
std::uint64_t add(void* word, std::size_t bytes, std::uint64_t difference, std::memory_order order);
bool exchange_if(void* word, std::size_t bytes, std::uint64_t& expected, std::uint64_t desired,
                 std::memory_order order);
void lock(void* word);
void unlock(void* word);
// Accesses to memory that is not atomic, of which no two may race.
void plain_read(const void* place);
void plain_write(void* place);

}  // namespace model

namespace shardcomm {

template <class T>
class Atomic {
 public:
  static constexpr bool is_always_lock_free = true;

  T load(std::memory_order order = std::memory_order_seq_cst) const {
    return static_cast<T>(model::load(&value_, sizeof(T), order));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) {
    model::store(&value_, sizeof(T), static_cast<std::uint64_t>(value), order);
  }
  T fetch_add(T difference, std::memory_order order = std::memory_order_seq_cst) {
    return static_cast<T>(
        model::add(&value_, sizeof(T), static_cast<std::uint64_t>(difference), order));
  }
  T fetch_sub(T difference, std::memory_order order = std::memory_order_seq_cst) {
    return fetch_add(static_cast<T>(T{} - difference), order);
  }
  bool compare_exchange_strong(T& expected, T desired,
                               std::memory_order order = std::memory_order_seq_cst) {
    auto seen = static_cast<std::uint64_t>(expected);
    const bool done =
        model::exchange_if(&value_, sizeof(T), seen, static_cast<std::uint64_t>(desired), order);
    expected = static_cast<T>(seen);
    return done;
  }
  // What is in memory, for those who check: no access of the program.
  T now() const { return value_; }

 private:
  T value_;
};

template <class T>
class Plain {
 public:
  const T& read() const {
    model::plain_read(this);
    return value_;
  }
  T& write() {
    model::plain_write(this);
    return value_;
  }

 private:
  T value_;
};

class Mutex {
 public:
  void lock() { model::lock(&holder_); }
  void unlock() { model::unlock(&holder_); }

 private:
  std::uint32_t holder_ = 0;
};

struct Clock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;
  static time_point now();
};

std::chrono::microseconds polling_time();
void sleep_while(const Atomic<std::uint32_t>& word, std::uint32_t value,
                 std::chrono::nanoseconds timeout);
void wake_all(const Atomic<std::uint32_t>& word) noexcept;

}  // namespace shardcomm
