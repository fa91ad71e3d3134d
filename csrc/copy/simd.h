// One loop, compiled for several instruction sets. The best set that this CPU has is chosen at run
// time, so that one binary runs everywhere and runs fast.
#pragma once

#include <string>
#include <vector>

namespace shardcomm {

// avx2 is AVX2 with F16C and FMA, and avx512 has these, too.
enum class InstructionSet { baseline, avx2, avx512 };

const char* name(InstructionSet set);

// The instruction sets that this CPU can run, the best one last; never empty.
std::vector<InstructionSet> instruction_sets();

// The instruction set that kernels use: the best, unless a test or a study has chosen another one
// with use_instruction_set().
InstructionSet instruction_set();
void use_instruction_set(InstructionSet set);

// `Loop` is a type with one always-inlined `static void run(...)`; best_of<Loop>() is a pointer to
// its best version. Loops that permute and narrow much are faster in halves of AVX-512's vectors,
// with its instructions all the same: best_of<Loop, 256>(). With SHARDCOMM_PLAIN_LOOPS the only
// version is the baseline's, for builds whose compiler makes no vectors anyway.
template <class Loop, class Signature = decltype(Loop::run)>
struct Versions;

template <class Loop, class... Args>
struct Versions<Loop, void(Args...)> {
  static void baseline(Args... args) { Loop::run(args...); }
#if defined(__x86_64__)
  [[gnu::target("avx2")]] static void avx2(Args... args) { Loop::run(args...); }
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] static void avx512(Args... args) {
    Loop::run(args...);
  }
#if defined(__clang__)  // which knows the width only as a part of that processor's tuning
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,tune=skylake-avx512")]]
#else
  [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=256")]]
#endif
  static void avx512_in_256(Args... args) {
    Loop::run(args...);
  }
#endif
};

template <class Loop, int kVectorBits = 512>
auto best_of() {
  static_assert(kVectorBits == 512 || kVectorBits == 256);
#if defined(__x86_64__) && !defined(SHARDCOMM_PLAIN_LOOPS)
  switch (instruction_set()) {
    case InstructionSet::avx512:
      if constexpr (kVectorBits == 256) return &Versions<Loop>::avx512_in_256;
      return &Versions<Loop>::avx512;
    case InstructionSet::avx2:
      return &Versions<Loop>::avx2;
    case InstructionSet::baseline:
      break;
  }
#endif
  return &Versions<Loop>::baseline;
}

}  // namespace shardcomm
