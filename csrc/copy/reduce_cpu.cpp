// Reduction block by block: the partial result of a block stays in the nearest cache, so that each
// element of each source is read once and each element of dst written once, whatever the number of
// sources.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "copy/nonfinite.h"
#include "copy/reduce_element.h"
#include "copy/simd.h"
#include "shardcomm/reduce.h"

namespace shardcomm {
namespace {

constexpr std::int64_t kBlockElements = 128;

// The loops over one block. `partial` holds Accumulator<Src> elements.

template <class Src>
struct LoadOne {
  [[gnu::always_inline]] static void run(void* partial, const void* source, std::int64_t count) {
    auto* __restrict to = static_cast<Accumulator<Src>*>(partial);
    const auto* __restrict from = static_cast<const Src*>(source);
    for (std::int64_t i = 0; i < count; ++i) to[i] = load(from[i]);
  }
};

template <class Src, class Op>
struct LoadTwo {
  [[gnu::always_inline]] static void run(void* partial, const void* first, const void* second,
                                         std::int64_t count) {
    auto* __restrict to = static_cast<Accumulator<Src>*>(partial);
    const auto* a = static_cast<const Src*>(first);
    const auto* b = static_cast<const Src*>(second);
    for (std::int64_t i = 0; i < count; ++i) to[i] = Op::combine(load(a[i]), load(b[i]));
  }
};

template <class Src, class Op>
struct Fold {
  [[gnu::always_inline]] static void run(void* partial, const void* source, std::int64_t count) {
    auto* __restrict to = static_cast<Accumulator<Src>*>(partial);
    const auto* __restrict from = static_cast<const Src*>(source);
    for (std::int64_t i = 0; i < count; ++i) to[i] = Op::combine(to[i], load(from[i]));
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
    for (std::int64_t i = 0; i < count; ++i) {
      finish(to[i], from[i], kAccumulate, divisor, mean, factor);
      side.wrote(to[i]);
    }
    report(side, nonfinite);
  }
};

struct Kernels {
  void (*load_one)(void* partial, const void* source, std::int64_t count);
  void (*load_two)(void* partial, const void* a, const void* b, std::int64_t count);
  void (*fold)(void* partial, const void* source, std::int64_t count);
  void (*finish)(void* dst, const void* partial, std::int64_t count, int divisor, float scale,
                 std::int32_t* nonfinite);
};

template <class Src, class Op>
void choose_loads(Kernels& kernels) {
  kernels.load_one = best_of<LoadOne<Src>>();
  kernels.load_two = best_of<LoadTwo<Src, Op>>();
  kernels.fold = best_of<Fold<Src, Op>>();
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
    with_operation(op, [&](auto with) { choose_loads<Src, decltype(with)>(kernels); });
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

void check_epilogue(const Epilogue& epilogue, DType dtype) {
  if (epilogue.dtype != dtype && !(is_convertible(epilogue.dtype) && is_convertible(dtype))) {
    throw std::invalid_argument(std::string("no conversion from ") + name(dtype) + " to " +
                                name(epilogue.dtype) +
                                ": f32, bf16 and f16 convert, others stay themselves");
  }
  const bool floating = is_convertible(dtype) || dtype == DType::f64;
  if (!floating && epilogue.scale != 1.0f) {
    throw std::invalid_argument(std::string("scale is ") + std::to_string(epilogue.scale) +
                                ", it must be 1 for " + name(dtype));
  }
}

void check_reduction(const Epilogue& epilogue, int num_sources, DType dtype, RedOp op, int divisor,
                     std::int64_t count) {
  check_epilogue(epilogue, dtype);
  require_at_least("num_sources", num_sources, 1);
  require_at_least("count", count, 0);
  if (op == RedOp::avg) require_at_least("divisor", divisor, 1);
}

void reduce_cpu(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                DType dtype, RedOp op, int divisor, std::int64_t count) {
  check_reduction(epilogue, num_sources, dtype, op, divisor, count);
  const Kernels kernels = choose(dtype, op, epilogue);
  if (op != RedOp::avg) divisor = 1;
  const auto src_bytes = static_cast<std::int64_t>(itemsize(dtype));
  const auto dst_bytes = static_cast<std::int64_t>(itemsize(epilogue.dtype));

  alignas(64) std::byte partial[kBlockElements * sizeof(double)];
  for (std::int64_t begin = 0; begin < count; begin += kBlockElements) {
    const std::int64_t n = std::min(kBlockElements, count - begin);
    const auto block = [&](int k) {
      return static_cast<const std::byte*>(sources[k]) + begin * src_bytes;
    };
    if (num_sources == 1) {
      kernels.load_one(partial, block(0), n);
    } else {
      kernels.load_two(partial, block(0), block(1), n);
      for (int k = 2; k < num_sources; ++k) kernels.fold(partial, block(k), n);
    }
    kernels.finish(static_cast<std::byte*>(dst) + begin * dst_bytes, partial, n, divisor,
                   epilogue.scale, epilogue.nonfinite);
  }
}

}  // namespace shardcomm
