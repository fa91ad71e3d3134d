// Streams and events on the CPU, with the meaning they have in CUDA. A stream runs its operations
// in order on a worker thread; an event marks a point in a stream.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace shardcomm {

// Fires when the operations enqueued before it have finished, or one of them has failed.
class Event {
 public:
  bool query() const;  // true once fired; never throws, never blocks
  // Blocks until fired. Rethrows the stream's failure, if it failed before this event.
  void wait() const;
  // As wait, but gives up after `timeout`: false.
  bool wait_for(std::chrono::milliseconds timeout) const;

 private:
  friend class Stream;
  struct State;
  explicit Event(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  Stream();
  // Runs what is queued to its end, then joins the worker.
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Runs `operation` after all enqueued before it. Once an operation has thrown, later ones are
  // dropped unrun and their events carry the same exception.
  void enqueue(std::function<void()> operation);
  Event record();
  void wait(const Event& event);  // later operations of this stream start after `event`

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace shardcomm
