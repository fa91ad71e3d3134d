// What kernels must write, element by element, from the definition of the formats (IEEE 754): in
// double, where each operation on floats is exact or rounds as it would in float.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <vector>

#include "shardcomm/copy_plan.h"
#include "shardcomm/reduce.h"

namespace shardcomm::reference {

static_assert(FLT_EVAL_METHOD == 0, "floats are computed with as floats");

using Bits = std::uint64_t;  // of one element, in its lowest bytes

// ---- The formats.

struct Format {
  int exponent_bits;
  int fraction_bits;

  int least() const { return 2 - (1 << (exponent_bits - 1)); }  // exponent of a normal number
  Bits infinity() const { return ((Bits{1} << exponent_bits) - 1) << fraction_bits; }
  Bits sign() const { return Bits{1} << (exponent_bits + fraction_bits); }
};

inline Format format_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {5, 10};
    case DType::bf16:
      return {8, 7};
    case DType::f32:
      return {8, 23};
    default:
      return {11, 52};
  }
}

inline bool is_nan(DType dtype, Bits bits) {
  if (!is_floating(dtype)) return false;
  const Format format = format_of(dtype);
  return (bits & (format.sign() - 1)) > format.infinity();
}

inline bool is_finite(DType dtype, Bits bits) {
  const Format format = format_of(dtype);
  return (bits & format.infinity()) != format.infinity();
}

inline double value_of(DType dtype, Bits bits) {
  const Format format = format_of(dtype);
  if (is_nan(dtype, bits)) return std::numeric_limits<double>::quiet_NaN();
  const Bits hidden = Bits{1} << format.fraction_bits;
  const Bits fraction = bits & (hidden - 1);
  const int exponent = static_cast<int>((bits & format.infinity()) >> format.fraction_bits);
  double magnitude = std::ldexp(static_cast<double>(exponent == 0 ? fraction : fraction | hidden),
                                std::max(exponent, 1) - 1 + format.least() - format.fraction_bits);
  if (!is_finite(dtype, bits)) magnitude = std::numeric_limits<double>::infinity();
  return (bits & format.sign()) != 0 ? -magnitude : magnitude;
}

// To nearest even.
inline Bits bits_of(DType dtype, double value) {
  const Format format = format_of(dtype);
  if (std::isnan(value)) return format.infinity() | 1;
  const Bits sign = std::signbit(value) ? format.sign() : 0;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | format.infinity();
  const int exponent =
      magnitude == 0 ? format.least() : std::max(std::ilogb(magnitude), format.least());
  // In units of the last place. A normal number's hidden bit, and a carry, go into the exponent.
  const double units = std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent));
  const Bits bits = static_cast<Bits>(units) +
                    (static_cast<Bits>(exponent - format.least()) << format.fraction_bits);
  return sign | std::min(bits, format.infinity());
}

inline Bits mask_of(DType dtype) {
  const int bits = 8 * static_cast<int>(itemsize(dtype));
  return bits == 64 ? ~Bits{0} : (Bits{1} << bits) - 1;
}

inline std::int64_t integer_of(DType dtype, Bits bits) {
  if (dtype == DType::u8) return static_cast<std::int64_t>(bits);
  const int unused = 64 - 8 * static_cast<int>(itemsize(dtype));
  return static_cast<std::int64_t>(bits << unused) >> unused;
}

// ---- What is expected.

// An operation of the type in which elements of `dtype` are computed with. Never inlined (the
// keyword is for the linker), so that no compiler fuses a product with a sum.
[[gnu::noinline]] inline double rounded(DType dtype, double value) {
  return dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
}
[[gnu::noinline]] inline double product(DType dtype, double a, double b) {
  return rounded(dtype, a * b);
}
[[gnu::noinline]] inline double sum(DType dtype, double a, double b) {
  return rounded(dtype, a + b);
}

inline double combined(DType dtype, RedOp op, double a, double b) {
  if (op == RedOp::sum || op == RedOp::avg) return sum(dtype, a, b);
  if (op == RedOp::prod) return product(dtype, a, b);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  const bool second = op == RedOp::max ? b > a : b < a;  // of +0.0 and -0.0 the first stays
  return second ? b : a;
}

inline Bits combined_integers(DType dtype, RedOp op, Bits a, Bits b) {
  switch (op) {
    case RedOp::sum:
    case RedOp::avg:
    case RedOp::exact_sum:
    case RedOp::exact_avg:
      return (a + b) & mask_of(dtype);
    case RedOp::prod:
      return (a * b) & mask_of(dtype);
    case RedOp::band:
      return a & b;
    case RedOp::bor:
      return a | b;
    case RedOp::bxor:
      return a ^ b;
    case RedOp::max:
      return integer_of(dtype, a) < integer_of(dtype, b) ? b : a;
    case RedOp::min:
      return integer_of(dtype, b) < integer_of(dtype, a) ? b : a;
  }
  return 0;
}

