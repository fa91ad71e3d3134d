// The order in which sources are combined is a tree that depends on nothing but their number: on a
// CPU with each instruction set, and in the CUDA kernel, which is walked. Expected values are
// computed one element at a time, as the tree is defined.
//
//   reduce_order_test [SEED]
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "copy/element.h"
#include "copy/simd.h"
#include "copy/thread_reduce.h"
#include "shardcomm/reduce.h"

namespace {

using namespace shardcomm;

void require(bool condition, const std::string& claim) {
  if (condition) return;
  std::fprintf(stderr, "not true: %s (instruction set %s)\n", claim.c_str(),
               name(instruction_set()));
  std::exit(1);
}

// Sums of these are rounded otherwise in another order, almost always.
template <class T>
std::vector<T> wild(std::mt19937& random, std::size_t count) {
  std::vector<T> values(count);
  for (T& value : values) {
    const double mantissa = std::uniform_real_distribution<double>(-1, 1)(random);
    const int exponent = std::uniform_int_distribution<int>(-14, 14)(random);
    store(value, static_cast<Accumulator<T>>(std::ldexp(mantissa, exponent)));
  }
  return values;
}

template <class Value, class At>
Value tree(int first, int count, const At& at) {
  if (count == 1) return at(first);
  int lower = 1;
  while (2 * lower < count) lower *= 2;
  return tree<Value>(first, lower, at) + tree<Value>(first + lower, count - lower, at);
}

template <class Value, class At>
Value left_to_right(int count, const At& at) {
  Value sum = at(0);
  for (int k = 1; k < count; ++k) sum += at(k);
  return sum;
}

template <class T>
void sums_are_trees(DType dtype, std::mt19937& random) {
  using Value = Accumulator<T>;
  constexpr DType kWide = sizeof(Value) == 8 ? DType::f64 : DType::f32;
  constexpr std::size_t kCount = 397;
  std::vector<int> numbers{63, 64, 65, 200, 256};
  for (int n = 1; n <= 34; ++n) numbers.push_back(n);
  for (const int num_sources : numbers) {
    std::vector<std::vector<T>> values;
    std::vector<const void*> sources;
    for (int k = 0; k < num_sources; ++k) values.push_back(wild<T>(random, kCount));
    for (const auto& each : values) sources.push_back(each.data());
    const auto at = [&](std::size_t i) {
      return [&, i](int k) { return load(values[static_cast<std::size_t>(k)][i]); };
    };
    const auto check = [&](const std::vector<Value>& sums, const char* who) {
      std::size_t other = 0;
      for (std::size_t i = 0; i < sums.size(); ++i) {
        require(sums[i] == tree<Value>(0, num_sources, at(i)),
                std::string(who) + " adds " + std::to_string(num_sources) + " as a tree");
        other += sums[i] != left_to_right<Value>(num_sources, at(i));
      }
      if (num_sources > 7) require(other > 0, "which other orders would round otherwise");
    };
    std::vector<Value> sums(kCount);
    reduce_cpu(sums.data(), {kWide}, sources.data(), num_sources, dtype, RedOp::sum, 1, kCount);
    check(sums, "the CPU");
    // Whole vectors, and elements one at a time: sources that begin at their second element.
    std::fill(sums.begin(), sums.end(), Value{0});
    walk_reduce(sums.data(), {kWide}, sources.data(), num_sources, dtype, RedOp::sum, 1, kCount, 7);
    check(sums, "the kernel");
    std::vector<const void*> seconds;
    for (auto& each : values) seconds.push_back(each.data() + 1);
    std::vector<Value> shifted(kCount, Value{0});
    walk_reduce(shifted.data(), {kWide}, seconds.data(), num_sources, dtype, RedOp::sum, 1,
                kCount - 1, 7);
    for (std::size_t i = 0; i + 1 < kCount; ++i) {
      require(shifted[i] == sums[i + 1], "the kernel adds alike wherever sources begin");
    }

    // Neighbours whose number is a power of two can be added before.
    for (int few = 1; few < num_sources; few *= 2) {
      std::vector<std::vector<Value>> partials;
      std::vector<const void*> parts;
      for (int k = 0; k < num_sources; k += few) {
        partials.emplace_back(kCount);
        reduce_cpu(partials.back().data(), {kWide}, sources.data() + k,
                   std::min(few, num_sources - k), dtype, RedOp::sum, 1, kCount);
      }
      for (const auto& each : partials) parts.push_back(each.data());
      std::vector<Value> again(kCount);
      reduce_cpu(again.data(), {kWide}, parts.data(), static_cast<int>(parts.size()), kWide,
                 RedOp::sum, 1, kCount);
      require(again == sums, "partial sums of " + std::to_string(few) + " add up to the same bits");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto seed =
      argc > 1 ? static_cast<std::uint32_t>(std::atol(argv[1])) : std::random_device{}();
  std::printf("seed %u\n", seed);
  std::fflush(stdout);
  std::mt19937 random(seed);
  for (const InstructionSet set : instruction_sets()) {
    use_instruction_set(set);
    sums_are_trees<float>(DType::f32, random);
    sums_are_trees<double>(DType::f64, random);
    sums_are_trees<BFloat16>(DType::bf16, random);
    sums_are_trees<Half>(DType::f16, random);
  }
  std::puts("reduce_order_test: ok");
}
