// Reduction block by block: the partial results of a block stay in the nearest cache, so that each
// element of each source is read once and each element of dst written once, whatever the number of
// sources.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "copy/exact_sum.h"
#include "copy/nonfinite.h"
#include "copy/reduce_element.h"
#include "copy/simd.h"
#include "shardcomm/reduce.h"

namespace shardcomm {
namespace {

constexpr int kMostPartials = 31;  // of as many sources as an int counts

// The loops over one block. `partial` holds Accumulator<Src> elements.

// Combines the values of `kSources` sources, neighbours first.
template <class Src, class Op, int kSources>
struct Load {
  [[gnu::always_inline]] static void run(void* partial, const void* const* sources,
                                         std::int64_t count) {
    auto* __restrict to = static_cast<Accumulator<Src>*>(partial);
    const auto source = [&](int k) {
      return static_cast<const Src*>(sources[std::min(k, kSources - 1)]);
    };
    const Src *const a = source(0), *const b = source(1), *const c = source(2),
                     *const d = source(3);
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (kSources == 1) {
        to[i] = load(a[i]);
      } else if constexpr (kSources == 2) {
        to[i] = Op::combine(load(a[i]), load(b[i]));
      } else if constexpr (kSources == 3) {
        to[i] = Op::combine(Op::combine(load(a[i]), load(b[i])), load(c[i]));
      } else {
        to[i] =
            Op::combine(Op::combine(load(a[i]), load(b[i])), Op::combine(load(c[i]), load(d[i])));
      }
    }
  }
};

template <class Value, class Op>
struct Merge {
  [[gnu::always_inline]] static void run(void* lower, const void* upper, std::int64_t count) {
    auto* __restrict to = static_cast<Value*>(lower);
    const auto* __restrict from = static_cast<const Value*>(upper);
    for (std::int64_t i = 0; i < count; ++i) to[i] = Op::combine(to[i], from[i]);
  }
};

template <class Dst, bool kAccumulate, class Side>
struct Finish {
  [[gnu::always_inline]] static void run(void* dst, const void* partial, std::int64_t count,
                                         int divisor, float scale, std::int32_t* nonfinite) {
    using Value = Accumulator<Dst>;
    auto* __restrict to = static_cast<Dst*>(dst);
    const auto* __restrict from = static_cast<const Value*>(partial);
    // Integers have neither.
    const Value mean =
        std::is_integral_v<Value> ? Value{1} : Value{1} / static_cast<Value>(divisor);
    const auto factor = static_cast<Value>(scale);
    Side side;
    if (std::is_integral_v<Value> && divisor == 1) {  // apart: vectors do not divide integers
      for (std::int64_t i = 0; i < count; ++i) {
        finish(to[i], from[i], kAccumulate, 1, mean, factor);
      }
    } else {
      for (std::int64_t i = 0; i < count; ++i) {
        finish(to[i], from[i], kAccumulate, divisor, mean, factor);
        side.wrote(to[i]);
      }
    }
    report(side, nonfinite);
  }
};

struct Kernels {
  void (*load[kQuad])(void* partial, const void* const* sources, std::int64_t count);
  void (*merge)(void* lower, const void* upper, std::int64_t count);
  void (*finish)(void* dst, const void* partial, std::int64_t count, int divisor, float scale,
                 std::int32_t* nonfinite);
};

template <class Src, class Op>
void choose_loads(Kernels& kernels) {
  kernels.load[0] = best_of<Load<Src, void, 1>>();
  kernels.load[1] = best_of<Load<Src, Op, 2>>();
  kernels.load[2] = best_of<Load<Src, Op, 3>>();
  kernels.load[3] = best_of<Load<Src, Op, 4>>();
  kernels.merge = best_of<Merge<Accumulator<Src>, Op>>();
}

template <class Dst, class Side>
void choose_finish(Kernels& kernels, bool accumulate) {
  kernels.finish =
      accumulate ? best_of<Finish<Dst, true, Side>>() : best_of<Finish<Dst, false, Side>>();
}

Kernels choose(DType dtype, RedOp op, const Epilogue& epilogue) {
  Kernels kernels{};
  with_type(dtype, [&](auto src) {
    using Src = decltype(src);
    with_any_operation<Src>(op, [&](auto with) { choose_loads<Src, decltype(with)>(kernels); });
  });
  with_type(epilogue.dtype, [&](auto dst) {
    using Dst = decltype(dst);
    if (epilogue.nonfinite == nullptr) {
      choose_finish<Dst, Unwatched>(kernels, epilogue.accumulate);
    } else {
      choose_finish<Dst, Watch<Dst>>(kernels, epilogue.accumulate);
    }
  });
  return kernels;
}

void require_at_least(const char* argument, std::int64_t value, std::int64_t least) {
  if (value >= least) return;
  throw std::invalid_argument(std::string(argument) + " is " + std::to_string(value) +
                              ", it must be at least " + std::to_string(least));
}

}  // namespace

