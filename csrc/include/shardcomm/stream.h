// Streams and events, with one meaning on both devices. A stream runs its operations in order; an
// event marks a point in a stream.
//
//   thread   a worker thread of this process: communication on a CPU
//   caller   whoever calls: computation on a CPU. Operations run at once, events have fired.
//   cuda     a CUDA stream. Operations run at once and put their work on it.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

namespace shardcomm {

// The cudaStream_t that device work goes to; null on a CPU.
using NativeStream = void*;

// Fires when the operations enqueued before it have finished, or one of them has failed.
class Event {
 public:
  virtual ~Event() = default;
  // True once fired; never throws, never blocks. Of an event of a CUDA stream that is captured:
  // true once the capture has ended, since by itself nothing of it runs.
  virtual bool query() const = 0;
  // Blocks until fired; gives up after `timeout`: false. Rethrows the stream's failure, if it
  // failed before this event. Throws std::runtime_error where it would never fire: in an operation
  // of its own stream, recorded later, or of one that its stream waits for.
  virtual bool wait_for(std::chrono::milliseconds timeout) const = 0;
  void wait() const;
  // Time from `earlier` to this, both fired and of the same kind of stream; on a CUDA stream, both
  // recorded `timed`.
  virtual double seconds_since(const Event& earlier) const = 0;
  virtual void* native() const { return nullptr; }  // a device's: its cudaEvent_t
};

class Stream {
 public:
  using Operation = std::function<void(NativeStream)>;

  virtual ~Stream() = default;

  virtual NativeStream native() const { return nullptr; }
  virtual bool capturing() const { return false; }  // in a graph, which runs nothing now

  // Runs `operation` after all enqueued before it. Once an operation of a thread stream has thrown,
  // later ones are dropped unrun and their events carry the same exception; elsewhere it throws
  // here.
  virtual void enqueue(Operation operation) = 0;
  // Copies after all enqueued before it; both ends must stay until it is done. On a CUDA stream
  // they are of its device or of the host: pinned memory, else the caller may wait.
  virtual void copy(void* dst, const void* src, std::size_t bytes);
  // On a CUDA stream, a `timed` event costs the device a little more, and cannot be recorded in a
  // capture (CudaError); elsewhere every event is timed.
  virtual std::shared_ptr<Event> record(bool timed = false) = 0;
  // Later operations of this stream start after `event`. Only the caller stream blocks.
  virtual void wait(std::shared_ptr<Event> event) = 0;
};

// Its destructor waits until what is queued has run. Where an operation of the stream itself
// destroys it, what is queued runs afterwards.
std::unique_ptr<Stream> make_thread_stream();
std::unique_ptr<Stream> make_caller_stream();

// A new stream of a device, without implicit synchronisation with the default stream. Throws
// CudaError.
std::unique_ptr<Stream> make_cuda_stream(int device);
// Somebody else's, which must outlive this.
std::unique_ptr<Stream> borrow_cuda_stream(int device, NativeStream stream);
// As `record` of a stream that was borrowed. Not in a capture.
std::shared_ptr<Event> record_on_cuda(int device, NativeStream stream);

}  // namespace shardcomm
