// The elements of a block are summed plainly where that is exact for all of them: where exponents
// lie so close that a double holds every partial sum or, of elements of 16 bits, a float, in which
// the caller sums. Else sums are kept in pairs of doubles, total + residue, without an error as
// long as nothing is lost; of two sources nothing can be lost. What is not finite, or lost
// something, is summed anew in fixed point.
#include "copy/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "copy/reduce_element.h"
#include "copy/simd.h"
#include "copy/superaccumulator.h"

namespace shardcomm {
namespace {

// Each of a block's elements has its total, its residue and what was lost, in rows.
enum SumRow { kTotal, kResidue, kLost };
// Magnitude bits of the element's largest summand, and of its smallest non-zero one, less 1.
enum RangeRow { kLargest, kSmallest, kRangeRows };

constexpr int kFloatBits = 24, kDoubleBits = 53;  // of significands

// Four source pointers; those beyond kSources repeat the last one.
template <class Src, int kSources>
struct Columns {
  [[gnu::always_inline]] explicit Columns(const void* const* sources)
      : a(at(sources, 0)), b(at(sources, 1)), c(at(sources, 2)), d(at(sources, 3)) {}
  [[gnu::always_inline]] static const Src* at(const void* const* sources, int k) {
    return static_cast<const Src*>(sources[std::min(k, kSources - 1)]);
  }
  const Src *a, *b, *c, *d;
};

// Bit layout of f32, bf16 and f16.
template <class Src>
struct Format {
  using Bits = std::conditional_t<sizeof(Src) == 2, std::uint16_t, std::uint32_t>;
  static constexpr int kFraction = std::is_same_v<Src, BFloat16> ? 7
                                   : std::is_same_v<Src, Half>   ? 10
                                                                 : 23;
  static constexpr int kLargestExponent =
      std::is_same_v<Src, Half> ? 30 : 254;  // of what is finite

