#include "shardcomm/stream.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "stream/wait_check.h"

namespace shardcomm {

void Event::wait() const {
  while (!wait_for(kWaitSlice)) check_wait();
}

void Stream::copy(void* dst, const void* src, std::size_t bytes) {
  if (bytes == 0) return;
  enqueue([=](NativeStream) { std::memcpy(dst, src, bytes); });
}

namespace {

using Clock = std::chrono::steady_clock;

// An event of the host knows when it fired.
class HostEvent : public Event {
 public:
  double seconds_since(const Event& earlier) const override {
    const auto* begin = dynamic_cast<const HostEvent*>(&earlier);
    if (begin == nullptr) {
      throw std::invalid_argument("an event of the host and one of a device do not compare");
    }
    return std::chrono::duration<double>(fired_at() - begin->fired_at()).count();
  }

 private:
  virtual Clock::time_point fired_at() const = 0;
};

class ThreadEvent final : public HostEvent {
 public:
  bool query() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fired_;
  }

  bool wait_for(std::chrono::milliseconds timeout) const override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!fired_changed_.wait_for(lock, timeout, [this] { return fired_; })) return false;
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

  void fire(std::exception_ptr error) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fired_ = true;
      fired_at_ = Clock::now();
      failure_ = std::move(error);
    }
    fired_changed_.notify_all();
  }

 private:
  Clock::time_point fired_at() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fired_at_;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable fired_changed_;
  bool fired_ = false;
  Clock::time_point fired_at_;
  std::exception_ptr failure_;
};

class ThreadStream final : public Stream {
 public:
  ~ThreadStream() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    queue_changed_.notify_one();
    thread_.join();
  }

  void enqueue(Operation operation) override { push({std::move(operation), nullptr}); }

  std::shared_ptr<Event> record(bool) override {
    auto event = std::make_shared<ThreadEvent>();
    push({nullptr, event});
    return event;
  }

  void wait(std::shared_ptr<Event> event) override {
    enqueue([event = std::move(event)](NativeStream) { event->wait(); });
  }

 private:
  // An operation, or, when `event` is set, a point to mark.
  struct Entry {
    Operation operation;
    std::shared_ptr<ThreadEvent> event;
  };

  void push(Entry entry) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(entry));
    }
    queue_changed_.notify_one();
  }

  void run() {
    std::exception_ptr failure;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      queue_changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Entry entry = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (entry.event) {
        entry.event->fire(failure);
      } else if (!failure) {
        try {
          entry.operation(nullptr);
        } catch (...) {
          failure = std::current_exception();
        }
      }
      entry = {};  // what the operation held is let go of outside the lock
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable queue_changed_;
  std::deque<Entry> queue_;
  bool closing_ = false;
  std::thread thread_{[this] { run(); }};  // last: it uses the others
};

class FiredEvent final : public HostEvent {
 public:
  bool query() const override { return true; }
  bool wait_for(std::chrono::milliseconds) const override { return true; }

 private:
  Clock::time_point fired_at() const override { return at_; }

  Clock::time_point at_ = Clock::now();
};

class CallerStream final : public Stream {
 public:
  void enqueue(Operation operation) override { operation(nullptr); }
  std::shared_ptr<Event> record(bool) override { return std::make_shared<FiredEvent>(); }
  void wait(std::shared_ptr<Event> event) override { event->wait(); }
};

}  // namespace

std::unique_ptr<Stream> make_thread_stream() { return std::make_unique<ThreadStream>(); }
std::unique_ptr<Stream> make_caller_stream() { return std::make_unique<CallerStream>(); }

}  // namespace shardcomm
