// The body of the CUDA reduction kernel: what thread `thread` of all `threads` of a launch does.
// Plain C++, so that a CPU test can walk every thread through it.
//
// clang-format off
//   vector      0   1   2   3 | 4   5   6   7 | 8 ...
//   source 0        x         |     x         |     x
//   source 1        x         |     x         |     x
// clang-format on
// With 4 threads, thread 1 takes vectors 1, 5, 9 and 13 at once, from up to 4 sources at once. It
// combines the sources as reduce_cpu does, and stores the results.
#pragma once

#include <cstdint>

#include "copy/reduce_cuda.h"
#include "copy/reduce_element.h"
#include "copy/thread_copy.h"
#include "shardcomm/reduce.h"

namespace shardcomm {

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

// Binary digits of the number of quads: of sources that are read as vectors, and of kMostSources.
constexpr int kFewDigits = 3;
constexpr int kMostDigits = 7;
constexpr int kMostVectorSources = kQuad * ((1 << kFewDigits) - 1);
static_assert(kMostSources / kQuad < 1 << kMostDigits);

// Combines `few` neighbours, at most four. `source(k)` is the value of the one at k.
template <class Source, class Combine>
SHARDCOMM_HOST_DEVICE inline auto combine_quad(int few, const Source& source,
                                               const Combine& combine) {
  auto total = source(0);
  if (few > 1) combine(total, source(1));
  if (few <= 2) return total;
  auto upper = source(2);
  if (few > 3) combine(upper, source(3));
  combine(total, upper);
  return total;
}

// Combines quads of sources as reduce_cpu does. `quad(k)` is the combined value of the sources from
// k on, up to four of them; `combine(lower, upper)` combines two values into the lower one. The
// values that wait for their neighbours stand where the binary digits of the number of quads have
// ones. The inner loops are short and of constant length: unrolled, they keep all values in
// registers.
template <int kDigits, class Quad, class Combine>
SHARDCOMM_HOST_DEVICE inline auto combine_quads(int num_sources, const Quad& quad,
                                                const Combine& combine) {
  decltype(quad(0)) waiting[kDigits] = {};
  int quads = 0;
  for (; quads * kQuad < num_sources; ++quads) {
    auto total = quad(quads * kQuad);
    bool carries = true;
    for (int digit = 0; digit < kDigits; ++digit) {
      if (!carries) continue;
      if (quads >> digit & 1) {
        combine(waiting[digit], total);
        total = waiting[digit];
      } else {
        waiting[digit] = total;
        carries = false;
      }
    }
  }
  auto total = waiting[0];
  bool has_any = false;
  for (int digit = 0; digit < kDigits; ++digit) {
    if ((quads >> digit & 1) == 0) continue;
    if (has_any) combine(waiting[digit], total);
    total = waiting[digit];
    has_any = true;
  }
  return total;
}

// Reduces the elements from `begin` on, one at a time: those that whole vectors leave over, or all
// of them where vectors cannot be used.
template <class Src, class Dst, class Op, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_elements(const Reduction& reduction, std::int64_t begin,
                                                  std::int64_t thread, std::int64_t threads,
                                                  Side& side) {
  using Value = Accumulator<Src>;
  auto* dst = static_cast<Dst*>(reduction.dst);
  for (std::int64_t i = begin + thread; i < reduction.count; i += threads) {
    Dst to = reduction.accumulate ? dst[i] : Dst{};
    const auto combine = [](Value& lower, Value upper) { lower = Op::combine(lower, upper); };
    const auto quad = [&](int first) {
      const auto few = static_cast<int>(smaller(reduction.num_sources - first, kQuad));
      const auto source = [&](int k) {
        return load(static_cast<const Src*>(reduction.sources.at[first + k])[i]);
      };
      return combine_quad(few, source, combine);
    };
    const Value total = combine_quads<kMostDigits>(reduction.num_sources, quad, combine);
    finish(to, total, reduction.accumulate, reduction.divisor, static_cast<Value>(reduction.mean),
           static_cast<Value>(reduction.scale));
    side.wrote(to);
    dst[i] = to;
  }
}

// The whole vectors of a reduction, as one thread sees them.
template <class Src, class Dst, class Op>
class Vectors {
 public:
  static constexpr int kElements = kVectorElements<Src, Dst>;
  using Value = Accumulator<Src>;
  using Read = Words<Src, kElements>;
  using Written = Words<Dst, kElements>;
  using Total = Elements<Value, kElements>;

