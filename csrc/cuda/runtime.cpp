#include "cuda/runtime.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "shardcomm/cuda.h"

namespace shardcomm {
namespace {

// A function of the driver, to which nothing is linked, as it is missing where there is no GPU.
template <class Function>
Function* in_driver(const char* name) {
  constexpr unsigned kVersion = 12000;  // the oldest driver that serves this runtime has it
  void* function = nullptr;
  check_cuda(
      cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, nullptr),
      name);
  if (function == nullptr) throw CudaError(std::string("the driver has no ") + name);
  return reinterpret_cast<Function*>(function);
}

struct Driver {
  decltype(&cuCtxGetCurrent) get_current = in_driver<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
  decltype(&cuCtxSetCurrent) set_current = in_driver<decltype(cuCtxSetCurrent)>("cuCtxSetCurrent");
};
const Driver& driver() {
  static const Driver instance;
  return instance;
}

}  // namespace

void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky is dealt with here, once
  throw CudaError(std::string(what) + ": " + cudaGetErrorString(result));
}

DeviceScope::DeviceScope(int device) {
  int current = -1;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");  // also: the driver is there
  driver().get_current(&before_);
  if (before_ != nullptr && current == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (changed_) driver().set_current(before_);
}

// An error counts as no capture: the next call that uses the stream reports what is wrong with it.
unsigned long long capture_of(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture) != cudaSuccess) cudaGetLastError();
  return status == cudaStreamCaptureStatusActive ? capture : 0;
}

DeviceMemory::DeviceMemory(int device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  release_on(device_, [this] {
    const RelaxedCapture relaxed;
    cudaFree(data_);
  });
}

void DeviceMemory::fill_with_zeros() {
  const DeviceScope scope(device_);
  check_cuda(cudaMemset(data_, 0, bytes_), "cudaMemset");
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

void DeviceMemory::copy_from_host(const void* from) {
  const DeviceScope scope(device_);
  check_cuda(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

OwnedEvent make_event(bool timed) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
             "cudaEventCreateWithFlags");
  return OwnedEvent(event, {device});
}

int processors() {
  int device = 0;
  int count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

int resident_blocks(const void* kernel, int threads) {
  // Asked for at every launch of a communicator, and never another answer.
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int>, int> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = known[{device, kernel, threads}];
  if (blocks == 0) {
    int per_processor = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    blocks = processors() * std::max(1, per_processor);
  }
  return blocks;
}

int device_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  const bool on_device =
      attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  return on_device ? attributes.device : -1;
}

bool cuda_built() { return true; }

CudaStatus cuda_status() {
  CudaStatus status;
  status.built = true;
  status.runtime_version = CUDART_VERSION;
  if (cudaDriverGetVersion(&status.driver_version) != cudaSuccess) status.driver_version = 0;
  const cudaError_t result = cudaGetDeviceCount(&status.devices);
  status.available = result == cudaSuccess && status.devices > 0;
  if (status.driver_version == 0) {
    status.reason = "no NVIDIA driver is loaded on this machine";
  } else if (result != cudaSuccess) {
    status.reason = cudaGetErrorString(result);
    cudaGetLastError();
  } else if (status.devices == 0) {
    status.reason = "the driver sees no device (CUDA_VISIBLE_DEVICES?)";
  }
  return status;
}

}  // namespace shardcomm
