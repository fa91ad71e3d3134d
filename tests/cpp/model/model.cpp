// Checks the protocol by which ranks meet and fail, over the real code: docs/protocol.md.
//
//   model [--full] [--most-states N] [PROGRAM ...]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "programs.h"

int main(int argc, char** argv) {
  bool full = false;
  std::size_t most_states = std::size_t{1} << 27;
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--full") {
      full = true;
    } else if (argument == "--most-states" && i + 1 < argc) {
      most_states = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument[0] == '-') {
      std::fprintf(stderr, "usage: model [--full] [--most-states N] [PROGRAM ...]\n");
      return 2;
    } else {
      wanted.push_back(argument);
    }
  }
  std::printf("%-22s %12s %12s %8s\n", "program/ranks", "states", "transitions", "s");
  bool holds = true;
  for (const model::Program& program : model::programs()) {
    bool chosen = wanted.empty() ? full || program.is_small : false;
    for (const std::string& name : wanted) chosen |= name == program.name;
    if (!chosen) continue;
    const auto begin = std::chrono::steady_clock::now();
    model::Ranks ranks(program);
    const model::Result result = model::explore(ranks, most_states);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%-22s %12zu %12zu %8.2f\n", program.name.c_str(), result.states,
                result.transitions, took.count());
    std::fflush(stdout);
    if (!result.violated) continue;
    holds = false;
    std::printf("%s VIOLATED in %s: %s\n", result.violation.property.c_str(), program.name.c_str(),
                result.violation.text.c_str());
    for (const std::string& step : result.trace) std::printf("  %s\n", step.c_str());
  }
  return holds ? 0 : 1;
}