  SHARDCOMM_HOST_DEVICE explicit Vectors(const Reduction& reduction)
      : reduction_(reduction),
        dst_(static_cast<Dst*>(reduction.dst)),
        count_(reduction.count / kElements),
        mean_(static_cast<Value>(reduction.mean)),
        scale_(static_cast<Value>(reduction.scale)) {}
  SHARDCOMM_HOST_DEVICE std::int64_t count() const { return count_; }
  // The first element of a vector. Past the end it is that of the last vector, which is then read
  // again and not stored, so that loads have no branches.
  SHARDCOMM_HOST_DEVICE std::int64_t at(std::int64_t vector) const {
    return smaller(vector, count_ - 1) * kElements;
  }
  // What the destination's vector at element `at` held before: zeros unless the reduction
  // accumulates.
  SHARDCOMM_HOST_DEVICE Written before(std::int64_t at) const {
    return reduction_.accumulate ? load_words<Dst, kElements>(dst_ + at) : Written{};
  }
  SHARDCOMM_HOST_DEVICE const Src* source(int k) const {
    return static_cast<const Src*>(reduction_.sources.at[k]);
  }
  SHARDCOMM_HOST_DEVICE static Total loaded(const Read& words) {
    const auto read = elements_of<Src, kElements>(words);
    Total total;
    for (int i = 0; i < kElements; ++i) total.at[i] = load(read.at[i]);
    return total;
  }
  SHARDCOMM_HOST_DEVICE static void combine(Total& lower, const Total& upper) {
    for (int i = 0; i < kElements; ++i) lower.at[i] = Op::combine(lower.at[i], upper.at[i]);
  }
  // Combines what has been read of `few` sources, at most four.
  SHARDCOMM_HOST_DEVICE static Total quad(const Read* words, int few) {
    return combine_quad(few, [&](int k) { return loaded(words[k]); }, combine);
  }
  template <class Side>
  SHARDCOMM_HOST_DEVICE void store(std::int64_t at, const Written& before, const Total& total,
                                   Side& side) const {
    auto to = elements_of<Dst, kElements>(before);
    for (int i = 0; i < kElements; ++i) {
      finish(to.at[i], total.at[i], reduction_.accumulate, reduction_.divisor, mean_, scale_);
      side.wrote(to.at[i]);
    }
    store_vector(dst_ + at, to);
  }

 private:
  const Reduction& reduction_;
  Dst* dst_;
  std::int64_t count_;
  Value mean_;
  Value scale_;
};

// Reduces exactly `kSources` sources. A thread has `kVectors` vectors of each source under way
// before it combines any.
template <int kVectors, int kSources, class Src, class Dst, class Op, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_few(const Vectors<Src, Dst, Op>& all, std::int64_t thread,
                                             std::int64_t threads, Side& side) {
  using All = Vectors<Src, Dst, Op>;
  for (std::int64_t first = thread; first < all.count(); first += kVectors * threads) {
    std::int64_t at[kVectors];
    typename All::Written before[kVectors];
    typename All::Read from[kVectors][kSources];
    for (int v = 0; v < kVectors; ++v) {
      at[v] = all.at(first + v * threads);
      before[v] = all.before(at[v]);
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int s = 0; s < kSources; ++s) {
        from[v][s] = load_words<Src, All::kElements>(all.source(s) + at[v]);
      }
    }
    // Backwards, for the reason given in copy_accesses.
    for (int v = kVectors - 1; v >= 0; --v) {
      if (v > 0 && first + v * threads >= all.count()) continue;
      all.store(at[v], before[v], All::quad(from[v], kSources), side);
    }
  }
}

