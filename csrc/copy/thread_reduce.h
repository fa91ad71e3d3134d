// The body of the CUDA reduction kernel: what thread `thread` of all `threads` of a launch does.
// Plain C++, so that a CPU test can walk every thread through it.
#pragma once

#include <cstdint>

#include "copy/reduce_element.h"
#include "copy/thread_copy.h"
#include "shardcomm/reduce.h"

namespace shardcomm {

// Sources of one reduction: the ranks that share a device.
constexpr int kMostSources = 256;

struct Reduction {
  Operands<kMostSources> sources;
  int num_sources;
  void* dst;
  std::int64_t count;
  RedOp op;
  float scale;
  bool accumulate;
  bool is_whole;  // all pointers allow accesses of 16 bytes
  std::int32_t* nonfinite;
};

template <class T>
SHARDCOMM_HOST_DEVICE inline T combine(RedOp op, T a, T b) {
  switch (op) {
    case RedOp::max:
      return Max::combine(a, b);
    case RedOp::min:
      return Min::combine(a, b);
    default:
      return Sum::combine(a, b);
  }
}

template <class Src, class Dst, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_as_thread(const Reduction& reduction, std::int64_t thread,
                                                   std::int64_t threads, Side& side) {
  using Value = Accumulator<Src>;
  constexpr int kElements = kVectorElements<Converted<Src, Dst>>;
  const int divisor = reduction.op == RedOp::avg ? reduction.num_sources : 1;
  const Value mean = std::is_integral_v<Value> ? Value{1} : Value{1} / static_cast<Value>(divisor);
  const auto scale = static_cast<Value>(reduction.scale);
  auto* dst = static_cast<Dst*>(reduction.dst);

  const std::int64_t vectors = reduction.count / kElements;
  for (std::int64_t v = thread; v < vectors; v += threads) {
    const std::int64_t at = v * kElements;
    Value total[kElements] = {};
    for (int k = 0; k < reduction.num_sources; ++k) {
      const auto* source = static_cast<const Src*>(reduction.sources.at[k]);
      const auto from = load_vector<Src, kElements>(source + at, reduction.is_whole);
      for (int i = 0; i < kElements; ++i) {
        total[i] = k == 0 ? load(from.at[i]) : combine(reduction.op, total[i], load(from.at[i]));
      }
    }
    Vector<Dst, kElements> to{};
    if (reduction.accumulate) to = load_vector<Dst, kElements>(dst + at, reduction.is_whole);
    for (int i = 0; i < kElements; ++i) {
      if (reduction.accumulate) {
        finish<true>(to.at[i], total[i], divisor, mean, scale);
      } else {
        finish<false>(to.at[i], total[i], divisor, mean, scale);
      }
      side.wrote(to.at[i]);
    }
    store_vector(dst + at, to, reduction.is_whole);
  }
  for (std::int64_t i = vectors * kElements + thread; i < reduction.count; i += threads) {
    Value total{};
    for (int k = 0; k < reduction.num_sources; ++k) {
      const Value value = load(static_cast<const Src*>(reduction.sources.at[k])[i]);
      total = k == 0 ? value : combine(reduction.op, total, value);
    }
    if (reduction.accumulate) {
      finish<true>(dst[i], total, divisor, mean, scale);
    } else {
      finish<false>(dst[i], total, divisor, mean, scale);
    }
    side.wrote(dst[i]);
  }
}

// As reduce_cpu; checks its arguments.
Reduction reduction_of(void* dst, const Epilogue& epilogue, const void* const* sources,
                       int num_sources, DType dtype, RedOp op, std::int64_t count);

// Calls visit(Src{}, Dst{}, Side{}) with the types of a reduction.
template <class Visit>
void visit_reduction(DType dtype, const Epilogue& epilogue, Visit visit) {
  with_type(dtype, [&](auto src) {
    with_type(epilogue.dtype, [&](auto dst) {
      using Src = std::decay_t<decltype(src)>;
      using Dst = std::decay_t<decltype(dst)>;
      if constexpr (std::is_same_v<Src, Dst> || (std::is_same_v<Accumulator<Src>, float> &&
                                                 std::is_same_v<Accumulator<Dst>, float>)) {
        return epilogue.nonfinite == nullptr ? visit(src, dst, Unwatched{})
                                             : visit(src, dst, Watch<Dst>{});
      }
    });
  });
}

// The CUDA kernel's code on the CPU, thread by thread.
void walk_reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, std::int64_t count, std::int64_t threads);

}  // namespace shardcomm
