#include <algorithm>
#include <cstdint>

#include "copy/reduce_cuda.h"
#include "copy/thread_reduce.h"
#include "cuda/runtime.h"

namespace shardcomm {
namespace {

constexpr int kThreads = 256;

template <class Src, class Dst, class Side>
__global__ void __launch_bounds__(kThreads)
    reduce_run(const __grid_constant__ Reduction reduction) {
  Side side;
  reduce_as_thread<Src, Dst>(reduction, std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                             std::int64_t{gridDim.x} * blockDim.x, side);
  report_of_block(side, reduction.nonfinite);
}

}  // namespace

void reduce_cuda(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, std::int64_t count, NativeStream stream) {
  const Reduction reduction = reduction_of(dst, epilogue, sources, num_sources, dtype, op, count);
  if (count == 0) return;
  visit_reduction(dtype, epilogue, [&](auto src, auto to, auto side) {
    const auto kernel = reduce_run<decltype(src), decltype(to), decltype(side)>;
    const std::int64_t elements = kThreads * 4;
    const std::int64_t blocks = std::min<std::int64_t>((count + elements - 1) / elements,
                                                       resident_blocks(kernel, kThreads));
    launch_kernel(kernel, static_cast<int>(blocks), kThreads, stream, reduction);
  });
}

}  // namespace shardcomm