// Reduces up to 4 * (2^kDigits - 1) sources. A thread has a vector of up to four sources under way
// at once.
template <int kDigits, class Src, class Dst, class Op, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_many(const Vectors<Src, Dst, Op>& all, int num_sources,
                                              std::int64_t thread, std::int64_t threads,
                                              Side& side) {
  using All = Vectors<Src, Dst, Op>;
  for (std::int64_t vector = thread; vector < all.count(); vector += threads) {
    const std::int64_t at = all.at(vector);
    const auto before = all.before(at);
    const auto quad = [&](int k) {
      const int few = static_cast<int>(smaller(num_sources - k, kQuad));
      typename All::Read from[kQuad] = {};
      for (int s = 0; s < kQuad; ++s) {
        if (s < few) from[s] = load_words<Src, All::kElements>(all.source(k + s) + at);
      }
      return All::quad(from, few);
    };
    all.store(at, before, combine_quads<kDigits>(num_sources, quad, All::combine), side);
  }
}

template <class Src, class Dst, class Op, class Side>
SHARDCOMM_HOST_DEVICE inline void reduce_as_thread(const Reduction& reduction, std::int64_t thread,
                                                   std::int64_t threads, Side& side) {
  // The values that wait while many sources are combined have room in registers one element at a
  // time.
  if (!reduction.is_whole || reduction.num_sources > kMostVectorSources) {
    return reduce_elements<Src, Dst, Op>(reduction, 0, thread, threads, side);
  }
  const Vectors<Src, Dst, Op> all(reduction);
  constexpr int kElements = kVectorElements<Src, Dst>;
  constexpr int kWords = kElements * sizeof(Src) / sizeof(Word);  // of a vector: 1 or 2
  switch (reduction.num_sources) {
    case 1:  // a sum that NCCL has made
      reduce_few<4 / kWords, 1>(all, thread, threads, side);
      break;
    case 2:
      reduce_few<4 / kWords, 2>(all, thread, threads, side);
      break;
    case 3:
      reduce_few<2 / kWords, 3>(all, thread, threads, side);
      break;
    case 4:
      reduce_few<2 / kWords, 4>(all, thread, threads, side);
      break;
    default:
      reduce_many<kFewDigits>(all, reduction.num_sources, thread, threads, side);
  }
  const std::int64_t whole = all.count() * kElements;
  reduce_elements<Src, Dst, Op>(reduction, whole, thread, threads, side);
}

// The reduction with reduce_cpu's arguments, which it checks as reduce_cpu does.
Reduction reduction_of(void* dst, const Epilogue& epilogue, const void* const* sources,
                       int num_sources, DType dtype, RedOp op, int divisor, std::int64_t count);

// Calls visit(Src{}, Dst{}, Op{}) with the types of a reduction that check_on_device accepts.
template <class Visit>
void visit_reduction(DType dtype, DType dst_dtype, RedOp op, Visit visit) {
  with_type(dtype, [&](auto src) {
    with_type(dst_dtype, [&](auto dst) {
      using Src = std::decay_t<decltype(src)>;
      using Dst = std::decay_t<decltype(dst)>;
      constexpr bool kConverts =
          std::is_same_v<Accumulator<Src>, float> && std::is_same_v<Accumulator<Dst>, float>;
      if constexpr (kConverts || (std::is_same_v<Src, Dst> && !std::is_same_v<Src, std::int8_t>)) {
        with_operation(op, [&](auto with) { visit(src, dst, with); });
      }
    });
  });
}

// Runs the CUDA kernel's code on the CPU, thread by thread.
void walk_reduce(void* dst, const Epilogue& epilogue, const void* const* sources, int num_sources,
                 DType dtype, RedOp op, int divisor, std::int64_t count, std::int64_t threads);

}  // namespace shardcomm
