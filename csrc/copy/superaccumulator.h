// A sum of floating-point numbers in fixed point: so wide that nothing is ever rounded.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shardcomm {

// How a sum that fits no double becomes one. To odd: of its two neighbours, the one whose last bit
// is 1. What is rounded to odd first rounds to a format with at least two bits less as the sum
// itself does: no tie comes from rounding, and none is lost.
// (Boldo, Melquiond: "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
// to odd", 2008.)
enum class SumRounding : std::uint8_t { nearest_even, odd };

// Adds finite doubles that are values of Source, float or double. `digits_[i]` counts
// 2^(kLowest + 32 i). A digit has room for 2^30 summands before it is carried.
template <class Source>
class Superaccumulator {
 public:
  void add(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const auto exponent = static_cast<int>(bits >> 52 & 0x7ff);
    std::uint64_t units = bits & kFraction;
    if (exponent > 0) units |= kFraction + 1;
    if (units == 0) return;
    const int place = (exponent > 0 ? exponent - 1 : 0) - 1074 - kLowest;
    const auto digit = static_cast<std::size_t>(place / 32);
    const std::uint64_t low = (units & kMask) << place % 32, high = (units >> 32) << place % 32;
    const std::int64_t sign = bits >> 63 != 0 ? -1 : 1;
    digits_[digit] += sign * static_cast<std::int64_t>(low & kMask);
    digits_[digit + 1] += sign * static_cast<std::int64_t>((low >> 32) + (high & kMask));
    digits_[digit + 2] += sign * static_cast<std::int64_t>(high >> 32);
  }

  // A sum of zero is +0. To the nearest, a sum past the largest double is infinite.
  double rounded(SumRounding rounding) {
    carry();
    const bool negative = digits_.back() < 0;
    if (negative) {
      for (std::int64_t& digit : digits_) digit = -digit;
      carry();
    }
    std::size_t top = kDigits;
    while (top > 0 && digits_[top - 1] == 0) --top;
    if (top == 0) return 0.0;
    --top;
    // The 64 bits from the highest one on; the last one also stands for all below.
    const int unused = __builtin_clzll(static_cast<std::uint64_t>(digits_[top])) - 32;
    const std::uint64_t first = below(top, 0), second = below(top, 1), third = below(top, 2);
    std::uint64_t units = (first << 32 | second) << unused;
    if (unused > 0) units |= third >> (32 - unused);
    bool rest = (third << unused & kMask) != 0;
    for (std::size_t i = 0; i + 2 < top; ++i) rest |= digits_[i] != 0;
    units |= rest ? 1 : 0;
    if (rounding == SumRounding::odd)
      units = (units | (((units & 0x7ff) + 0x7ff) & 0x800)) & ~0x7ffull;
    const int place = kLowest + 32 * (static_cast<int>(top) - 1) - unused;
    // The conversion rounds once. A number that loses bits is far from being subnormal.
    const double magnitude = std::ldexp(static_cast<double>(units), place);
    return negative ? -magnitude : magnitude;
  }

 private:
  static constexpr std::uint64_t kMask = 0xffff'ffff;
  static constexpr std::uint64_t kFraction = (std::uint64_t{1} << 52) - 1;
  // The last bit of the smallest subnormal number, as a double has it.
  static constexpr int kLowest = sizeof(Source) == sizeof(float) ? -149 - 52 : -1074;
  static constexpr int kHighest = sizeof(Source) == sizeof(float) ? 128 : 1024;
  // With 31 bits for the number of summands, and one for the sign.
  static constexpr std::size_t kDigits = (kHighest - kLowest + 32 + 31) / 32;

  std::uint64_t below(std::size_t digit, std::size_t by) const {
    return digit >= by ? static_cast<std::uint64_t>(digits_[digit - by]) : 0;
  }
  // Leaves digits of 32 bits, but for the highest, which has the sign.
  void carry() {
    for (std::size_t i = 0; i + 1 < kDigits; ++i) {
      digits_[i + 1] += digits_[i] >> 32;
      digits_[i] &= static_cast<std::int64_t>(kMask);
    }
  }

  std::array<std::int64_t, kDigits> digits_{};
};

}  // namespace shardcomm
