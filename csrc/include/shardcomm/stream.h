// Streams and events, with one meaning on both devices. A stream runs its operations in order; an
// event marks a point in a stream.
//
//   thread   a worker thread of this process: communication on a CPU
//   caller   the calling thread: computation on a CPU. Operations run at once, events have fired.
//   cuda     a CUDA stream. Operations run at once and put their work on it.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

namespace shardcomm {

// The cudaStream_t on which a device's work is put; null on a CPU.
using NativeStream = void*;

// Fires when the operations that were enqueued before it have finished, or one of them has failed.
class Event {
 public:
  virtual ~Event() = default;
  // Whether the event has fired; never throws, never blocks. For an event of a CUDA stream that is
  // being captured it is true once the capture has ended, since the capture itself runs nothing.
  virtual bool query() const = 0;
  // Blocks until the event has fired; false if that takes longer than `timeout`. Rethrows the
  // stream's failure, if the stream failed before this event. Throws std::runtime_error if the
  // event could never fire, because the wait is in an operation of its own stream before it, or of
  // a stream for which that stream waits.
  virtual bool wait_for(std::chrono::milliseconds timeout) const = 0;
  void wait() const;
  // The time from `earlier` to this event. Both must have fired, and be of the same kind of stream;
  // on a CUDA stream both must have been recorded `timed`.
  virtual double seconds_since(const Event& earlier) const = 0;
  virtual void* native() const { return nullptr; }  // the cudaEvent_t of a device's event
};

class Stream {
 public:
  using Operation = std::function<void(NativeStream)>;

  virtual ~Stream() = default;

  virtual NativeStream native() const { return nullptr; }
  // Whether the stream is being captured in a graph, so that nothing runs now.
  virtual bool capturing() const { return false; }

  // Runs `operation` after all operations that were enqueued before it. If an operation of a thread
  // stream has thrown, later ones are dropped, and their events carry the same exception. On other
  // streams `enqueue` itself throws.
  virtual void enqueue(Operation operation) = 0;
  // Copies after all operations that were enqueued before it. Both ends must stay valid until the
  // copy is done. On a CUDA stream they are memory of its device or of the host; if the host's is
  // not pinned, the caller may have to wait.
  virtual void copy(void* dst, const void* src, std::size_t bytes);
  // On a CUDA stream a `timed` event costs the device a little more, and cannot be recorded in a
  // capture (CudaError). On other streams every event is timed.
  virtual std::shared_ptr<Event> record(bool timed = false) = 0;
  // Makes later operations of this stream start after `event`. Only the caller stream blocks.
  virtual void wait(std::shared_ptr<Event> event) = 0;
};

// Its destructor waits until all queued operations have run. If an operation of the stream itself
// destroys the stream, those that are queued run afterwards.
std::unique_ptr<Stream> make_thread_stream();
std::unique_ptr<Stream> make_caller_stream();

// Both throw CudaError where there is no CUDA, and std::invalid_argument where there is no such
// device. The first makes a stream that does not synchronise with the default one.
std::unique_ptr<Stream> make_cuda_stream(int device);
// A stream that belongs to somebody else, and must outlive this object.
std::unique_ptr<Stream> borrow_cuda_stream(int device, NativeStream stream);
// Records an event as a borrowed stream's `record` does. Not for a capture.
std::shared_ptr<Event> record_on_cuda(int device, NativeStream stream);

}  // namespace shardcomm
