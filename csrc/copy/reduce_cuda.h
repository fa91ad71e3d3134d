// The reduction over ranks that share a device.
#pragma once

#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// The most sources of one reduction, and so the most ranks that can share a device or a host.
constexpr int kMostSources = 256;

// Throws std::invalid_argument unless there is a kernel for it: for sum, avg, max and min of all
// dtypes but i8.
void check_on_device(DType dtype, RedOp op);

// Computes on the current device what reduce_cpu computes, of at most kMostSources sources. The
// results agree bit for bit, except for the bits of a NaN.
void reduce_cuda(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, NativeStream stream);

}  // namespace shardcomm