void check_operation(RedOp op, DType dtype) {
  if (!is_bitwise(op) || !is_floating(dtype)) return;
  throw std::invalid_argument(std::string("op is ") + name(op) + ", an operation of bits, and " +
                              "elements are " + name(dtype) + "; it accepts u8, i8, i32 and i64");
}

void check_epilogue(const Epilogue& epilogue, DType dtype) {
  if (epilogue.dtype != dtype && !(is_convertible(epilogue.dtype) && is_convertible(dtype))) {
    throw std::invalid_argument(std::string("no conversion from ") + name(dtype) + " to " +
                                name(epilogue.dtype) +
                                ": f32, bf16 and f16 convert, others stay themselves");
  }
  if (!is_floating(dtype) && epilogue.scale != 1.0f) {
    throw std::invalid_argument(std::string("scale is ") + std::to_string(epilogue.scale) +
                                ", it must be 1 for " + name(dtype));
  }
}

void check_reduction(const Epilogue& epilogue, int num_sources, DType dtype, RedOp op, int divisor,
                     std::int64_t count) {
  check_operation(op, dtype);
  check_epilogue(epilogue, dtype);
  require_at_least("num_sources", num_sources, 1);
  require_at_least("count", count, 0);
  if (is_average(op)) require_at_least("divisor", divisor, 1);
}

void reduce_cpu(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                DType dtype, RedOp op, int divisor, std::int64_t count) {
  check_reduction(epilogue, num_sources, dtype, op, divisor, count);
  const Kernels kernels = choose(dtype, op, epilogue);
  std::optional<ExactSum> sum_exactly;
  if (is_exact(op) && is_floating(dtype)) {
    sum_exactly.emplace(dtype, epilogue.dtype, sources, num_sources);
  }
  if (!is_average(op)) divisor = 1;
  const auto src_bytes = static_cast<std::int64_t>(itemsize(dtype));
  const auto dst_bytes = static_cast<std::int64_t>(itemsize(epilogue.dtype));

  // Quads that have been combined, and not with each other yet, as the binary digits of their
  // number: after 6 quads there are a partial result of 4 and one of 2.
  alignas(64) std::byte partials[kMostPartials][kBlockElements * sizeof(double)];
  const auto combine = [&](std::int64_t begin, std::int64_t n) {
    int depth = 0;
    const auto merge = [&] {
      --depth;
      kernels.merge(partials[depth - 1], partials[depth], n);
    };
    for (int k = 0; k < num_sources; k += kQuad) {
      const int few = std::min(kQuad, num_sources - k);
      const void* blocks[kQuad];
      for (int s = 0; s < few; ++s) {
        blocks[s] = static_cast<const std::byte*>(sources[k + s]) + begin * src_bytes;
      }
      kernels.load[few - 1](partials[depth++], blocks, n);
      for (int quads = k / kQuad + 1; quads % 2 == 0; quads /= 2) merge();
    }
    while (depth > 1) merge();
  };
  for (std::int64_t begin = 0; begin < count; begin += kBlockElements) {
    const std::int64_t n = std::min(kBlockElements, count - begin);
    if (!sum_exactly || !(*sum_exactly)(partials[0], begin, n)) combine(begin, n);
    kernels.finish(static_cast<std::byte*>(dst) + begin * dst_bytes, partials[0], n, divisor,
                   epilogue.scale, epilogue.nonfinite);
  }
}

}  // namespace shardcomm
