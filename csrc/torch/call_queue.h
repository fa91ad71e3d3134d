// Runs a group's calls one after another, in the order in which they were begun: here and now if
// the caller waits anyway and nothing is before the call, else on a thread. In a forked child,
// which has no such thread, every call runs here and now, and the C library refuses it.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "signals.h"

namespace shardcomm_torch {

class CallQueue {
 public:
  CallQueue() = default;
  ~CallQueue() { stop(); }
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Runs `call`, which may throw, if no call is before it. Returns whether it did. After `stop` it
  // always does, once those before it have ended.
  template <class Call>
  bool run_now(Call&& call) {
    if (is_child()) {
      call();
      return true;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopped_) changed_.wait(lock, [this] { return begun_ == ended_; });
    if (begun_ != ended_) return false;
    ++begun_;
    lock.unlock();
    const Running running(*this);
    call();
    return true;
  }

  // Whether this thread is in `run_now`, where a signal handler may run.
  bool runs_here() const {
    for (const Running* running = Running::innermost; running; running = running->outer) {
      if (&running->queue == this) return true;
    }
    return false;
  }

  // Runs `call`, which throws nothing, on the thread, after all calls before it. After `stop` there
  // is no thread, and it runs now.
  void enqueue(std::function<void()> call) {
    if (!queued(call)) run_now(call);
  }

  // How many calls were begun so far.
  std::uint64_t begun() {
    if (is_child()) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    return begun_;
  }

  // Returns when the first `calls` calls have ended. Throws what a signal handler raises.
  void wait_for(std::uint64_t calls) {
    if (is_child()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kWaitSlice, [&] { return ended_ >= calls; })) {
      lock.unlock();
      throw_if_interrupted();
      lock.lock();
    }
  }

  // Ends the thread, after the calls that were begun.
  void stop() {
    if (is_child()) {  // nobody can join the thread there
      if (thread_.joinable()) thread_.detach();
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  // A thread of the parent's may hold the lock for ever.
  bool is_child() const { return getpid() != owner_; }

  bool queued(std::function<void()>& call) {
    if (is_child()) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return false;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    calls_.push_back(std::move(call));
    ++begun_;
    changed_.notify_all();
    return true;
  }

  // A call that runs on this thread.
  struct Running {
    explicit Running(CallQueue& queue) : queue(queue) { innermost = this; }
    ~Running() {
      innermost = outer;
      queue.end_call();
    }
    inline static thread_local const Running* innermost = nullptr;
    CallQueue& queue;
    const Running* outer = innermost;
  };

  void end_call() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++ended_;
    }
    changed_.notify_all();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      // A call that somebody runs now is before the first queued one.
      changed_.wait(
          lock, [this] { return calls_.empty() ? stopped_ : begun_ - ended_ == calls_.size(); });
      if (calls_.empty()) return;
      auto call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      call();
      call = nullptr;  // before the end: who waits for that may expect the tensors to be free
      lock.lock();
      ++ended_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  std::uint64_t begun_ = 0;
  std::uint64_t ended_ = 0;
  bool stopped_ = false;
  std::thread thread_;
  const pid_t owner_ = getpid();
};

}  // namespace shardcomm_torch
