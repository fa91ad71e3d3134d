// What the parts of the played CUDA runtime know of each other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "fake_cuda.h"

namespace fake {

// What an event becomes when the stream's turn for it has come.
class Fired {
 public:
  explicit Fired(bool fired) : fired_(fired) {}
  bool get() const { return fired_.load(); }
  void set() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fired_.store(true);
    }
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return fired_.load(); });
  }

 private:
  std::atomic<bool> fired_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// A graph: nodes in the order in which they were captured, which respects their dependencies.
struct Recording {
  struct Node {
    std::function<void()> work;
    std::vector<std::size_t> after;
  };
  ~Recording();
  std::vector<Node> nodes;
  std::vector<void*> memory;                   // allocated in the capture, freed with the graph
  std::vector<std::shared_ptr<void>> objects;  // that the graph retains (cudaGraphRetainUserObject)
  std::mutex running;  // two launches of one executable graph do not overlap
};

// A capture under way, or one that has ended: events may still refer to it.
struct Capture {
  cudaStream_t origin = nullptr;
  std::thread::id thread;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  unsigned long long id = 0;
  bool invalidated = false;
  bool ended = false;
  std::shared_ptr<Recording> recording = std::make_shared<Recording>();
  std::shared_ptr<CUgraph_st> graph;  // as cudaStreamGetCaptureInfo shows it
  std::set<CUstream_st*> streams;
};

// What was captured on a stream so far. Guarded by the captures' mutex.
struct Captured {
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tail;  // nodes that the next one comes after
};

bool instant();
cudaError_t fail(cudaError_t error);  // also this thread's last error
// A call by this thread that needs a context.
void use_context();
CUstream_st& stream_of(cudaStream_t stream);
// For what the current device has been given.
void wait_for_device();

// Puts work on a stream, or into its capture.
cudaError_t put(CUstream_st& stream, std::function<void()> work);
bool is_capturing(CUstream_st& stream);
// The error of a call that a capture of this or another thread prohibits; success if none does.
cudaError_t refuse_unsafe();
// The same for a call on this stream that cannot be captured at all.
cudaError_t refuse_captured(CUstream_st& stream);
cudaError_t refuse_device(int device);
// For cudaEventRecord: the stream's capture, if it does capture.
Captured captured_on(CUstream_st& stream);
// For cudaStreamWaitEvent. True if a capture was concerned, with the error.
bool wait_captured(CUstream_st& stream, const Captured& event, bool recorded, cudaError_t& error);
void invalidate(const Captured& event);
// For memory of a stream that captures: it belongs to the graph.
bool keep_captured(CUstream_st& stream, void* data);
bool owns_captured(CUstream_st& stream, void* data);

void* allocate(std::size_t bytes);
void release(void* data);

struct Counters {
  std::atomic<long> events_created{0};
  std::atomic<long> timed_events_created{0};
  std::atomic<long> events_recorded{0};
  std::atomic<long> event_queries{0};
  std::atomic<long> allocations{0};
  std::atomic<long> work{0};
};
extern Counters counters;
extern thread_local int current_device;

}  // namespace fake

struct CUstream_st {
 public:
  explicit CUstream_st(int on_device) : device(on_device) {}
  void push(std::function<void()> work);
  void synchronize();
  bool idle();
  void run();  // its thread's
  void end();  // what is on it still runs

  const int device;
  fake::Captured captured;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool ending_ = false;
};