// Neighbours first, then pairs of neighbours, and so on.
template <class Value, class Combine>
Value tree_of(std::vector<Value> values, const Combine& combine) {
  while (values.size() > 1) {
    std::vector<Value> pairs;
    for (std::size_t k = 0; k + 1 < values.size(); k += 2) {
      pairs.push_back(combine(values[k], values[k + 1]));
    }
    if (values.size() % 2 == 1) pairs.push_back(values.back());
    values = pairs;
  }
  return values[0];
}

struct Reduced {
  DType dtype;
  RedOp op;
  int divisor;
  DType dst_dtype;
  float scale;
  bool accumulate;

  Bits of(const std::vector<Bits>& sources, Bits before) const {
    return is_floating(dtype) ? of_floats(sources, before) : of_integers(sources, before);
  }

 private:
  Bits of_floats(const std::vector<Bits>& sources, Bits before) const {
    std::vector<double> values;
    for (const Bits bits : sources) values.push_back(value_of(dtype, bits));
    const double total =
        tree_of(values, [&](double a, double b) { return combined(dtype, op, a, b); });
    const double mean = rounded(dtype, 1.0 / (op == RedOp::avg ? divisor : 1));
    double value = product(dtype, static_cast<double>(scale), product(dtype, total, mean));
    if (accumulate) value = sum(dtype, value_of(dst_dtype, before), value);
    return bits_of(dst_dtype, value);
  }
  Bits of_integers(const std::vector<Bits>& sources, Bits before) const {
    Bits total =
        tree_of(sources, [&](Bits a, Bits b) { return combined_integers(dtype, op, a, b); });
    if (op == RedOp::avg) total = static_cast<Bits>(integer_of(dtype, total) / divisor);
    return (accumulate ? before + total : total) & mask_of(dtype);
  }
};

// The sum of finite values that are not all -0, rounded once. Digit i counts 2^(i - 1074).
inline Bits rounded_sum(DType dtype, const std::vector<double>& values) {
  std::vector<int> digits(2200);
  for (const double value : values) {
    int exponent = 0;
    const double fraction = std::frexp(value, &exponent);
    const int place = std::max(exponent - 53, -1074);
    const auto units = static_cast<std::int64_t>(std::ldexp(fraction, exponent - place));
    for (int bit = 0; bit < 53; ++bit) {
      digits[static_cast<std::size_t>(place + 1074 + bit)] +=
          static_cast<int>((std::llabs(units) >> bit & 1) * (units < 0 ? -1 : 1));
    }
  }
  const auto carry = [&] {
    int over = 0;
    for (int& digit : digits) {
      const int sum = digit + over;
      digit = sum & 1;
      over = (sum - digit) / 2;
    }
    return over;
  };
  std::vector<int> negated;
  for (const int digit : digits) negated.push_back(-digit);
  const bool negative = carry() < 0;
  if (negative) {
    digits = negated;
    carry();
  }
  int top = static_cast<int>(digits.size()) - 1;
  while (top >= 0 && digits[static_cast<std::size_t>(top)] == 0) --top;
  if (top < 0) return 0;
  const Format format = format_of(dtype);
  const int exponent = std::max(top - 1074, format.least());
  const int last = exponent - format.fraction_bits + 1074;  // the digit that is an odd unit
  Bits units = 0;
  for (int i = top; i >= last; --i) {
    units = units << 1 | static_cast<Bits>(digits[static_cast<std::size_t>(i)]);
  }
  const bool half = last > 0 && digits[static_cast<std::size_t>(last - 1)] == 1;
  const bool more = last > 1 && std::count(digits.begin(), digits.begin() + last - 1, 1) > 0;
  if (half && (more || units % 2 == 1)) ++units;
  const Bits bits = units + (static_cast<Bits>(exponent - format.least()) << format.fraction_bits);
  return (negative ? format.sign() : 0) | std::min(bits, format.infinity());
}

inline Bits exact_sum(DType dtype, const std::vector<double>& values) {
  double special = 0.0;
  bool all_negative_zero = true;
  for (const double value : values) {
    if (!std::isfinite(value)) special += value;
    all_negative_zero = all_negative_zero && value == 0 && std::signbit(value);
  }
  if (special != 0) return bits_of(dtype, special);
  return all_negative_zero ? bits_of(dtype, -0.0) : rounded_sum(dtype, values);
}

inline Bits copied(DType src, DType dst, const CopyOptions& options, Bits bits, Bits before) {
  const bool moves = src == dst && options.scale == 1.0f && !options.accumulate;
  if (moves && options.nonfinite == nullptr) return bits;
  double value = product(src, static_cast<double>(options.scale), value_of(src, bits));
  if (options.accumulate) value = sum(src, value_of(dst, before), value);
  return bits_of(dst, value);
}

}  // namespace shardcomm::reference
