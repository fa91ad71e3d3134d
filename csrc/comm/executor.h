// Moves and reduces memory that all ranks reach, for a collective. There are two executors:
//
//   host     works at once, on the calling thread; peers see the result at the next meeting
//   device   works on each rank's stream; work that a rank queued before a meeting runs before work
//            that any rank queues after it. No host waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/filler.h"
#include "shardcomm/dtype.h"
#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

class Executor {
 public:
  virtual ~Executor() = default;
  // Whether operands are memory of the host, which can go through staging areas.
  virtual bool on_host() const = 0;
  virtual void copy(void* dst, const void* src, std::size_t bytes, NativeStream stream) = 0;
  // The same into memory of which other ranks' cores hold the lines. `filler` belongs to the calls
  // under way.
  virtual void fill(Filler& filler, void* dst, const void* src, std::size_t bytes,
                    NativeStream stream) = 0;
  // dst[i] = src[i], converted. Does nothing if both are the same place.
  virtual void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype,
                       std::int64_t count, NativeStream stream) = 0;
  // Throws std::invalid_argument if `reduce` has no such operation.
  virtual void check_reduction(DType dtype, RedOp op) const = 0;
  // As reduce_cpu, with a source for each rank.
  virtual void reduce(void* dst, const Epilogue& epilogue, const void* const* sources,
                      int num_sources, DType dtype, RedOp op, std::int64_t count,
                      NativeStream stream) = 0;
  // Called around the `meeting`th meeting of a channel.
  virtual void before_meeting(int channel, std::uint64_t meeting, NativeStream stream) = 0;
  virtual void after_meeting(int channel, std::uint64_t meeting, NativeStream stream) = 0;
  // For use after an error: returns when no queued work reads or writes any more.
  virtual void finish() noexcept = 0;
};

std::unique_ptr<Executor> make_host_executor();

}  // namespace shardcomm
