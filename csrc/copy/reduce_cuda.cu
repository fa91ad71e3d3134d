#include <algorithm>
#include <cstdint>

#include "copy/reduce_cuda.h"
#include "copy/thread_reduce.h"
#include "cuda/runtime.h"

namespace shardcomm {
namespace {

constexpr int kThreads = 256;

// Blocks that a multiprocessor holds at least, which bounds the registers of a thread (bytes, 16 of
// them in a vector, need more).
template <class Src>
constexpr int kResident = sizeof(Src) == 1 ? 1 : 3;

template <class Src, class Dst, class Op>
__global__ void __launch_bounds__(kThreads, kResident<Src>)
    reduce_run(const __grid_constant__ Reduction reduction) {
  Watch<Dst> side;
  reduce_as_thread<Src, Dst, Op>(reduction, std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                                 std::int64_t{gridDim.x} * blockDim.x, side);
  report_of_block(side, reduction.nonfinite);
}

}  // namespace

void reduce_cuda(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, NativeStream stream) {
  const Reduction reduction =
      reduction_of(dst, epilogue, sources, num_sources, dtype, op, divisor, count);
  if (count == 0) return;
  visit_reduction(dtype, epilogue.dtype, op, [&](auto src, auto to, auto with) {
    using Src = decltype(src);
    using Dst = decltype(to);
    const auto kernel = reduce_run<Src, Dst, decltype(with)>;
    // One vector a thread before any has two: small reductions use all processors.
    const std::int64_t elements = kThreads * kVectorElements<Src, Dst>;
    const std::int64_t blocks =
        std::min<std::int64_t>(divide_up(count, elements), resident_blocks(kernel, kThreads));
    launch_kernel(kernel, static_cast<int>(blocks), kThreads, stream, reduction);
  });
}

}  // namespace shardcomm
