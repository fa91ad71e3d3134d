#include "cuda/runtime.h"

#include "shardcomm/cuda.h"

namespace shardcomm {

void check_cuda(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky is dealt with here, once
  throw CudaError(std::string(what) + ": " + cudaGetErrorString(result));
}

DeviceScope::DeviceScope(int device) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  changed_ = true;
}

DeviceScope::~DeviceScope() {
  if (changed_) cudaSetDevice(before_);
}

DeviceMemory::DeviceMemory(int device, std::size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(device);
  check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  try {
    const DeviceScope scope(device_);
    cudaFree(data_);
  } catch (const CudaError&) {  // the process ends and the driver has gone before
  }
}

int device_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  const bool on_device =
      attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
  return on_device ? attributes.device : -1;
}

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
