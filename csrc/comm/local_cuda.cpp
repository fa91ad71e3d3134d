// `local` on a device: N ranks as threads of one process, on one GPU.
#include <string>
#include <utility>
#include <vector>

#include "comm/board_communicator.h"
#include "comm/local.h"
#include "copy/copy_cuda.h"
#include "copy/reduce_cuda.h"
#include "cuda/runtime.h"

namespace shardcomm {
namespace {

cudaStream_t cuda(NativeStream stream) { return static_cast<cudaStream_t>(stream); }

class OnDevice final : public Mapping {
 public:
  OnDevice(int device, std::unique_ptr<DeviceMemory> memory)
      : Mapping(static_cast<std::byte*>(memory->data()), memory->bytes()),
        device_(device),
        memory_(std::move(memory)) {}
  int device() const override { return device_; }

 private:
  int device_;
  std::unique_ptr<DeviceMemory> memory_;
};

std::shared_ptr<Mapping> allocate(int device, std::size_t bytes) {
  try {
    auto memory = std::make_unique<DeviceMemory>(device, bytes);
    memory->fill_with_zeros();
    return std::make_shared<OnDevice>(device, std::move(memory));
  } catch (const CudaError& error) {
    throw CommError("cannot allocate " + std::to_string(bytes) +
                    " bytes of communication memory on device " + std::to_string(device) + ": " +
                    error.what());
  }
}

// Where each rank's stream was before the latest two meetings of a channel. Two are enough: a rank
// comes to the next one only when all have left the one before.
class Marks {
 public:
  Marks(int device, int size) : size_(size) {
    const DeviceScope scope(device);
    for (int i = 0; i < ControlMemory::kChannels * 2 * size; ++i) events_.push_back(make_event());
  }
  cudaEvent_t at(int channel, std::uint64_t meeting, int rank) const {
    const int row = channel * 2 + static_cast<int>(meeting & 1);
    return events_[static_cast<std::size_t>(row * size_ + rank)].get();
  }

 private:
  int size_;
  std::vector<OwnedEvent> events_;
};

class DeviceExecutor final : public Executor {
 public:
  DeviceExecutor(int device, int rank, int size, std::shared_ptr<const Marks> marks)
      : device_(device), rank_(rank), size_(size), marks_(std::move(marks)) {}

  bool on_host() const override { return false; }
  void copy(void* dst, const void* src, std::size_t bytes, NativeStream stream) override {
    const DeviceScope scope(device_);
    check_cuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, cuda(stream)),
               "cudaMemcpyAsync");
  }
  void fill(Filler&, void* dst, const void* src, std::size_t bytes, NativeStream stream) override {
    copy(dst, src, bytes, stream);
  }
  void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
               NativeStream stream) override {
    const DeviceScope scope(device_);
    convert_cuda(dst, dst_dtype, src, src_dtype, count, stream);
  }
  void check_reduction(DType dtype, RedOp op) const override { check_on_device(dtype, op); }
  void reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
              DType dtype, RedOp op, std::int64_t count, NativeStream stream) override {
    const DeviceScope scope(device_);
    reduce_cuda(dst, epilogue, sources, num_sources, dtype, op, size_, count, stream);
  }
  void before_meeting(int channel, std::uint64_t meeting, NativeStream stream) override {
    const DeviceScope scope(device_);
    check_cuda(cudaEventRecord(marks_->at(channel, meeting, rank_), cuda(stream)),
               "cudaEventRecord");
  }
  void after_meeting(int channel, std::uint64_t meeting, NativeStream stream) override {
    const DeviceScope scope(device_);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      check_cuda(cudaStreamWaitEvent(cuda(stream), marks_->at(channel, meeting, r), 0),
                 "cudaStreamWaitEvent");
    }
  }
  void finish() noexcept override {
    try {
      const DeviceScope scope(device_);
      cudaDeviceSynchronize();  // what it says is what the error was that led here
    } catch (const CudaError&) {
      // There is no device any more, and nothing runs on it.
    }
  }

 private:
  int device_;
  int rank_;
  int size_;
  std::shared_ptr<const Marks> marks_;
};

}  // namespace

LocalPlace place_on_device(int device, int size) {
  const auto marks = std::make_shared<const Marks>(device, size);
  return {[device](std::size_t bytes) { return allocate(device, bytes); },
          [device, size, marks](int rank) {
            return std::make_unique<DeviceExecutor>(device, rank, size, marks);
          }};
}

}  // namespace shardcomm
