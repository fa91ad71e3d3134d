// Sums over ranks that are rounded once: their bits depend on the summands alone, and not on the
// order or the groups in which these come.
#pragma once

#include <cstdint>

#include "shardcomm/dtype.h"

namespace shardcomm {

constexpr std::int64_t kBlockElements = 128;  // of a reduction: they stay in the nearest cache

// The sums of `num_sources` sources of a floating dtype, up to kBlockElements at a time.
class ExactSum {
 public:
  // `recv`: the dtype to which the sums are rounded in the end. Sums are floats, of f64 doubles,
  // each nearest to its exact sum. For a `recv` of 16 bits a float is rounded to odd instead, so
  // that it becomes the 16-bit number that is nearest to the exact sum.
  ExactSum(DType dtype, DType recv, const void* const* sources, int num_sources);

  // sums[i] = sources[0][begin + i] + ... + sources[num_sources - 1][begin + i]. Infinities and NaN
  // add up as ever. A sum of zero is -0 if all summands are, and else +0. Writes nothing and
  // returns false if a plain addition does that, too: that of two numbers is rounded once.
  bool operator()(void* sums, std::int64_t begin, std::int64_t count) const;

 private:
  static constexpr int kQuad = 4;  // sources that are added at once
  static constexpr int kRows = 3;  // of doubles, a row with one for each element
  struct Kernels {
    using AddPlainly = void (*)(void* totals, const void* const* sources, std::int64_t count,
                                std::uint64_t* errors);
    using AddInPairs = void (*)(double* rows, const void* const* sources, std::int64_t count);
    // To nothing, and to the totals of other sources. Null for elements that are as wide as the
    // totals would be: such sums hardly ever have no error.
    AddPlainly add_floats[2][kQuad];
    AddPlainly add_doubles[2][kQuad];
    AddInPairs add_in_pairs[2][kQuad];
    void (*round_plain)(void* sums, double* rows, std::int64_t count);
    void (*round_pairs)(void* sums, double* rows, std::int64_t count);
    void (*sum_anew)(void* sums, const double* rows, const void* const* sources, int num_sources,
                     std::int64_t begin, std::int64_t count);
  };
  template <class Src, class To>
  void choose();
  // Calls visit(first source, how many, their blocks) for up to four sources at a time.
  template <class Visit>
  void each_quad(std::int64_t begin, const Visit& visit) const;
  // Whether no addition had an error, so that the totals are exact.
  bool add_plainly(const Kernels::AddPlainly (&adds)[2][kQuad], void* totals, std::int64_t begin,
                   std::int64_t count) const;

  const void* const* sources_;
  int num_sources_;
  std::int64_t src_bytes_;
  bool is_rounded_once_;
  Kernels kernels_{};
};

}  // namespace shardcomm
