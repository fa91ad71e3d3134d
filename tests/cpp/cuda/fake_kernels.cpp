// The kernels of the collectives, run by the CPU when their turn on a fake stream comes.
#include <vector>

#include "copy/blocks_cuda.h"
#include "copy/copy_cuda.h"
#include "copy/reduce_cuda.h"
#include "fake_cuda.h"

namespace shardcomm {

void convert_cuda(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::int64_t count,
                  NativeStream stream) {
  fake_enqueue(static_cast<cudaStream_t>(stream), [=] {
    const CopyPlan plan({{0, 0, 0, count, 0, count, 1, count}}, src_dtype, dst_dtype);
    copy_cpu(plan, &src, &dst, {});
  });
}

void reduce_cuda(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, NativeStream stream) {
  const std::vector<const void*> all(sources, sources + num_sources);
  fake_enqueue(static_cast<cudaStream_t>(stream), [=] {
    reduce_cpu(dst, epilogue, all.data(), num_sources, dtype, op, divisor, count);
  });
}

void encode_cuda(const BlockFormat& format, const std::vector<EncodedSegment>& segments,
                 DType dtype, void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                 NativeStream stream) {
  fake_enqueue(static_cast<cudaStream_t>(stream),
               [=] { encode_cpu(format, segments, dtype, wire, bytes, seed, stats); });
}

void decode_cuda(const BlockFormat& format, const void* wire, std::int64_t bytes,
                 const std::vector<DecodedSegment>& segments, DType dtype, NativeStream stream) {
  fake_enqueue(static_cast<cudaStream_t>(stream),
               [=] { decode_cpu(format, wire, bytes, segments, dtype); });
}

void decode_sum_cuda(const BlockFormat& format, const void* wires, int parts, void* dst,
                     std::int64_t count, const Epilogue& epilogue, NativeStream stream) {
  fake_enqueue(static_cast<cudaStream_t>(stream),
               [=] { decode_sum_cpu(format, wires, parts, dst, count, epilogue); });
}

}  // namespace shardcomm
