#include "copy/thread_reduce.h"

#include <stdexcept>
#include <string>

namespace shardcomm {

void check_on_device(DType dtype, RedOp op) {
  if (dtype != DType::i8 && op <= RedOp::min) return;
  throw std::invalid_argument(std::string("op is ") + name(op) + ", of elements of " + name(dtype) +
                              "; accepted on a CUDA device: sum, avg, max and min of u8, i32, i64, "
                              "f16, bf16, f32 and f64; reduce others in memory of the host");
}

Reduction reduction_of(void* dst, const Epilogue& epilogue, const void* const* sources,
                       int num_sources, DType dtype, RedOp op, int divisor, std::int64_t count) {
  check_on_device(dtype, op);
  check_reduction(epilogue, num_sources, dtype, op, divisor, count);
  if (num_sources > kMostSources) {
    throw std::invalid_argument("num_sources is " + std::to_string(num_sources) +
                                ", it must be at most " + std::to_string(kMostSources));
  }
  Reduction reduction{};
  reduction.num_sources = num_sources;
  reduction.dst = dst;
  reduction.count = count;
  reduction.divisor = op == RedOp::avg ? divisor : 1;
  reduction.mean = 1.0 / reduction.divisor;
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
                 DType dtype, RedOp op, int divisor, std::int64_t count, std::int64_t threads) {
  const Reduction reduction =
      reduction_of(dst, epilogue, sources, num_sources, dtype, op, divisor, count);
  visit_reduction(dtype, epilogue.dtype, op, [&](auto src, auto to, auto with) {
    Watch<decltype(to)> side;
    for (std::int64_t thread = 0; thread < threads; ++thread) {
      reduce_as_thread<decltype(src), decltype(to), decltype(with)>(reduction, thread, threads,
                                                                    side);
    }
    report(side, epilogue.nonfinite);
  });
}

}  // namespace shardcomm
