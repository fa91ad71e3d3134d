// The CUDA executor of block formats.
#pragma once

#include <cstdint>
#include <vector>

#include "shardcomm/blocks.h"
#include "shardcomm/stream.h"

namespace shardcomm {

// These do on the current device what their namesakes in shardcomm/blocks.h do on the CPU, to the
// bit, and throw what these throw, and CudaError. Each puts one kernel on the stream, and one more
// for every kMostBlockSegments segments. They copy nothing to the device, allocate nothing, and can
// be captured in a graph.
void encode_cuda(const BlockFormat& format, const std::vector<EncodedSegment>& segments,
                 DType dtype, void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                 NativeStream stream);
void decode_cuda(const BlockFormat& format, const void* wire, std::int64_t bytes,
                 const std::vector<DecodedSegment>& segments, DType dtype, NativeStream stream);
void decode_sum_cuda(const BlockFormat& format, const void* wires, int parts, void* dst,
                     std::int64_t count, const Epilogue& epilogue, NativeStream stream);

}  // namespace shardcomm
