#include "fake_cuda.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

struct CUstream_st {
 public:
  ~CUstream_st() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void push(std::function<void()> work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }
  const int device = current;

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool ending_ = false;
  std::thread thread_{[this] { run(); }};
};

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<std::atomic<bool>> fired = std::make_shared<std::atomic<bool>>(true);
  std::shared_ptr<std::atomic<bool>> get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return fired;
  }
};

namespace {

std::mutex streams_mutex;
std::map<cudaStream_t, std::shared_ptr<CUstream_st>> streams;

cudaStream_t make_stream() {
  auto stream = std::make_shared<CUstream_st>();
  const std::lock_guard<std::mutex> lock(streams_mutex);
  return streams.emplace(stream.get(), stream).first->first;
}

cudaStream_t or_default(cudaStream_t stream) {
  if (stream != nullptr) return stream;
  static thread_local cudaStream_t of_thread = make_stream();
  return of_thread;
}

void* allocate(std::size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }

}  // namespace

void fake_enqueue(cudaStream_t stream, std::function<void()> work) {
  or_default(stream)->push(std::move(work));
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 8;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  std::vector<std::shared_ptr<CUstream_st>> own;  // which another thread may destroy meanwhile
  {
    const std::lock_guard<std::mutex> lock(streams_mutex);
    for (const auto& [_, stream] : streams) {
      if (stream->device == current) own.push_back(stream);
    }
  }
  for (const auto& stream : own) stream->synchronize();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = make_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::shared_ptr<CUstream_st> ended;  // waits for its work outside of the lock
  const std::lock_guard<std::mutex> lock(streams_mutex);
  const auto found = streams.find(stream);
  ended = std::move(found->second);
  streams.erase(found);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  or_default(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake_enqueue(stream, [fired = event->get()] {
    while (!fired->load()) std::this_thread::yield();
  });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = std::make_unique<CUevent_st>().release();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::unique_ptr<CUevent_st>(event).reset();
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto fired = std::make_shared<std::atomic<bool>>(false);
  {
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->fired = fired;
  }
  fake_enqueue(stream, [fired] { fired->store(true); });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->get()->load()) return cudaSuccess;
  return last_error = cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* time, cudaEvent_t, cudaEvent_t) {
  *time = 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  *data = allocate(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  cudaDeviceSynchronize();
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
  *data = allocate(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  fake_enqueue(stream, [data] { std::free(data); });
  return cudaSuccess;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t*, const cudaMemPoolProps*) { return cudaSuccess; }
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemset(void* data, int value, std::size_t bytes) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
  fake_enqueue(stream, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  fake_enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*, const void*) { return cudaSuccess; }

}  // extern "C"
