// A fault at every point: for each operation and each kind of fault, the n-th point of one rank is
// struck, for n = 1, 2, 3, ... until the operation passes without having come to an n-th.
//
//   faults_test [--full] [--table] [part of an operation's name]
//
// Without --full: groups of two, and errors that stay only of the first sort that a point can have.
#include <dirent.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "faults/trial.h"

namespace {

using faults::Fault;
using faults::Kind;
using faults::Operation;
using faults::Result;
using faults::Trial;

constexpr int kMostPoints = 500;  // an operation that has more never ends
constexpr int kSeriesEach =
    4;  // share the points of an operation: none takes much longer than others

constexpr std::array<const char*, 7> kNames{"kill",      "kill after", "stop",    "stop after",
                                            "come late", "error",      "error on"};
bool is_stop(Kind kind) { return kind == Kind::stop || kind == Kind::stop_after; }

struct Series {
  std::size_t operation;
  int size;
  int victim;
  Kind kind;
  int first;  // point; then every `kSeriesEach`th
};

struct Tally {
  int points = 0;    // the most that the operation came to
  int injected = 0;  // faults that struck
  int heard = 0;     // of these: ended in an error on at least one rank
  int breaches = 0;
};

struct Options {
  bool full = false;
  bool table = false;
  std::string only;
};

Tally run_series(const Series& series, bool full) {
  Tally tally;
  const Operation& operation = faults::operations()[series.operation];
  for (int point = series.first; point <= kMostPoints; point += kSeriesEach) {
    bool reached = false;
    int errors = 1;
    for (int error = 0; error < errors; ++error) {
      const Trial trial{&operation, series.size, series.victim, {series.kind, point, error}};
      const Result result = run(trial);
      reached |= result.reached;
      const bool all_errors = series.kind == Kind::error || (full && series.kind == Kind::error_on);
      if (all_errors) errors = std::max(errors, result.errors);
      tally.injected += result.fired ? 1 : 0;
      tally.heard += result.fired && result.raised > 0 ? 1 : 0;
      if (result.breach.empty()) continue;
      ++tally.breaches;
      std::fprintf(stderr, "%s, %d ranks, %s at point %d (%s) of rank %d, error %d: %s\n",
                   operation.name, series.size, kNames[static_cast<std::size_t>(series.kind)],
                   point, result.point.c_str(), series.victim, error, result.breach.c_str());
    }
    if (!reached) return tally;
    tally.points = point;
  }
  std::fprintf(stderr, "%s: more than %d points\n", operation.name, kMostPoints);
  ++tally.breaches;
  return tally;
}

std::vector<Series> all_series(const Options& options) {
  std::vector<Series> all;
  for (std::size_t i = 0; i < faults::operations().size(); ++i) {
    if (std::string(faults::operations()[i].name).find(options.only) == std::string::npos) continue;
    for (int size = 2; size <= (options.full ? 3 : 2); ++size) {
      for (int victim = 0; victim < 2; ++victim) {
        for (std::size_t kind = 0; kind < kNames.size(); ++kind) {
          for (int first = 1; first <= kSeriesEach; ++first) {
            all.push_back({i, size, victim, static_cast<Kind>(kind), first});
          }
        }
      }
    }
  }
  return all;
}

// Each in a process of its own, several at once: who waits for a stopped rank leaves the processors
// to others. With many more at once, a rank that computes would come too late for the others.
void run_all(const std::vector<Series>& all, bool full, Tally* tallies) {
  for (const bool stops : {false, true}) {
    const int most = stops ? 32 : 24;
    int running = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (is_stop(all[i].kind) != stops) continue;
      if (running == most) {
        waitpid(-1, nullptr, 0);
        --running;
      }
      tallies[i].breaches = 1;  // unless it says otherwise
      if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        tallies[i] = run_series(all[i], full);
        _exit(0);
      }
      ++running;
    }
    while (waitpid(-1, nullptr, 0) > 0) {
    }
  }
}

// Leaves out the semaphores that any Python program of the machine may make meanwhile.
std::set<std::string> shared_memory_names() {
  std::set<std::string> names;
  DIR* all = opendir("/dev/shm");
  if (all == nullptr) return names;
  while (const dirent* entry = readdir(all)) {
    const std::string name = entry->d_name;
    if (name.rfind("sem.mp-", 0) != 0) names.insert(name);
  }
  closedir(all);
  return names;
}

// "12/30": of 30 faults, 12 ended in an error.
void print_table(const std::vector<Series>& all, const Tally* tallies) {
  std::printf("%-26s%7s", "operation", "points");
  for (const char* name : kNames) std::printf("%12s", name);
  std::printf("\n");
  int total = 0;
  for (std::size_t i = 0; i < faults::operations().size(); ++i) {
    int points = 0;
    std::array<Tally, kNames.size()> row{};
    bool any = false;
    for (std::size_t s = 0; s < all.size(); ++s) {
      if (all[s].operation != i) continue;
      any = true;
      points = std::max(points, tallies[s].points);
      Tally& cell = row[static_cast<std::size_t>(all[s].kind)];
      cell.injected += tallies[s].injected;
      cell.heard += tallies[s].heard;
    }
    if (!any) continue;
    std::printf("%-26s%7d", faults::operations()[i].name, points);
    for (const Tally& cell : row) {
      const std::string text = std::to_string(cell.heard) + "/" + std::to_string(cell.injected);
      std::printf("%12s", text.c_str());
      total += cell.injected;
    }
    std::printf("\n");
  }
  std::printf("%d faults\n", total);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string given = argv[i];
    if (given == "--full") {
      options.full = true;
    } else if (given == "--table") {
      options.table = true;
    } else {
      options.only = given;
    }
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::set<std::string> names = shared_memory_names();
  const std::vector<Series> all = all_series(options);
  auto* tallies =
      static_cast<Tally*>(mmap(nullptr, sizeof(Tally) * (all.size() + 1), PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  run_all(all, options.full, tallies);
  int breaches = 0;
  for (std::size_t i = 0; i < all.size(); ++i) breaches += tallies[i].breaches;
  if (shared_memory_names() != names) {
    std::fprintf(stderr, "names are left in /dev/shm\n");
    ++breaches;
  }
  if (options.table) print_table(all, tallies);
  if (breaches > 0) {
    std::fprintf(stderr, "%d breaches\n", breaches);
    return 1;
  }
  std::puts("ok");
  return 0;
}
