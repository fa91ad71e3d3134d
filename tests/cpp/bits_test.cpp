// What the CPU's kernels write, bit for bit, on every instruction set: copies, conversions and
// reductions of seeded random elements, NaN, Inf and subnormal numbers among them, at odd places
// and of odd lengths. Expected values are those of element_reference.h.
//
// A NaN stays a NaN. Its sign and its payload are the processor's own, but where bits are moved as
// they are. kDigest is of all results, and the same on every processor.
#include <algorithm>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "copy/convert_cpu.h"
#include "copy/simd.h"
#include "copy/thread_reduce.h"
#include "element_reference.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/reduce.h"

namespace {

using namespace shardcomm;
using namespace shardcomm::reference;

// Another number after a change of the cases: the test prints it.
constexpr std::uint64_t kDigest = 0x0b6c514db8860b33;

constexpr DType kAll[] = {DType::u8,  DType::i8,   DType::i32, DType::i64,
                          DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr DType kConvertible[] = {DType::f16, DType::bf16, DType::f32};

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
