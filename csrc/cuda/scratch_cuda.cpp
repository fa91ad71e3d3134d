#include <cstdint>

#include "cuda/runtime.h"
#include "cuda/scratch.h"

namespace shardcomm {

ScratchPool::ScratchPool(int device) : device_(device) {
  const DeviceScope scope(device);
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  check_cuda(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
  // Without this, a pool gives all memory back whenever the host waits for the device.
  std::uint64_t keep = UINT64_MAX;
  check_cuda(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep),
             "cudaMemPoolSetAttribute");
}

ScratchPool::~ScratchPool() {
  release_on(device_,
             [this] { cudaMemPoolDestroy(pool_); });  // once what is queued is done with it
}

Scratch::Scratch(const ScratchPool& pool, std::size_t bytes, cudaStream_t stream)
    : stream_(stream) {
  if (bytes == 0) return;
  check_cuda(cudaMallocFromPoolAsync(&data_, bytes, pool.get(), stream), "cudaMallocFromPoolAsync");
}

Scratch::~Scratch() {
  if (data_ != nullptr) cudaFreeAsync(data_, stream_);
}

}  // namespace shardcomm
