#include "shardcomm/stream.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "stream/fork.h"
#include "stream/futex.h"
#include "stream/wait_check.h"
#include "stream/waiting.h"

namespace shardcomm {

void Event::wait() const {
  while (!wait_for(kWaitSlice)) check_wait();
}

void Stream::copy(void* dst, const void* src, std::size_t bytes) {
  if (bytes == 0) return;
  enqueue([=](NativeStream) { std::memcpy(dst, src, bytes); });
}

namespace {

// An event of the host knows when it fired.
class HostEvent : public Event {
 public:
  double seconds_since(const Event& earlier) const override {
    const auto* begin = dynamic_cast<const HostEvent*>(&earlier);
    if (begin == nullptr) {
      throw std::invalid_argument(
          "seconds_since: one event is of the host and the other of a device");
    }
    return std::chrono::duration<double>(fired_at() - begin->fired_at()).count();
  }

 private:
  virtual Clock::time_point fired_at() const = 0;
};

// Not made of a condition variable: to destroy one in a forked child waits for the threads that the
// parent had waiting there.
class ThreadEvent final : public HostEvent {
 public:
  explicit ThreadEvent(ThreadId worker) : worker_(worker), forks_(forks()) {}

  bool query() const override { return fired_.load() != 0; }

  bool wait_for(std::chrono::milliseconds timeout) const override {
    if (!query() && !wait_until(Clock::now() + timeout)) return false;
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

  void fire(std::exception_ptr failure) {
    fired_at_ = Clock::now();
    failure_ = std::move(failure);
    fired_.store(1);
    if (sleepers_.load() > 0) wake_all(fired_);
  }

 private:
  Clock::time_point fired_at() const override { return query() ? fired_at_ : Clock::time_point(); }

  bool wait_until(Clock::time_point end) const {
    if (forks() != forks_) {
      throw std::runtime_error(
          "this process was forked while the event's stream had work to do, and has no copy of the "
          "stream's thread: the event never fires here; make streams after the fork");
    }
    const WaitsFor scope(worker_, fired_);
    if (scope.is_endless()) {
      throw std::runtime_error(
          "this wait would never end: the event comes after an operation that waits, maybe by way "
          "of other streams, for the one that waits here; let another thread wait, or wait for an "
          "event that was recorded before");
    }
    while (!query()) {
      const Clock::duration left = end - Clock::now();
      if (left <= Clock::duration::zero()) return false;
      sleepers_.fetch_add(1);
      sleep_while(fired_, 0, left);
      sleepers_.fetch_sub(1);
    }
    return true;
  }

  const ThreadId worker_;
  const int forks_;
  Atomic<std::uint32_t> fired_{0};
  mutable Atomic<std::uint32_t> sleepers_{0};
  Clock::time_point fired_at_;  // this and the next: written before it fires, read after
  std::exception_ptr failure_;
};

// The thread of a stream, and what it has to do.
class Worker {
 public:
  // An operation, or, when `event` is set, a point to mark.
  struct Entry {
    Stream::Operation operation;
    std::shared_ptr<ThreadEvent> event;
    ThreadId caller = 0;
  };

  // Its thread holds on to it, too.
  static std::shared_ptr<Worker> start() {
    auto worker = std::make_shared<Worker>();
    worker->registered_.emplace(worker->id_,
                                [worker = worker.get()] { return worker->has_work(); });
    try {
      worker->thread_ = std::thread([worker] { worker->run(); });
    } catch (const std::system_error& error) {
      throw std::runtime_error(std::string("this process can start no thread for a stream: ") +
                               error.what());
    }
    return worker;
  }

  ThreadId thread() const { return id_; }

  void push(Entry entry) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(entry));
    }
    queue_changed_.notify_one();
  }

  // Returns when all that is queued has run, and been let go of. Where that could never be, since
  // the thread is the caller's own or waits for it, this returns at once, and the thread goes on.
  void finish() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    queue_changed_.notify_one();
    const WaitsFor scope(id_, ended_);
    if (scope.is_endless()) return thread_.detach();
    while (ended_.load() == 0) sleep_while(ended_, 0, kWaitSlice);
    thread_.join();
  }

 private:
  bool has_work() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return working_ || !queue_.empty();
  }

  void run() {
    take_thread_id(id_);
    run_all();
    ended_.store(1);
    wake_all(ended_);
  }

  void run_all() {
    std::exception_ptr failure;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      // Not `wait`, which would be the one symbol here that only GCC 12's libstdc++ has.
      const auto has_changed = [this] { return closing_ || !queue_.empty(); };
      while (!queue_changed_.wait_for(lock, std::chrono::hours(1), has_changed)) continue;
      if (queue_.empty()) return;
      Entry entry = std::move(queue_.front());
      queue_.pop_front();
      working_ = true;
      lock.unlock();
      if (entry.event) {
        entry.event->fire(failure);
      } else if (!failure) {
        const OnBehalfOf scope(entry.caller);
        try {
          entry.operation(nullptr);
        } catch (...) {
          failure = std::current_exception();
        }
      }
      entry = {};  // what the operation held is let go of outside the lock
      lock.lock();
      working_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable queue_changed_;
  std::deque<Entry> queue_;
  const ThreadId id_ = new_thread_id();
  bool working_ = false;
  bool closing_ = false;
  Atomic<std::uint32_t> ended_{0};
  std::thread thread_;
  std::optional<WorksForOthers> registered_;
};

class ThreadStream final : public Stream {
 public:
  ~ThreadStream() override {
    // In a forked child there is no such thread, and its lock may be held for ever: the child
    // leaves the copy as it is, of which that thread's share stays.
    if (!forked()) worker_->finish();
  }

  void enqueue(Operation operation) override { push({std::move(operation), nullptr, caller()}); }

  std::shared_ptr<Event> record(bool) override {
    auto event = std::make_shared<ThreadEvent>(worker_->thread());
    push({nullptr, event});
    return event;
  }

  void wait(std::shared_ptr<Event> event) override {
    enqueue([event = std::move(event)](NativeStream) { event->wait(); });
  }

 private:
  bool forked() const { return forks() != forks_; }

  void push(Worker::Entry entry) {
    if (forked()) {
      throw std::runtime_error(
          "this stream belongs to the process that this one was forked from, and so does its "
          "thread; make a stream after the fork. A communicator or a sharded model with this "
          "stream works in that process alone, and not in a child such as a DataLoader's worker");
    }
    worker_->push(std::move(entry));
  }

  const int forks_ = forks();
  std::shared_ptr<Worker> worker_ = Worker::start();
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
