// Threads that complete futures, whose callbacks are a program's own code.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace shardcomm_torch {

// A callback may wait for another collective's future, whose callbacks wait for a third, and so on:
// so there are as many threads as there are callbacks that have not returned.
class Completions : public std::enable_shared_from_this<Completions> {
 public:
  Completions() = default;
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;

  // Runs `complete`, which throws nothing, on a thread. After `stop`, in a forked child, and where
  // the system has no more threads, it runs now.
  void post(std::function<void()> complete) {
    if (!posted(complete)) complete();
  }

  // Returns when all that was posted has returned.
  void stop() {
    if (getpid() != owner_) {  // as in CallQueue
      for (std::thread& thread : threads_) thread.detach();
      threads_.clear();
      return;
    }
    std::vector<std::thread> threads;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
      threads.swap(threads_);
    }
    changed_.notify_all();
    for (std::thread& thread : threads) {
      // A callback may drop the last reference to the group.
      if (thread.get_id() == std::this_thread::get_id()) {
        thread.detach();
      } else {
        thread.join();
      }
    }
  }

 private:
  bool posted(std::function<void()>& complete) {
    if (getpid() != owner_) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return false;
    if (posted_.size() >= idle_) {
      try {
        threads_.emplace_back([own = shared_from_this()] { own->run(); });
      } catch (const std::system_error&) {  // there can be no more threads
        return false;
      }
    }
    posted_.push_back(std::move(complete));
    changed_.notify_one();
    return true;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      changed_.wait(lock, [this] { return stopped_ || !posted_.empty(); });
      --idle_;
      if (posted_.empty()) return;
      auto complete = std::move(posted_.front());
      posted_.pop_front();
      lock.unlock();
      complete();
      complete = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> posted_;
  std::size_t idle_ = 0;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
  const pid_t owner_ = getpid();
};

}  // namespace shardcomm_torch
