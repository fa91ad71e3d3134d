// The reduction over ranks that share a device.
#pragma once

#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// The most sources of one reduction, and so the most ranks that can share a device or a host.
constexpr int kMostSources = 256;

// Computes on the current device what reduce_cpu computes, of at most kMostSources sources. The
// results agree bit for bit, except for the bits of a NaN.
void reduce_cuda(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, NativeStream stream);

}  // namespace shardcomm
