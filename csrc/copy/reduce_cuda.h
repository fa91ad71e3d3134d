// The reduction over ranks that share a device.
#pragma once

#include "shardcomm/reduce.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// Sources of one reduction, as many ranks as share a device or a host.
constexpr int kMostSources = 256;

// As reduce_cpu, bit for bit but for the bits of a NaN; at most kMostSources. On the current
// device.
void reduce_cuda(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, NativeStream stream);

}  // namespace shardcomm
