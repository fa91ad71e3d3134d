// The elements of a block are added plainly first, those of 16 bits in floats, then those and
// floats in doubles. That is exact if no addition had an error, as is usual where exponents lie
// close. Else sums are kept in pairs of doubles, total + residue, without an error as long as
// nothing is lost; of two sources nothing can be lost. What is not finite, or lost something, is
// summed anew in fixed point.
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

[[gnu::always_inline]] inline double* row(double* rows, SumRow which) {
  return rows + which * kBlockElements;
}

// total + the returned error = the former total + x, exactly, unless something is not finite; the
// error is NaN then. (Knuth, The Art of Computer Programming, 2, 4.2.2, theorem B.)
template <class Value>
[[gnu::always_inline]] inline Value add_exactly(Value& total, Value x) {
  const Value sum = total + x;
  const Value added = sum - total;
  const Value error = (total - (sum - added)) + (x - added);
  total = sum;
  return error;
}

// Adds the values of `kSources` sources to the totals, which are floats or doubles; kFirst: to
// nothing. `*errors` becomes 0 if no addition had an error, and nothing overflowed.
template <class Src, class Value, int kSources, bool kFirst>
struct AddPlainly {
  [[gnu::always_inline]] static void run(void* sums, const void* const* sources, std::int64_t count,
                                         std::uint64_t* errors) {
    using Bits = std::conditional_t<sizeof(Value) == 4, std::uint32_t, std::uint64_t>;
    const auto bits_of = [](Value x) {
      Bits bits;
      std::memcpy(&bits, &x, sizeof bits);
      return bits;
    };
    Value* __restrict totals = static_cast<Value*>(sums);
    const Columns<Src, kSources> of(sources);
    Bits any = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const Value a = load(of.a[i]), b = load(of.b[i]), c = load(of.c[i]), d = load(of.d[i]);
      // The sum minus the larger of x and y has no error (Dekker, 1971, "A floating-point technique
      // for extending the available precision"). So the sum has none if that gives back the other
      // one; both are tried, because to find the larger one takes longer. Equal numbers differ by
      // +0, whose bits are all 0.
      const auto add = [&any, bits_of](Value x, Value y) {
        const Value sum = x + y;
        any |= bits_of((sum - x) - y) | bits_of((sum - y) - x);
        return sum;
      };
      Value total = a;
      if constexpr (kSources == 2) total = add(a, b);
      if constexpr (kSources == 3) total = add(add(a, b), c);
      if constexpr (kSources == 4) total = add(add(a, b), add(c, d));
      totals[i] = kFirst ? total : add(totals[i], total);
    }
    *errors = any;
  }
};

// Adds in pairs of doubles, which lie in rows.
template <class Src, int kSources, bool kFirst>
struct AddInPairs {
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
      totals[i] = total;
      residues[i] = residue;
      losses[i] = lost;
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

template <class Src, class Value, bool kFirst, class Function>
void choose_plain(Function (&adds)[4]) {
  adds[0] = best_of<AddPlainly<Src, Value, 1, kFirst>>();
  adds[1] = best_of<AddPlainly<Src, Value, 2, kFirst>>();
  adds[2] = best_of<AddPlainly<Src, Value, 3, kFirst>>();
  adds[3] = best_of<AddPlainly<Src, Value, 4, kFirst>>();
}

template <class Src, bool kFirst, class Function>
void choose_pairs(Function (&adds)[4]) {
  adds[0] = best_of<AddInPairs<Src, 1, kFirst>>();
  adds[1] = best_of<AddInPairs<Src, 2, kFirst>>();
  adds[2] = best_of<AddInPairs<Src, 3, kFirst>>();
  adds[3] = best_of<AddInPairs<Src, 4, kFirst>>();
}

}  // namespace

template <class Src, class To>
void ExactSum::choose() {
  choose_pairs<Src, true>(kernels_.add_in_pairs[0]);
  choose_pairs<Src, false>(kernels_.add_in_pairs[1]);
  kernels_.round_pairs = best_of<RoundPairs<To>>();
  kernels_.sum_anew = &sum_lost_anew<Src, To>;
  if constexpr (sizeof(Src) == 2) {
    choose_plain<Src, float, true>(kernels_.add_floats[0]);
    choose_plain<Src, float, false>(kernels_.add_floats[1]);
  }
  if constexpr (!std::is_same_v<Src, double>) {
    choose_plain<Src, double, true>(kernels_.add_doubles[0]);
    choose_plain<Src, double, false>(kernels_.add_doubles[1]);
    kernels_.round_plain = best_of<RoundPlain<To>>();
  }
}

ExactSum::ExactSum(DType dtype, DType recv, const void* const* sources, int num_sources)
    : sources_(sources),
      num_sources_(num_sources),
      src_bytes_(static_cast<std::int64_t>(itemsize(dtype))),
      is_rounded_once_(num_sources <= 2 && (dtype == DType::f32 || dtype == DType::f64) &&
                       recv == dtype) {
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

bool ExactSum::add_plainly(const Kernels::AddPlainly (&adds)[2][kQuad], void* totals,
                           std::int64_t begin, std::int64_t count) const {
  std::uint64_t errors = 0;
  each_quad(begin, [&](int k, int few, const void* const* blocks) {
    std::uint64_t more;
    adds[k == 0 ? 0 : 1][few - 1](totals, blocks, count, &more);
    errors |= more;
  });
  return errors == 0;
}

bool ExactSum::operator()(void* sums, std::int64_t begin, std::int64_t count) const {
  if (is_rounded_once_) return false;
  const bool in_floats = kernels_.add_floats[0][0] != nullptr;
  if (in_floats && add_plainly(kernels_.add_floats, sums, begin, count)) return true;
  alignas(64) double rows[kRows * kBlockElements];
  const bool in_doubles = kernels_.add_doubles[0][0] != nullptr;
  if (in_doubles && add_plainly(kernels_.add_doubles, rows, begin, count)) {
    kernels_.round_plain(sums, rows, count);
    return true;
  }
  each_quad(begin, [&](int k, int few, const void* const* blocks) {
    kernels_.add_in_pairs[k == 0 ? 0 : 1][few - 1](rows, blocks, count);
  });
  kernels_.round_pairs(sums, rows, count);
  kernels_.sum_anew(sums, rows, sources_, num_sources_, begin, count);
  return true;
}

}  // namespace shardcomm