  [[gnu::always_inline]] static Bits magnitude(Src x) {
    Bits bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<Bits>(bits & (static_cast<Bits>(~Bits{0}) >> 1));
  }
};

template <class Src, int kSources, bool kFirst>
struct Range {
  [[gnu::always_inline]] static void run(void* rows, const void* const* sources,
                                         std::int64_t count) {
    using Bits = typename Format<Src>::Bits;
    Bits* __restrict largest = static_cast<Bits*>(rows) + kLargest * kBlockElements;
    Bits* __restrict smallest = static_cast<Bits*>(rows) + kSmallest * kBlockElements;
    const Columns<Src, kSources> of(sources);
    for (std::int64_t i = 0; i < count; ++i) {
      const Bits bits[] = {Format<Src>::magnitude(of.a[i]), Format<Src>::magnitude(of.b[i]),
                           Format<Src>::magnitude(of.c[i]), Format<Src>::magnitude(of.d[i])};
      Bits most = kFirst ? bits[0] : largest[i];
      Bits least = kFirst ? static_cast<Bits>(bits[0] - 1) : smallest[i];
      for (int k = kFirst ? 1 : 0; k < kSources; ++k) {
        most = std::max(most, bits[k]);
        least = std::min(least, static_cast<Bits>(bits[k] - 1));
      }
      largest[i] = most;
      smallest[i] = least;
    }
  }
};

// The most that the bits of an element's summands differ, and the bits of the largest of all.
template <class Src>
struct Widest {
  [[gnu::always_inline]] static void run(const void* rows, std::int64_t count,
                                         std::uint32_t* spread, std::uint32_t* largest) {
    using Bits = typename Format<Src>::Bits;
    const Bits* __restrict most = static_cast<const Bits*>(rows) + kLargest * kBlockElements;
    const Bits* __restrict least = static_cast<const Bits*>(rows) + kSmallest * kBlockElements;
    Bits widest = 0, highest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      widest = std::max(widest, static_cast<Bits>(most[i] - least[i]));
      highest = std::max(highest, most[i]);
    }
    *spread = widest;
    *largest = highest;
  }
};

[[gnu::always_inline]] inline double* row(double* rows, SumRow which) {
  return rows + which * kBlockElements;
}

// total + the returned error = the former total + x, exactly, unless something is not finite; the
// error is NaN then. (Knuth, The Art of Computer Programming, 2, 4.2.2, theorem B.)
[[gnu::always_inline]] inline double add_exactly(double& total, double x) {
  const double sum = total + x;
  const double added = sum - total;
  const double error = (total - (sum - added)) + (x - added);
  total = sum;
  return error;
}

// Adds the values of `kSources` sources; kFirst: to nothing.
template <class Src, int kSources, bool kFirst, bool kInPairs>
struct Add {
  [[gnu::always_inline]] static void run(double* rows, const void* const* sources,
                                         std::int64_t count) {
    double* __restrict totals = row(rows, kTotal);
    double* __restrict residues = row(rows, kResidue);
    double* __restrict losses = row(rows, kLost);
    const Columns<Src, kSources> of(sources);
    for (std::int64_t i = 0; i < count; ++i) {
      const double values[] = {
          static_cast<double>(load(of.a[i])), static_cast<double>(load(of.b[i])),
          static_cast<double>(load(of.c[i])), static_cast<double>(load(of.d[i]))};
      double total = kFirst ? values[0] : totals[i];
      if constexpr (kInPairs) {
        double residue = kFirst ? 0.0 : residues[i];
        double lost = kFirst ? 0.0 : losses[i];
        for (int k = kFirst ? 1 : 0; k < kSources; ++k) {
          const double error = add_exactly(total, values[k]);
          if (kFirst && k == 1) {
            residue = error;
          } else {
            lost += std::fabs(add_exactly(residue, error));
          }
        }
        residues[i] = residue;
        losses[i] = lost;
      } else {
        for (int k = kFirst ? 1 : 0; k < kSources; ++k) total += values[k];
      }
      totals[i] = total;
    }
  }
};

// Rounds `odd`, a sum already rounded to odd in double, to float. Rounding to odd first avoids
// double rounding (Boldo, Melquiond, 2008).
template <bool kNarrow>
[[gnu::always_inline]] inline float as_float(double odd) {
  if constexpr (kNarrow) {  // to odd once more. Sums of subnormal floats lose nothing.
    constexpr std::uint64_t kBelow = (std::uint64_t{1} << 29) - 1;
    std::uint64_t bits;
    std::memcpy(&bits, &odd, sizeof bits);
    bits = (bits | (((bits & kBelow) + kBelow) & (kBelow + 1))) & ~kBelow;
    std::memcpy(&odd, &bits, sizeof bits);
  }
  return static_cast<float>(odd);
}

// How pairs become sums. `of_pair` gives what a sum is if nothing was lost.
template <bool kNarrow>
struct ToFloat {
  using Value = float;
  static constexpr SumRounding kRounding = SumRounding::odd;
  [[gnu::always_inline]] static float of_pair(double total, double error) {
    std::int64_t bits, sign;
    std::memcpy(&bits, &total, sizeof bits);
    std::memcpy(&sign, &error, sizeof sign);
    // Where the last bit is 0, the odd neighbour is the one on the error's side.
    const std::int64_t step = ((bits ^ sign) < 0 ? -1 : 1) & ~-(bits & 1);
    bits += error != 0 ? step : 0;
    std::memcpy(&total, &bits, sizeof bits);
    return as_float<kNarrow>(total);
  }
  [[gnu::always_inline]] static float of_double(double odd) { return as_float<kNarrow>(odd); }
};

struct ToDouble {
  using Value = double;
  static constexpr SumRounding kRounding = SumRounding::nearest_even;
  [[gnu::always_inline]] static double of_pair(double total, double) { return total; }
  [[gnu::always_inline]] static double of_double(double nearest) { return nearest; }
};

template <class To>
struct RoundPlain {
  [[gnu::always_inline]] static void run(void* sums, double* rows, std::int64_t count) {
    auto* __restrict to = static_cast<typename To::Value*>(sums);
    const double* __restrict totals = row(rows, kTotal);
    for (std::int64_t i = 0; i < count; ++i) to[i] = To::of_double(totals[i]);
  }
};

// Writes sums, and as an element's loss what is not 0 if its sum is not the exact one.
template <class To>
struct RoundPairs {
  [[gnu::always_inline]] static void run(void* sums, double* rows, std::int64_t count) {
    auto* __restrict to = static_cast<typename To::Value*>(sums);
    const double* __restrict totals = row(rows, kTotal);
    const double* __restrict residues = row(rows, kResidue);
    double* __restrict losses = row(rows, kLost);
    for (std::int64_t i = 0; i < count; ++i) {
      double total = totals[i];
      const double kept = total;
      const double error = add_exactly(total, residues[i]);
      total = residues[i] == 0 ? kept : total;  // -0 stays -0
      to[i] = To::of_pair(total, error);
      losses[i] += std::fabs(error - error) + std::fabs(total - total);  // NaN if not finite
    }
  }
};

// The sum of one element, from its summands.
template <class Src, class To>
typename To::Value sum_anew(const void* const* sources, int num_sources, std::int64_t at) {
  Superaccumulator<Accumulator<Src>> sum;
  double infinite = 0.0;
  for (int k = 0; k < num_sources; ++k) {
    const auto value = static_cast<double>(load(static_cast<const Src*>(sources[k])[at]));
    if (std::isfinite(value)) {
      sum.add(value);
    } else {
      infinite += value;  // opposite infinities add up to NaN
    }
  }
  if (infinite != 0) return static_cast<typename To::Value>(infinite);
  return To::of_double(sum.rounded(To::kRounding));
}

template <class Src, class To>
void sum_lost_anew(void* sums, const double* rows, const void* const* sources, int num_sources,
                   std::int64_t begin, std::int64_t count) {
  const double* losses = rows + kLost * kBlockElements;
  const auto lost = [](double loss) { return !(loss == 0); };
  if (std::none_of(losses, losses + count, lost)) return;
  auto* to = static_cast<typename To::Value*>(sums);
  for (std::int64_t i = 0; i < count; ++i) {
    if (lost(losses[i])) to[i] = sum_anew<Src, To>(sources, num_sources, begin + i);
  }
}

template <class Src, bool kFirst, class Function>
void choose_ranges(Function (&ranges)[4]) {
  ranges[0] = best_of<Range<Src, 1, kFirst>>();
  ranges[1] = best_of<Range<Src, 2, kFirst>>();
  ranges[2] = best_of<Range<Src, 3, kFirst>>();
  ranges[3] = best_of<Range<Src, 4, kFirst>>();
}

template <class Src, bool kFirst, bool kInPairs, class Function>
void choose_adds(Function (&adds)[4]) {
  adds[0] = best_of<Add<Src, 1, kFirst, kInPairs>>();
  adds[1] = best_of<Add<Src, 2, kFirst, kInPairs>>();
  adds[2] = best_of<Add<Src, 3, kFirst, kInPairs>>();
  adds[3] = best_of<Add<Src, 4, kFirst, kInPairs>>();
}

}  // namespace

