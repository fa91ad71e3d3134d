// What a collective does to memory that all ranks reach, and when a peer sees it.
//
//   host     at once, on the calling thread; done at the next meeting
//   device   on each rank's stream; what a rank queued before a meeting runs before what any rank
//            queues after it. No host waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual void copy(void* dst, const void* src, std::size_t bytes, NativeStream stream) = 0;
  // dst[i] = src[i], converted; nothing if that is the same place.
  virtual void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype,
                       std::int64_t count, NativeStream stream) = 0;
  // As reduce_cpu; there is a source for each rank.
  virtual void reduce(void* dst, const Epilogue& epilogue, const void* const* sources,
                      int num_sources, DType dtype, RedOp op, std::int64_t count,
                      NativeStream stream) = 0;
  // Around the `meeting`th meeting of a channel.
  virtual void before_meeting(int channel, std::uint64_t meeting, NativeStream stream) = 0;
  virtual void after_meeting(int channel, std::uint64_t meeting, NativeStream stream) = 0;
  // Returns when nothing that was queued reads or writes any more. After an error.
  virtual void finish() noexcept = 0;
};

std::unique_ptr<Executor> make_host_executor();

}  // namespace shardcomm
