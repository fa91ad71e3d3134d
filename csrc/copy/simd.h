// One loop, compiled for several instruction sets. The best set that this CPU has is chosen at run
// time, so that one binary runs everywhere and runs fast.
#pragma once

#include <string>
#include <vector>

namespace shardcomm {

enum class InstructionSet { baseline, avx2, avx512 };

const char* name(InstructionSet set);

// The instruction sets that this CPU can run, the best one last; never empty.
std::vector<InstructionSet> instruction_sets();

// The instruction set that kernels use: the best, unless a test or a study has chosen another one
// with use_instruction_set().
InstructionSet instruction_set();
void use_instruction_set(InstructionSet set);

// `Loop` is a type with one always-inlined `static void run(...)`; best_of<Loop>() is a pointer to
// its best version.
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
#endif
};

template <class Loop>
auto best_of() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::avx512:
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
