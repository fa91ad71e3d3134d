// Element-wise reduction over ranks, in an order that depends on nothing but their number: the
// arithmetic of reduce-scatter and all-reduce on a CPU.
#pragma once

#include <cstdint>

#include "shardcomm/dtype.h"

namespace shardcomm {

// The last two are how a communicator with CommOptions::exact_sums sums and averages.
enum class RedOp : std::uint8_t { sum, avg, max, min, prod, band, bor, bxor, exact_sum, exact_avg };

constexpr const char* name(RedOp op) {
  switch (op) {
    case RedOp::sum:
      return "sum";
    case RedOp::avg:
      return "avg";
    case RedOp::max:
      return "max";
    case RedOp::min:
      return "min";
    case RedOp::prod:
      return "prod";
    case RedOp::band:
      return "band";
    case RedOp::bor:
      return "bor";
    case RedOp::bxor:
      return "bxor";
    case RedOp::exact_sum:
      return "exact sum";
    case RedOp::exact_avg:
      return "exact avg";
  }
  return "?";
}

// Whether the operation is one of bits. Floats, which have no bits of their own, cannot be its
// elements.
constexpr bool is_bitwise(RedOp op) {
  return op == RedOp::band || op == RedOp::bor || op == RedOp::bxor;
}

constexpr bool is_exact(RedOp op) { return op == RedOp::exact_sum || op == RedOp::exact_avg; }

constexpr bool is_average(RedOp op) { return op == RedOp::avg || op == RedOp::exact_avg; }

// The same operation with exact sums; others than sum and avg stay themselves.
constexpr RedOp exact(RedOp op) {
  if (op == RedOp::sum) return RedOp::exact_sum;
  return op == RedOp::avg ? RedOp::exact_avg : op;
}

// What happens to a reduced element before it is stored: dst = convert(scale * reduced), or with
// `accumulate` dst = convert(dst + scale * reduced). So a shard's gradient is cast, scaled,
// accumulated and checked for NaN without another pass over memory.
struct Epilogue {
  // The dtype of dst. f16, bf16 and f32 convert among each other; other types do not convert.
  DType dtype = DType::f32;
  float scale = 1.0f;
  bool accumulate = false;
  // A flag on dst's device, which is set to 1 if an element that was stored is NaN or Inf (also if
  // it overflowed when it was rounded to `dtype`), and otherwise left as it is. Null: nobody asks.
  std::int32_t* nonfinite = nullptr;
};

// Throws std::invalid_argument unless `op` knows elements of `dtype`.
void check_operation(RedOp op, DType dtype);
// Throws std::invalid_argument unless `dtype` can be reduced into this epilogue.
void check_epilogue(const Epilogue& epilogue, DType dtype);

// dst[i] = epilogue(sources[0][i] op sources[1][i] op ... op sources[num_sources - 1][i]), combined
// as a tree: neighbours first, then pairs of neighbours, and so on. Of six sources:
//
//   ((0 op 1) op (2 op 3)) op (4 op 5)
//
// So partial results of 2^k neighbours each combine to the same bits as all sources at once. f16,
// bf16 and f32 accumulate in f32, f64 in f64, and integers in their own type, where overflow wraps.
//
// exact_sum and exact_avg of floats round the exact sum of all sources once: to the nearest f32, or
// f64, that ties to even; so the order of sources does not matter. For an f16 or bf16 dst it is the
// nearest of these that is stored if nothing is accumulated, and divisor and scale are powers of
// two. A sum of zero is -0 if all sources are, and else +0. Integers are exact in any case.
//
// avg divides the sum by `divisor`, the number of ranks; that is more than num_sources if the
// sources are partial sums themselves. Floats are multiplied by 1 / divisor, and integers are
// divided and truncated. Other operations ignore `divisor`. max and min of NaN and anything are
// NaN, of any sign and payload; of 0.0 and -0.0 they are the first. `dst` may be one of the sources
// if it has their dtype; any other overlap is an error that the function cannot see. Throws
// std::invalid_argument for num_sources < 1, a negative count, an avg with divisor < 1, an epilogue
// dtype to which `dtype` does not convert, and a scale other than 1 for integers.
void reduce_cpu(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                DType dtype, RedOp op, int divisor, std::int64_t count);

// Throws as reduce_cpu does.
void check_reduction(const Epilogue& epilogue, int num_sources, DType dtype, RedOp op, int divisor,
                     std::int64_t count);

}  // namespace shardcomm
