// What the CPU's kernels write, bit for bit, on every instruction set: copies, conversions and
// reductions of seeded random elements, NaN, Inf and subnormal numbers among them, at odd places
// and of odd lengths. Expected values come from the definition of the formats (IEEE 754), in
// double, where each operation on floats is exact or rounds as it would in float.
//
// A NaN stays a NaN. Its sign and its payload are the processor's own, but where bits are moved as
// they are. kDigest is of all results, and the same on every processor.
#include <algorithm>
#include <cfloat>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "copy/convert_cpu.h"
#include "copy/simd.h"
#include "copy/thread_reduce.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/reduce.h"

namespace {

using namespace shardcomm;

static_assert(FLT_EVAL_METHOD == 0, "floats are computed with as floats");

// Another number after a change of the cases: the test prints it.
constexpr std::uint64_t kDigest = 0x0b6c514db8860b33;

using Bits = std::uint64_t;  // of one element, in its lowest bytes
constexpr DType kAll[] = {DType::u8,  DType::i8,   DType::i32, DType::i64,
                          DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr DType kConvertible[] = {DType::f16, DType::bf16, DType::f32};

// ---- The formats.

struct Format {
  int exponent_bits;
  int fraction_bits;

  int least() const { return 2 - (1 << (exponent_bits - 1)); }  // exponent of a normal number
  Bits infinity() const { return ((Bits{1} << exponent_bits) - 1) << fraction_bits; }
  Bits sign() const { return Bits{1} << (exponent_bits + fraction_bits); }
};

Format format_of(DType dtype) {
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

bool is_nan(DType dtype, Bits bits) {
  if (!is_floating(dtype)) return false;
  const Format format = format_of(dtype);
  return (bits & (format.sign() - 1)) > format.infinity();
}

bool is_finite(DType dtype, Bits bits) {
  const Format format = format_of(dtype);
  return (bits & format.infinity()) != format.infinity();
}

double value_of(DType dtype, Bits bits) {
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
Bits bits_of(DType dtype, double value) {
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

Bits mask_of(DType dtype) {
  const int bits = 8 * static_cast<int>(itemsize(dtype));
  return bits == 64 ? ~Bits{0} : (Bits{1} << bits) - 1;
}

std::int64_t integer_of(DType dtype, Bits bits) {
  if (dtype == DType::u8) return static_cast<std::int64_t>(bits);
  const int unused = 64 - 8 * static_cast<int>(itemsize(dtype));
  return static_cast<std::int64_t>(bits << unused) >> unused;
}

// ---- What is expected.

// An operation of the type in which elements of `dtype` are computed with. Never inlined, so that
// no compiler fuses a product with a sum.
[[gnu::noinline]] double rounded(DType dtype, double value) {
  return dtype == DType::f64 ? value : static_cast<double>(static_cast<float>(value));
}
[[gnu::noinline]] double product(DType dtype, double a, double b) { return rounded(dtype, a * b); }
[[gnu::noinline]] double sum(DType dtype, double a, double b) { return rounded(dtype, a + b); }

double combined(DType dtype, RedOp op, double a, double b) {
  if (op == RedOp::sum || op == RedOp::avg) return sum(dtype, a, b);
  if (op == RedOp::prod) return product(dtype, a, b);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  const bool second = op == RedOp::max ? b > a : b < a;  // of +0.0 and -0.0 the first stays
  return second ? b : a;
}

Bits combined_integers(DType dtype, RedOp op, Bits a, Bits b) {
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
Bits rounded_sum(DType dtype, const std::vector<double>& values) {
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

Bits exact_sum(DType dtype, const std::vector<double>& values) {
  double special = 0.0;
  bool all_negative_zero = true;
  for (const double value : values) {
    if (!std::isfinite(value)) special += value;
    all_negative_zero = all_negative_zero && value == 0 && std::signbit(value);
  }
  if (special != 0) return bits_of(dtype, special);
  return all_negative_zero ? bits_of(dtype, -0.0) : rounded_sum(dtype, values);
}

Bits copied(DType src, DType dst, const CopyOptions& options, Bits bits, Bits before) {
  const bool moves = src == dst && options.scale == 1.0f && !options.accumulate;
  if (moves && options.nonfinite == nullptr) return bits;
  double value = product(src, static_cast<double>(options.scale), value_of(src, bits));
  if (options.accumulate) value = sum(src, value_of(dst, before), value);
  return bits_of(dst, value);
}

// ---- Inputs and outputs.

class Random {
 public:
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next_() % static_cast<Bits>(bound));
  }

  Bits element(DType dtype) {
    const Bits any = next_() & mask_of(dtype);
    if (!is_floating(dtype)) return below(4) == 0 ? mask_of(dtype) >> below(2) : any;
    const Format format = format_of(dtype);
    const Bits sign = any & format.sign();
    switch (below(4)) {
      case 0:  // numbers that are exact in most types
        return bits_of(dtype, static_cast<double>(below(513) - 256) / 8);
      case 1: {  // the edges: zero, subnormal, normal, the largest, Inf, NaN
        const Bits hidden = Bits{1} << format.fraction_bits;
        const Bits edges[] = {0,
                              1,
                              hidden - 1,
                              hidden,
                              format.infinity() - 1,
                              format.infinity(),
                              format.infinity() | hidden >> 1};
        return sign | edges[below(7)];
      }
      case 2:  // about half-way between two numbers of a narrower type
        return dtype == DType::f32 ? near_narrow(any) : any;
      default:
        return any;
    }
  }

  std::vector<Bits> elements(DType dtype, std::int64_t count) {
    std::vector<Bits> all(static_cast<std::size_t>(count));
    for (Bits& bits : all) bits = element(dtype);
    return all;
  }

 private:
  Bits near_narrow(Bits any) {
    const bool half = below(2) == 0;
    const Bits narrow =
        bits_of(DType::f32, value_of(half ? DType::f16 : DType::bf16, any & 0xffff));
    return (narrow + (half ? 0x1000 : 0x8000) + static_cast<Bits>(below(3)) - 1) &
           mask_of(DType::f32);
  }

  std::mt19937_64 next_{20'261'123};
};

// Elements in memory of their exact size, which begin `lead` elements past a boundary of vectors.
class Elements {
 public:
  Elements(DType dtype, std::int64_t lead, const std::vector<Bits>& values)
      : bytes_(itemsize(dtype)),
        lead_(static_cast<std::size_t>(lead)),
        memory_((lead_ + values.size()) * bytes_, std::byte{0x5a}) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::memcpy(memory_.data() + (lead_ + i) * bytes_, &values[i], bytes_);
    }
  }
  void* data() { return memory_.data() + lead_ * bytes_; }
  Bits operator[](std::size_t i) const {
    Bits bits = 0;
    std::memcpy(&bits, memory_.data() + (lead_ + i) * bytes_, bytes_);
    return bits;
  }
  bool lead_is_untouched() const {
    const auto end = memory_.begin() + static_cast<std::ptrdiff_t>(lead_ * bytes_);
    return std::all_of(memory_.begin(), end, [](std::byte b) { return b == std::byte{0x5a}; });
  }

 private:
  std::size_t bytes_;
  std::size_t lead_;
  std::vector<std::byte> memory_;
};

std::uint64_t digest = 0;

void require(bool condition, const char* claim, const char* kernel) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s (%s, instruction set %s)\n", claim, kernel,
               name(instruction_set()));
  std::exit(1);
}

void expect_element(const char* kernel, DType dtype, std::size_t i, Bits got, Bits wanted,
                    bool moved) {
  const bool both_nan = !moved && is_nan(dtype, got) && is_nan(dtype, wanted);
  if (!both_nan && got != wanted) {
    std::fprintf(stderr, "%s: element %zu is %" PRIx64 " in %s, expected %" PRIx64 " (%s)\n",
                 kernel, i, got, name(dtype), wanted, name(instruction_set()));
    std::exit(1);
  }
  digest = (digest ^ (both_nan ? ~Bits{0} : got)) * 0x100000001b3;
}

// Whether an element of `elements` is NaN or Inf.
bool any_nonfinite(DType dtype, const std::vector<Bits>& elements) {
  return is_floating(dtype) && std::any_of(elements.begin(), elements.end(),
                                           [&](Bits bits) { return !is_finite(dtype, bits); });
}

constexpr std::int64_t kCounts[] = {1, 2, 3, 7, 16, 31, 64, 65, 127, 128, 129, 300};

// ---- The cases.

void copies(Random& random) {
  for (const DType src : kConvertible) {
    for (const DType dst : kConvertible) {
      for (const std::int64_t count : kCounts) {
        for (int variant = 0; variant < 8; ++variant) {
          std::int32_t flag = 0;
          const CopyOptions options{variant & 1 ? 1.0f : 0.3f, (variant & 2) != 0,
                                    variant & 4 ? &flag : nullptr};
          const auto from = random.elements(src, count), before = random.elements(dst, count);
          Elements source(src, random.below(16), from), result(dst, random.below(16), before);
          const CopyPlan plan({{0, 0, 0, count, 0, count, 1, count}}, src, dst);
          const void* sources[] = {source.data()};
          void* destinations[] = {result.data()};
          copy_cpu(plan, sources, destinations, options);
          std::vector<Bits> wanted;
          const bool moved = src == dst && variant == 1;
          for (std::size_t i = 0; i < from.size(); ++i) {
            wanted.push_back(copied(src, dst, options, from[i], before[i]));
            expect_element("copy_cpu", dst, i, result[i], wanted[i], moved);
          }
          require(result.lead_is_untouched(), "what lies before is not touched", "copy_cpu");
          const bool raised = options.nonfinite != nullptr && any_nonfinite(dst, wanted);
          require(flag == (raised ? 1 : 0), "the flag tells of NaN and Inf", "copy_cpu");
        }
      }
    }
  }
}

// A run that is worth storing past the caches, and one that is not: the same elements over and
// over, of which the expected ones are computed once.
void long_copies(Random& random) {
  constexpr std::int64_t kPeriod = 4099;
  const auto check = [&](DType src, DType dst, std::int64_t count) {
    const auto period = random.elements(src, kPeriod);
    std::vector<Bits> from, wanted;
    for (const Bits bits : period) wanted.push_back(copied(src, dst, {}, bits, 0));
    for (std::int64_t i = 0; i < count; ++i) {
      from.push_back(period[static_cast<std::size_t>(i % kPeriod)]);
    }
    Elements source(src, random.below(16), from);
    Elements result(dst, random.below(16), std::vector<Bits>(from.size()));
    convert_cpu(result.data(), dst, source.data(), src, count);
    for (std::size_t i = 0; i < from.size(); ++i) {
      expect_element("convert_cpu", dst, i, result[i], wanted[i % kPeriod], src == dst);
    }
    require(result.lead_is_untouched(), "what lies before is not touched", "convert_cpu");
  };
  constexpr std::int64_t kStreamed = (std::int64_t{4} << 20) + 1000;  // bytes
  for (const DType src : kConvertible) {
    for (const DType dst : kConvertible) {
      check(src, dst, 1 + random.below(20'000));
      check(src, dst, kStreamed / static_cast<std::int64_t>(itemsize(dst)) + random.below(100));
    }
  }
  for (const DType dtype : {DType::u8, DType::i64}) {
    check(dtype, dtype, kStreamed / static_cast<std::int64_t>(itemsize(dtype)) + random.below(100));
  }
}

using Reduce = void (*)(void* dst, const Epilogue& epilogue, const void* const* sources,
                        int num_sources, DType dtype, RedOp op, int divisor, std::int64_t count);

void reduction(Random& random, const char* kernel, Reduce reduce, DType dtype, DType dst_dtype,
               RedOp op, int num_sources) {
  const bool in_place = dtype == dst_dtype && random.below(4) == 0;
  const std::int64_t count = kCounts[random.below(std::size(kCounts))];
  const std::int64_t most_lead = random.below(2) == 0 ? 1 : 16;  // 1: all begin at boundaries
  const float scale = is_floating(dtype) && random.below(2) == 0 ? 0.3f : 1.0f;
  const Reduced expected{dtype, op, num_sources + 1, dst_dtype, scale, random.below(2) == 0};
  std::vector<std::vector<Bits>> from;
  std::vector<Elements> sources;
  std::vector<const void*> pointers;
  for (int k = 0; k < num_sources; ++k) {
    from.push_back(random.elements(dtype, count));
    sources.emplace_back(dtype, random.below(most_lead), from.back());
  }
  for (Elements& source : sources) pointers.push_back(source.data());
  const auto before = in_place ? from[0] : random.elements(dst_dtype, count);
  Elements apart(dst_dtype, random.below(most_lead), before);
  Elements& result = in_place ? sources[0] : apart;
  std::int32_t flag = 0;
  const bool watched = random.below(2) == 0;
  reduce(result.data(), {dst_dtype, scale, expected.accumulate, watched ? &flag : nullptr},
         pointers.data(), num_sources, dtype, op, expected.divisor, count);
  std::vector<Bits> wanted;
  for (std::size_t i = 0; i < before.size(); ++i) {
    std::vector<Bits> column;
    for (const auto& source : from) column.push_back(source[i]);
    wanted.push_back(expected.of(column, before[i]));
    expect_element(kernel, dst_dtype, i, result[i], wanted[i], /*moved=*/false);
  }
  require(result.lead_is_untouched(), "what lies before is not touched", kernel);
  const bool raised = watched && any_nonfinite(dst_dtype, wanted);
  require(flag == (raised ? 1 : 0), "the flag tells of NaN and Inf", kernel);
}

void reductions(Random& random) {
  const Reduce walk = [](void* dst, const Epilogue& epilogue, const void* const* sources,
                         int num_sources, DType dtype, RedOp op, int divisor, std::int64_t count) {
    walk_reduce(dst, epilogue, sources, num_sources, dtype, op, divisor, count, /*threads=*/32);
  };
  for (const DType dtype : kAll) {
    for (const DType dst : kAll) {
      if (dst != dtype && !(is_convertible(dtype) && is_convertible(dst))) continue;
      for (const RedOp op : {RedOp::sum, RedOp::avg, RedOp::max, RedOp::min, RedOp::prod,
                             RedOp::band, RedOp::bor, RedOp::bxor}) {
        if (is_bitwise(op) && is_floating(dtype)) continue;
        for (const int num_sources : {1, 2, 3, 6}) {
          for (int round = 0; round < 6; ++round) {
            reduction(random, "reduce_cpu", reduce_cpu, dtype, dst, op, num_sources);
          }
          if (op > RedOp::min || dtype == DType::i8) continue;  // a GPU does not have it
          reduction(random, "the GPU's kernel, walked", walk, dtype, dst, op, num_sources);
        }
      }
    }
  }
}

// Summed exactly: elements of all sizes, and some that are alike, for which faster ways do.
void exact_sums(Random& random) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64}) {
    for (const DType dst : kAll) {
      if (dst != dtype && !(is_convertible(dtype) && is_convertible(dst))) continue;
      for (const int num_sources : {1, 2, 3, 4, 6, 9}) {
        for (const bool alike : {false, true}) {
          const std::int64_t count = kCounts[random.below(std::size(kCounts))];
          std::vector<std::vector<Bits>> from;
          std::vector<Elements> sources;
          std::vector<const void*> pointers;
          for (int k = 0; k < num_sources; ++k) {
            from.push_back(random.elements(dtype, count));
            for (Bits& bits : from.back()) {
              const double value = static_cast<double>(random.below(4001) - 2000);
              if (alike) bits = bits_of(dtype, value / static_cast<double>(1 + random.below(9)));
            }
            sources.emplace_back(dtype, random.below(16), from.back());
          }
          for (Elements& source : sources) pointers.push_back(source.data());
          Elements result(dst, random.below(16), std::vector<Bits>(from[0].size()));
          reduce_cpu(result.data(), {dst}, pointers.data(), num_sources, dtype, RedOp::exact_sum,
                     num_sources, count);
          for (std::size_t i = 0; i < from[0].size(); ++i) {
            std::vector<double> column;
            for (const auto& source : from) column.push_back(value_of(dtype, source[i]));
            expect_element("exact sums", dst, i, result[i], exact_sum(dst, column), false);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  for (const InstructionSet set : instruction_sets()) {
    use_instruction_set(set);
    digest = 0xcbf29ce484222325;
    Random random;  // the same for each
    copies(random);
    long_copies(random);
    reductions(random);
    exact_sums(random);
    std::printf("%-8s digest %016" PRIx64 "\n", name(set), digest);
    require(digest == kDigest, "the digest is that of other processors", "all kernels");
  }
  std::puts("bits_test: ok");
}
