#include "shardcomm/stream.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace shardcomm {

struct Event::State {
  mutable std::mutex mutex;
  mutable std::condition_variable fired_changed;
  bool fired = false;
  std::exception_ptr failure;

  void fire(std::exception_ptr error) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      fired = true;
      failure = std::move(error);
    }
    fired_changed.notify_all();
  }

  bool wait_for(std::chrono::milliseconds timeout) const {
    std::unique_lock<std::mutex> lock(mutex);
    if (!fired_changed.wait_for(lock, timeout, [this] { return fired; })) return false;
    if (failure) std::rethrow_exception(failure);
    return true;
  }
};

Event::Event(std::shared_ptr<State> state) : state_(std::move(state)) {}

bool Event::query() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->fired;
}

bool Event::wait_for(std::chrono::milliseconds timeout) const { return state_->wait_for(timeout); }

void Event::wait() const {
  while (!wait_for(std::chrono::hours(1))) {
  }
}

struct Stream::Worker {
  // An operation, or, when `event` is set, a point to mark.
  struct Entry {
    std::function<void()> operation;
    std::shared_ptr<Event::State> event;
  };

  std::mutex mutex;
  std::condition_variable queue_changed;
  std::deque<Entry> queue;
  bool closing = false;
  std::thread thread{[this] { run(); }};

  void push(Entry entry) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      queue.push_back(std::move(entry));
    }
    queue_changed.notify_one();
  }

  void run() {
    std::exception_ptr failure;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      queue_changed.wait(lock, [this] { return closing || !queue.empty(); });
      if (queue.empty()) return;
      Entry entry = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      if (entry.event) {
        entry.event->fire(failure);
      } else if (!failure) {
        try {
          entry.operation();
        } catch (...) {
          failure = std::current_exception();
        }
      }
      entry = {};  // what the operation held is let go of outside the lock
      lock.lock();
    }
  }
};

Stream::Stream() : worker_(std::make_unique<Worker>()) {}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(worker_->mutex);
    worker_->closing = true;
  }
  worker_->queue_changed.notify_one();
  worker_->thread.join();
}

void Stream::enqueue(std::function<void()> operation) {
  worker_->push({std::move(operation), nullptr});
}

Event Stream::record() {
  auto state = std::make_shared<Event::State>();
  worker_->push({nullptr, state});
  return Event(std::move(state));
}

void Stream::wait(const Event& event) {
  enqueue([event] { event.wait(); });
}

}  // namespace shardcomm
