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
  // returns false if floats hold all sums of these elements: then any way to add them is exact.
  bool operator()(void* sums, std::int64_t begin, std::int64_t count) const;

 private:
  static constexpr int kQuad = 4;  // sources that are added at once
  static constexpr int kRows = 3;  // of doubles, a row with one for each element
  using AddSources = void (*)(double* rows, const void* const* sources, std::int64_t count);
  struct Kernels {
    // The ranges of elements: of the first sources, and of more. `widest` is null if floats do not
    // hold the elements.
    void (*range[2][kQuad])(void* rows, const void* const* sources, std::int64_t count);
    void (*widest)(const void* rows, std::int64_t count, std::uint32_t* spread,
                   std::uint32_t* largest);
    AddSources add_plainly[2][kQuad];  // to nothing, and to what the rows have
    AddSources add_in_pairs[2][kQuad];
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
  // How many bits of a significand hold all partial sums of any element, in any order.
  int bits_needed(std::int64_t begin, std::int64_t count) const;

  const void* const* sources_;
  int num_sources_;
  std::int64_t src_bytes_;
  int carries_ = 0;  // bits that a sum may have more than its largest summand
  int fraction_bits_ = 0;
  int largest_exponent_ = 0;
  Kernels kernels_{};
};

}  // namespace shardcomm
