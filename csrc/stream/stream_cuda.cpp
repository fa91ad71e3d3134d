#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/runtime.h"
#include "shardcomm/stream.h"

namespace shardcomm {
namespace {

// Events of a device that nobody refers to any more, for others to record again: a step makes
// several for each unit, and to create one costs more than to record it.
class EventPool {
 public:
  OwnedEvent take(int device, bool timed) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& free = free_[{device, timed}];
      if (!free.empty()) {
        OwnedEvent event = std::move(free.back());
        free.pop_back();
        return event;
      }
    }
    return make_event(timed);
  }
  void give(int device, bool timed, OwnedEvent event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[{device, timed}].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, bool>, std::vector<OwnedEvent>> free_;
};

// Never destroyed: events may outlive everything, and the driver them.
EventPool& event_pool() {
  static auto& pool = *std::make_unique<EventPool>().release();
  return pool;
}

class CudaEvent final : public Event {
 public:
  CudaEvent(int device, cudaStream_t stream, bool timed) : device_(device), timed_(timed) {
    const DeviceScope scope(device);
    event_ = event_pool().take(device, timed);
    check_cuda(cudaEventRecord(get(), stream), "cudaEventRecord");
  }
  ~CudaEvent() override { event_pool().give(device_, timed_, std::move(event_)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cudaEvent_t get() const { return event_.get(); }

  bool query() const override { return state() != cudaErrorNotReady; }

  // CUDA has no wait with a timeout; what waits on the host for a device is in no hurry.
  bool wait_for(std::chrono::milliseconds timeout) const override {
    const DeviceScope scope(device_);
    const auto end = std::chrono::steady_clock::now() + timeout;
    std::chrono::microseconds pause{20};
    while (true) {
      const cudaError_t result = state();
      if (result != cudaErrorNotReady) {
        check_cuda(result, "cudaEventQuery");
        return true;
      }
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds{1000});
    }
  }

  double seconds_since(const Event& earlier) const override {
    const auto* begin = dynamic_cast<const CudaEvent*>(&earlier);
    if (begin == nullptr)
      throw std::invalid_argument("an event of the host and one of a device do not compare");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin->get(), get()), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  // "Not ready" is no error: it must not stay behind as this thread's last one.
  cudaError_t state() const {
    const cudaError_t result = cudaEventQuery(get());
    if (result == cudaErrorNotReady) cudaGetLastError();
    return result;
  }

  int device_;
  bool timed_;
  OwnedEvent event_;
};

class CudaStream final : public Stream {
 public:
  CudaStream(int device, cudaStream_t stream, bool owned)
      : device_(device), stream_(stream), owned_(owned) {}
  ~CudaStream() override {
    if (owned_) cudaStreamDestroy(stream_);  // what is on it still runs
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  NativeStream native() const override { return stream_; }

  void enqueue(Operation operation) override {
    const DeviceScope scope(device_);
    operation(stream_);
  }

  void copy(void* dst, const void* src, std::size_t bytes) override {
    const DeviceScope scope(device_);
    check_cuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  }

  std::shared_ptr<Event> record(bool timed) override {
    return std::make_shared<CudaEvent>(device_, stream_, timed);
  }

  void wait(std::shared_ptr<Event> event) override {
    const auto* on_device = dynamic_cast<const CudaEvent*>(event.get());
    if (on_device == nullptr) return event->wait();  // the host's: nothing of it is on a device
    const DeviceScope scope(device_);                // null is a stream of the current device
    check_cuda(cudaStreamWaitEvent(stream_, on_device->get(), 0), "cudaStreamWaitEvent");
  }

 private:
  int device_;
  cudaStream_t stream_;
  bool owned_;
};

}  // namespace

std::unique_ptr<Stream> make_cuda_stream(int device) {
  const DeviceScope scope(device);
  // Communication is what computation waits for: it goes first where both are ready.
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
             "cudaStreamCreateWithPriority");
  return std::make_unique<CudaStream>(device, stream, true);
}

std::unique_ptr<Stream> borrow_cuda_stream(int device, NativeStream stream) {
  return std::make_unique<CudaStream>(device, static_cast<cudaStream_t>(stream), false);
}

}  // namespace shardcomm