template <class Src, class To>
void ExactSum::choose() {
  choose_adds<Src, true, true>(kernels_.add_in_pairs[0]);
  choose_adds<Src, false, true>(kernels_.add_in_pairs[1]);
  kernels_.round_pairs = best_of<RoundPairs<To>>();
  kernels_.sum_anew = &sum_lost_anew<Src, To>;
  if constexpr (!std::is_same_v<Src, double>) {
    fraction_bits_ = Format<Src>::kFraction;
    largest_exponent_ = Format<Src>::kLargestExponent;
    choose_ranges<Src, true>(kernels_.range[0]);
    choose_ranges<Src, false>(kernels_.range[1]);
    kernels_.widest = best_of<Widest<Src>>();
    choose_adds<Src, true, false>(kernels_.add_plainly[0]);
    choose_adds<Src, false, false>(kernels_.add_plainly[1]);
    kernels_.round_plain = best_of<RoundPlain<To>>();
  }
}

ExactSum::ExactSum(DType dtype, DType recv, const void* const* sources, int num_sources)
    : sources_(sources),
      num_sources_(num_sources),
      src_bytes_(static_cast<std::int64_t>(itemsize(dtype))) {
  while (std::int64_t{1} << carries_ < num_sources) ++carries_;
  with_type(dtype, [&](auto src) {
    using Src = decltype(src);
    if constexpr (std::is_same_v<Src, double>) {
      choose<Src, ToDouble>();
    } else if constexpr (!std::is_integral_v<Src>) {
      recv == DType::f32 ? choose<Src, ToFloat<false>>() : choose<Src, ToFloat<true>>();
    }
  });
}

template <class Visit>
void ExactSum::each_quad(std::int64_t begin, const Visit& visit) const {
  for (int k = 0; k < num_sources_; k += kQuad) {
    const int few = std::min(kQuad, num_sources_ - k);
    const void* blocks[kQuad];
    for (int s = 0; s < few; ++s) {
      blocks[s] = static_cast<const std::byte*>(sources_[k + s]) + begin * src_bytes_;
    }
    visit(k, few, blocks);
  }
}

int ExactSum::bits_needed(std::int64_t begin, std::int64_t count) const {
  constexpr int kTooMany = 1000;
  if (kernels_.widest == nullptr) return kTooMany;
  alignas(64) std::uint32_t rows[kRangeRows * kBlockElements];
  each_quad(begin, [&](int k, int few, const void* const* blocks) {
    kernels_.range[k == 0 ? 0 : 1][few - 1](rows, blocks, count);
  });
  std::uint32_t spread, largest;
  kernels_.widest(rows, count, &spread, &largest);
  // More could overflow, and these are not finite.
  if (static_cast<int>(largest >> fraction_bits_) > largest_exponent_ - carries_) return kTooMany;
  // Exponents differ by no more than bits do, rounded up.
  const std::uint32_t below = (1u << fraction_bits_) - 1;
  return static_cast<int>((spread + below) >> fraction_bits_) + fraction_bits_ + 1 + carries_;
}

bool ExactSum::operator()(void* sums, std::int64_t begin, std::int64_t count) const {
  const int needed = bits_needed(begin, count);
  if (needed <= kFloatBits) return false;
  const bool plainly = needed <= kDoubleBits;
  alignas(64) double rows[kRows * kBlockElements];
  const auto& adds = plainly ? kernels_.add_plainly : kernels_.add_in_pairs;
  each_quad(begin, [&](int k, int few, const void* const* blocks) {
    adds[k == 0 ? 0 : 1][few - 1](rows, blocks, count);
  });
  if (plainly) {
    kernels_.round_plain(sums, rows, count);
  } else {
    kernels_.round_pairs(sums, rows, count);
    kernels_.sum_anew(sums, rows, sources_, num_sources_, begin, count);
  }
  return true;
}

}  // namespace shardcomm
