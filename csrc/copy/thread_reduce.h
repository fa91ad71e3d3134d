// The body of the CUDA reduction kernel: what thread `thread` of all `threads` of a launch does.
// Plain C++, so that a CPU test can walk every thread through it.
//
//   vector      0   1   2   3 | 4   5   6   7 | 8 ...       with 4 threads; thread 1 takes 1, 5, 9, 13
//   source 0    .   x         |     x         |     x       at once, from up to 4 sources at once,
//   source 1    .   x         |     x         |     x       and stores what they make
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
  int divisor;  // 1 where there is no average
  double mean;  // 1 / divisor; as a float it is the float nearest to that
  float scale;
  bool accumulate;
  bool is_whole;  // all pointers allow accesses of 16 bytes
  std::int32_t* nonfinite;
};

// The elements from `begin` on, one at a time: what vectors leave over, or do not reach.
template <class Src, class Dst, class Op, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_elements(const Reduction& reduction, std::int64_t begin,
                                                  std::int64_t thread, std::int64_t threads,
                                                  Side& side) {
  using Value = Accumulator<Src>;
  auto* dst = static_cast<Dst*>(reduction.dst);
  for (std::int64_t i = begin + thread; i < reduction.count; i += threads) {
    Dst to = reduction.accumulate ? dst[i] : Dst{};
    auto total = Op::template identity<Value>();
    for (int k = 0; k < reduction.num_sources; ++k) {
      total = Op::combine(total, load(static_cast<const Src*>(reduction.sources.at[k])[i]));
    }
    finish(to, total, reduction.accumulate, reduction.divisor, static_cast<Value>(reduction.mean),
           static_cast<Value>(reduction.scale));
    side.wrote(to);
    dst[i] = to;
  }
}

// All whole vectors: a thread has `kVectors` of `kSources` sources under way before it combines any
// two. That many loads are what hides the latency of memory. `kSources` is the number of sources, or
// (kInGroups) they are taken in groups of so many, the last possibly smaller.
template <class Src, class Dst, class Op, int kVectors, int kSources, bool kInGroups, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_vectors(const Reduction& reduction, std::int64_t thread,
                                                 std::int64_t threads, Side& side) {
  using Value = Accumulator<Src>;
  constexpr int kElements = kVectorElements<Src, Dst>;
  const auto mean = static_cast<Value>(reduction.mean);
  const auto scale = static_cast<Value>(reduction.scale);
  auto* dst = static_cast<Dst*>(reduction.dst);
  const std::int64_t vectors = reduction.count / kElements;
  for (std::int64_t first = thread; first < vectors; first += kVectors * threads) {
    // Past the end, the last vector is read again and nothing is stored: loads without branches.
    std::int64_t at[kVectors];
    Words<Dst, kElements> before[kVectors] = {};
    Value total[kVectors][kElements];
    for (int v = 0; v < kVectors; ++v) {
      at[v] = smaller(first + v * threads, vectors - 1) * kElements;
      if (reduction.accumulate) before[v] = load_words<Dst, kElements>(dst + at[v]);
      for (Value& each : total[v]) each = Op::template identity<Value>();
    }
    for (int k = 0; k < (kInGroups ? reduction.num_sources : 1); k += kSources) {
      const auto is_in = [&](int s) { return !kInGroups || k + s < reduction.num_sources; };
      Words<Src, kElements> from[kSources][kVectors] = {};
      for (int s = 0; s < kSources; ++s) {
        if (!is_in(s)) continue;
        const auto* source = static_cast<const Src*>(reduction.sources.at[k + s]);
        for (int v = 0; v < kVectors; ++v) from[s][v] = load_words<Src, kElements>(source + at[v]);
      }
      for (int s = 0; s < kSources; ++s) {
        if (!is_in(s)) continue;
        for (int v = 0; v < kVectors; ++v) {
          const auto read = elements_of<Src, kElements>(from[s][v]);
          for (int i = 0; i < kElements; ++i) {
            total[v][i] = Op::combine(total[v][i], load(read.at[i]));
          }
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * threads >= vectors) break;
      auto to = elements_of<Dst, kElements>(before[v]);
      for (int i = 0; i < kElements; ++i) {
        finish(to.at[i], total[v][i], reduction.accumulate, reduction.divisor, mean, scale);
        side.wrote(to.at[i]);
      }
      store_vector(dst + at[v], to);
    }
  }
}

template <class Src, class Dst, class Op, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_as_thread(const Reduction& reduction, std::int64_t thread,
                                                   std::int64_t threads, Side& side) {
  constexpr int kElements = kVectorElements<Src, Dst>;
  if (!reduction.is_whole) {
    return reduce_elements<Src, Dst, Op>(reduction, 0, thread, threads, side);
  }
  // What NCCL or a node has summed already, two partial sums, all ranks.
  switch (reduction.num_sources) {
    case 1:
      reduce_vectors<Src, Dst, Op, 4, 1, false>(reduction, thread, threads, side);
      break;
    case 2:
      reduce_vectors<Src, Dst, Op, 4, 2, false>(reduction, thread, threads, side);
      break;
    default:
      reduce_vectors<Src, Dst, Op, 2, 4, true>(reduction, thread, threads, side);
  }
  const std::int64_t whole = reduction.count / kElements * kElements;
  reduce_elements<Src, Dst, Op>(reduction, whole, thread, threads, side);
}

// As reduce_cpu; checks its arguments.
Reduction reduction_of(void* dst, const Epilogue& epilogue, const void* const* sources,
                       int num_sources, DType dtype, RedOp op, int divisor, std::int64_t count);

// Calls visit(Src{}, Dst{}, Op{}) with the types of a reduction.
template <class Visit>
void visit_reduction(DType dtype, DType dst_dtype, RedOp op, Visit visit) {
  with_type(dtype, [&](auto src) {
    with_type(dst_dtype, [&](auto dst) {
      using Src = std::decay_t<decltype(src)>;
      using Dst = std::decay_t<decltype(dst)>;
      if constexpr (std::is_same_v<Src, Dst> || (std::is_same_v<Accumulator<Src>, float> &&
                                                 std::is_same_v<Accumulator<Dst>, float>)) {
        with_operation(op, [&](auto with) { visit(src, dst, with); });
      }
    });
  });
}

// The CUDA kernel's code on the CPU, thread by thread.
void walk_reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, std::int64_t threads);

}  // namespace shardcomm
