// The CUDA executor of a CopyPlan: one launch, whatever the number of tensors.
#pragma once

#include <memory>
#include <vector>

#include "shardcomm/copy_plan.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// A plan's tiles, on a device and ready to run. A run puts one launch on a stream, and one more for
// every 4,000 operands. It copies nothing to the device, allocates nothing there, waits for
// nothing, and can be captured in a graph.
class CudaCopy {
 public:
  // Waits for the tiles to be on the device. Throws CudaError.
  CudaCopy(const CopyPlan& plan, int device);
  ~CudaCopy();
  CudaCopy(const CudaCopy&) = delete;
  CudaCopy& operator=(const CudaCopy&) = delete;

  // Copies what copy_cpu copies: a null source writes zeros or, with `accumulate`, leaves the
  // destination as it is. The plan's dtypes must allow the options (check_options).
  void run(const void* const* sources, void* const* destinations, const CopyOptions& options,
           NativeStream stream) const;

 private:
  struct DeviceLaunch;
  std::vector<DeviceLaunch> launches_;
  // A build without CUDA reads none of these.
  [[maybe_unused]] DType src_dtype_;
  [[maybe_unused]] DType dst_dtype_;
  [[maybe_unused]] int device_;
};

// Converts one contiguous run of elements on the current device, without a plan: dst =
// convert(src). Does nothing if `dst` and `src` are the same place.
void convert_cuda(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
                  NativeStream stream);

}  // namespace shardcomm
