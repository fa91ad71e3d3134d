#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/runtime.h"
#include "shardcomm/cuda.h"
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
      auto& free = free_[timed][device];
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
    free_[timed][device].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;
  std::array<std::map<int, std::vector<OwnedEvent>>, 2> free_;
};

// Never destroyed: events may outlive everything, and the driver them.
EventPool& event_pool() {
  static auto& pool = *std::make_unique<EventPool>().release();
  return pool;
}

// A stream of ours, which is destroyed with its last owner, or somebody else's, which is not.
using SharedStream = std::shared_ptr<std::remove_pointer_t<cudaStream_t>>;

// Recorded in a capture it marks a point of the graph: nothing has run, or will before a launch,
// and only streams of that capture can wait for it. When the capture has ended, nobody needs to.
class CudaEvent final : public Event {
 public:
  CudaEvent(int device, const SharedStream& stream, bool timed) : device_(device), timed_(timed) {
    const DeviceScope scope(device);
    capture_ = capture_of(stream.get());
    if (timed && capture_ != 0) {
      throw CudaError(
          "an event in a capture tells no time: capture the step without a trace, and before "
          "traffic.time_waits()");
    }
    event_ = event_pool().take(device, timed);
    check_cuda(cudaEventRecord(get(), stream.get()), "cudaEventRecord");
    if (capture_ != 0) captured_ = stream;
  }
  ~CudaEvent() override { event_pool().give(device_, timed_, std::move(event_)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  cudaEvent_t get() const { return event_.get(); }
  void* native() const override { return get(); }

  // Of a capture: whether that has ended.
  bool query() const override { return state() != cudaErrorNotReady; }

  // CUDA has no wait with a timeout; what waits on the host for a device is in no hurry.
  bool wait_for(std::chrono::milliseconds timeout) const override {
    const auto end = std::chrono::steady_clock::now() + timeout;
    std::chrono::microseconds pause{20};
    while (true) {
      const cudaError_t result = state();
      if (result != cudaErrorNotReady) {
        check_cuda(result, "cudaEventQuery");
        return true;
      }
      if (capture_ != 0) {
        throw CudaError(
            "the host cannot wait for an event of a capture: nothing runs before the graph is "
            "launched");
      }
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds{1000});
    }
  }

  double seconds_since(const Event& earlier) const override {
    const auto* begin = dynamic_cast<const CudaEvent*>(&earlier);
    if (begin == nullptr)
      throw std::invalid_argument(
          "seconds_since: one event is of the host and the other of a device");
    float milliseconds = 0;
    const DeviceScope scope(device_);
    check_cuda(cudaEventElapsedTime(&milliseconds, begin->get(), get()), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  // Has `stream` wait.
  void hold_back(cudaStream_t stream) const {
    if (capture_ != 0) {
      if (state() != cudaErrorNotReady) return;
    } else if (capture_of(stream) != 0) {
      if (state() == cudaSuccess) return;
      throw CudaError(
          "a stream that is captured cannot wait for what was queued before the capture began: "
          "synchronize the device before it");
    }
    check_cuda(cudaStreamWaitEvent(stream, get(), 0), "cudaStreamWaitEvent");
  }

 private:
  // "Not ready" is no error: it must not stay behind as this thread's last one.
  cudaError_t state() const {
    const DeviceScope scope(device_);
    if (capture_ != 0) {
      return capture_of(captured_.get()) == capture_ ? cudaErrorNotReady : cudaSuccess;
    }
    const RelaxedCapture relaxed;
    const cudaError_t result = cudaEventQuery(get());
    if (result == cudaErrorNotReady) cudaGetLastError();
    return result;
  }

  int device_;
  bool timed_;
  unsigned long long capture_ = 0;
  SharedStream captured_;  // null unless in a capture
  OwnedEvent event_;
};

class CudaStream final : public Stream {
 public:
  CudaStream(int device, SharedStream stream) : device_(device), stream_(std::move(stream)) {}

  NativeStream native() const override { return stream_.get(); }
  bool capturing() const override {
    const DeviceScope scope(device_);
    return capture_of(stream_.get()) != 0;
  }

  void enqueue(Operation operation) override {
    const DeviceScope scope(device_);
    operation(stream_.get());
  }

  void copy(void* dst, const void* src, std::size_t bytes) override {
    const DeviceScope scope(device_);
    check_cuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_.get()),
               "cudaMemcpyAsync");
  }

  std::shared_ptr<Event> record(bool timed) override {
    return std::make_shared<CudaEvent>(device_, stream_, timed);
  }

  void wait(std::shared_ptr<Event> event) override {
    const auto* on_device = dynamic_cast<const CudaEvent*>(event.get());
    if (on_device == nullptr) return event->wait();  // the host's: nothing of it is on a device
    const DeviceScope scope(device_);                // null is a stream of the current device
    on_device->hold_back(stream_.get());
  }

 private:
  int device_;
  SharedStream stream_;
};

// Now, as the first use would raise an error of CUDA's that names no device.
void check_present(int device) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    throw CudaError("device is cuda:" + std::to_string(device) + ": " + cuda_status().reason);
  }
  if (device < 0 || device >= devices) {
    throw std::invalid_argument("device is " + std::to_string(device) + "; this process has " +
                                std::to_string(devices) + " GPUs, counted from 0");
  }
}

}  // namespace

std::unique_ptr<Stream> make_cuda_stream(int device) {
  check_present(device);
  const DeviceScope scope(device);
  // Communication is what computation waits for: it goes first where both are ready.
  int least = 0;
  int greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
             "cudaStreamCreateWithPriority");
  // What is on it still runs when it is destroyed.
  const auto destroy = [device](cudaStream_t ended) {
    release_on(device, [ended] { cudaStreamDestroy(ended); });
  };
  return std::make_unique<CudaStream>(device, SharedStream(stream, destroy));
}

std::unique_ptr<Stream> borrow_cuda_stream(int device, NativeStream stream) {
  check_present(device);
  const auto borrowed = static_cast<cudaStream_t>(stream);
  return std::make_unique<CudaStream>(device, SharedStream(borrowed, [](cudaStream_t) {}));
}

std::shared_ptr<Event> record_on_cuda(int device, NativeStream stream) {
  const SharedStream borrowed(std::shared_ptr<void>(), static_cast<cudaStream_t>(stream));
  return std::make_shared<CudaEvent>(device, borrowed, false);
}

}  // namespace shardcomm
