#include "copy/thread_reduce.h"

#include <stdexcept>
#include <string>

namespace shardcomm {

Reduction reduction_of(void* dst, const Epilogue& epilogue, const void* const* sources,
                       int num_sources, DType dtype, RedOp op, std::int64_t count) {
  check_epilogue(epilogue, dtype);
  if (num_sources < 1 || num_sources > kMostSources) {
    throw std::invalid_argument("num_sources is " + std::to_string(num_sources) +
                                ", it must be 1 to " + std::to_string(kMostSources));
  }
  if (count < 0) {
    throw std::invalid_argument("count is " + std::to_string(count) + ", it must be at least 0");
  }
  Reduction reduction{};
  reduction.num_sources = num_sources;
  reduction.dst = dst;
  reduction.count = count;
  reduction.op = op;
  reduction.scale = epilogue.scale;
  reduction.accumulate = epilogue.accumulate;
  reduction.nonfinite = epilogue.nonfinite;
  reduction.is_whole = is_vector_aligned(dst);
  for (int k = 0; k < num_sources; ++k) {
    reduction.sources.at[k] = sources[k];
    reduction.is_whole &= is_vector_aligned(sources[k]);
  }
  return reduction;
}

void walk_reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, std::int64_t count, std::int64_t threads) {
  const Reduction reduction = reduction_of(dst, epilogue, sources, num_sources, dtype, op, count);
  visit_reduction(dtype, epilogue, [&](auto src, auto to, auto side) {
    for (std::int64_t thread = 0; thread < threads; ++thread) {
      reduce_as_thread<decltype(src), decltype(to)>(reduction, thread, threads, side);
    }
    report(side, epilogue.nonfinite);
  });
}

}  // namespace shardcomm
