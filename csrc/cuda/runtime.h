// The CUDA runtime, with errors as exceptions and resources that let go of themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "shardcomm/error.h"

namespace shardcomm {

// Throws CudaError, "<what>: <CUDA's description>", unless `result` is success.
void check_cuda(cudaError_t result, const char* what);

// `device` is current in this scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The number of the capture that records what is put on `stream`; 0: it runs.
unsigned long long capture_of(cudaStream_t stream) noexcept;

// Memory of a device. Freeing it waits for all work of the device.
class DeviceMemory {
 public:
  DeviceMemory(int device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  int device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using OwnedEvent = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
// Of the current device.
OwnedEvent make_event(bool timed = false);

// In this scope the thread may ask about events while another one captures a graph: otherwise that
// would end the capture (cudaThreadExchangeStreamCaptureMode).
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Launches `kernel`; throws CudaError by what the launch itself says. (cudaGetLastError would also
// give what an earlier call of this thread left, for instance cudaErrorNotReady of a query.)
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

// Multiprocessors of the current device.
int processors();

// How many blocks of a kernel the current device holds at once: more would only queue up.
int resident_blocks(const void* kernel, int threads);
template <class... Arguments>
int resident_blocks(void (*kernel)(Arguments...), int threads) {
  return resident_blocks(reinterpret_cast<const void*>(kernel), threads);
}

// The device that `pointer` belongs to; -1 for memory of the host.
int device_of(const void* pointer);

}  // namespace shardcomm
