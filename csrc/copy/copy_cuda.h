// The CUDA executor of a CopyPlan: one launch, whatever the number of tensors.
#pragma once

#include <memory>
#include <vector>

#include "shardcomm/copy_plan.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// A plan's tiles, on a device and ready to run. A run puts one launch on a stream (one more for
// every 4,000 operands), copies nothing to the device, waits for nothing, and can be captured in a
// graph.
class CudaCopy {
 public:
  // Waits for the tiles to be on the device. Throws CudaError, and as check_options does.
  CudaCopy(const CopyPlan& plan, const CopyOptions& options, int device);
  ~CudaCopy();
  CudaCopy(const CudaCopy&) = delete;
  CudaCopy& operator=(const CudaCopy&) = delete;

  // As copy_cpu: null sources write zeros, or (accumulate) leave the destination as it is.
  void run(const void* const* sources, void* const* destinations, NativeStream stream) const;

 private:
  struct DeviceLaunch;
  std::vector<DeviceLaunch> launches_;
  CopyOptions options_;
  int device_;
};

// One contiguous run of elements, without a plan: dst = convert(src); nothing if that is the same
// place. On the current device.
void convert_cuda(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
                  NativeStream stream);

}  // namespace shardcomm
