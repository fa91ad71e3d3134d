// The CUDA runtime, with errors as exceptions and resources that release themselves.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "shardcomm/error.h"

namespace shardcomm {

// Throws CudaError, "<what>: <CUDA's description>", unless `result` is success.
void check_cuda(cudaError_t result, const char* what);

// In this scope `device` is the current device. Afterwards the thread has the context that it had
// before, or none. To set the device before instead would give a thread that had none a context on
// device 0, which takes half a gigabyte there. Nearly every CUDA call of a thread without a context
// makes one on device 0, even cudaEventQuery. So every function that any thread may call opens a
// scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  CUcontext before_ = nullptr;
  bool changed_ = false;
};

// Runs `release` with `device` current, unless the process ends and the driver has gone before it.
template <class Release>
void release_on(int device, const Release& release) noexcept {
  try {
    const DeviceScope scope(device);
    release();
  } catch (const CudaError&) {
  }
}

// The number of the capture that records work on `stream`; 0: there is none, and work runs.
unsigned long long capture_of(cudaStream_t stream) noexcept;

// Memory of a device. To free it waits for all work of the device, but not for a capture.
class DeviceMemory {
 public:
  DeviceMemory(int device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // These return when the memory has its contents, so that every stream may use it: CUDA's own
  // functions may return before, and our streams do not wait for the default one.
  void fill_with_zeros();
  void copy_from_host(const void* from);

 private:
  int device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

struct DestroyEvent {
  int device = 0;
  void operator()(cudaEvent_t event) const {
    release_on(device, [event] { cudaEventDestroy(event); });
  }
};
using OwnedEvent = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
// An event of the current device.
OwnedEvent make_event(bool timed = false);

// In this scope the thread may query events and free memory while a graph is captured, by this
// thread or another one; otherwise that would end the capture
// (cudaThreadExchangeStreamCaptureMode).
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Launches `kernel`; throws CudaError if the launch itself returns an error. (cudaGetLastError
// could also return an error that an earlier call of this thread left, such as a query's
// cudaErrorNotReady.)
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), int blocks, int threads, void* stream,
                   Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  static_assert((std::is_same_v<std::decay_t<Parameters>, std::decay_t<Arguments>> && ...));
  check_cuda(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers),
             "kernel launch");
}

// How many multiprocessors the current device has.
int processors();

// How many blocks of a kernel the current device holds at once: more would only queue up.
int resident_blocks(const void* kernel, int threads);
template <class... Arguments>
int resident_blocks(void (*kernel)(Arguments...), int threads) {
  return resident_blocks(reinterpret_cast<const void*>(kernel), threads);
}

// The device to which `pointer` belongs; -1 for memory of the host.
int device_of(const void* pointer);

}  // namespace shardcomm
