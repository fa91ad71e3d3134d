#include "copy/simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace shardcomm {
namespace {

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set{instruction_sets().back()};
  return set;
}

}  // namespace

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return "baseline";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "?";
}

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets{InstructionSet::baseline};
#if defined(__x86_64__)
  // __builtin_cpu_supports does not know F16C in every compiler.
  unsigned eax, ebx, ecx = 0, edx;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  if (!has_f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return sets;
  sets.push_back(InstructionSet::avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(InstructionSet::avx512);
  }
#endif
  return sets;
}

// Relaxed: the word says it all, and orders nothing else.
InstructionSet instruction_set() { return chosen().load(std::memory_order_relaxed); }

void use_instruction_set(InstructionSet set) {
  const std::vector<InstructionSet> sets = instruction_sets();
  if (std::find(sets.begin(), sets.end(), set) == sets.end()) {
    throw std::invalid_argument(std::string("this CPU does not have the instruction set ") +
                                name(set));
  }
  chosen().store(set, std::memory_order_relaxed);
}

}  // namespace shardcomm
