#include "faults/trial.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>

namespace faults {
namespace {

using shardcomm::CommError;
using shardcomm::ProcessId;

constexpr int kMostRanks = 3;
constexpr double kStopDeadline_s = 1.0;
constexpr double kDeadline_s = 25.0;  // longer than `kPatience_s`: nobody may wait for it
constexpr double kPromise_s = 2.0;    // in which a death or an error reaches all
constexpr unsigned kPatience_s = 12;  // what runs longer hangs

enum class Ending : int { none, well, error, foreign };

// What a rank tells the test, whatever becomes of it.
struct Outcome {
  std::atomic<Ending> ending{Ending::none};  // of the operation, or of what came after it
  std::atomic<bool> raised_in_operation{false};
  std::atomic<std::int64_t> ended_ns{0};
  char text[1500] = {};
  char breach[500] = {};
};

// In memory that the ranks share with the test.
struct Shared {
  ProcessId processes[kMostRanks];
  std::atomic<int> here{0};
  std::atomic<int> session_made{0};
  char address[64] = {};
  Report report;
  Outcome outcomes[kMostRanks];
};

class SharedPages {
 public:
  SharedPages()
      : shared_(new (mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared) {}
  ~SharedPages() { munmap(shared_, sizeof(Shared)); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  Shared& operator*() const { return *shared_; }

 private:
  Shared* shared_;
};

void wait_until(const std::function<bool()>& come) {
  while (!come()) usleep(100);
}

int open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> all(opendir("/proc/self/fd"), &closedir);
  int count = 0;
  while (readdir(all.get()) != nullptr) ++count;
  return count;
}

bool maps_a_window() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find("memfd:shardcomm") != std::string::npos) return true;
  }
  return false;
}

// The rank's operation, and then the next one. Errors that the victim's own fault makes may be of
// other kinds.
void work(const Trial& trial, Rank& own, Shared& shared) {
  Outcome& outcome = shared.outcomes[own.rank];
  const auto end = [&](Ending ending, const char* text) {
    disarm();
    outcome.ended_ns.store(now_ns());
    std::snprintf(outcome.text, sizeof outcome.text, "%s", text);
    outcome.ending.store(ending);
  };
  bool in_operation = true;
  try {
    trial.operation->prepare(own);
    if (own.rank == trial.victim) arm(trial.fault, &shared.report);
    trial.operation->run(own);
    disarm();
    in_operation = false;
    std::string wrong = trial.operation->wrong(own);
    if (wrong.empty() && !trial.operation->ends) wrong = go_on(own);
    std::snprintf(outcome.breach, sizeof outcome.breach, "%s", wrong.c_str());
    end(Ending::well, "");
  } catch (const CommError& error) {
    end(Ending::error, error.what());
  } catch (const std::bad_alloc& error) {
    end(own.rank == trial.victim ? Ending::error : Ending::foreign, error.what());
  } catch (const std::runtime_error& error) {
    end(own.rank == trial.victim ? Ending::error : Ending::foreign, error.what());
  } catch (const std::exception& error) {
    end(Ending::foreign, error.what());
  }
  outcome.raised_in_operation.store(in_operation);
}

[[noreturn]] void be_rank(const Trial& trial, int rank, Shared& shared) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  shared.processes[rank] = ProcessId::own();
  ++shared.here;
  wait_until([&] { return shared.session_made.load() != 0; });
  const int before = open_descriptors();
  Outcome& outcome = shared.outcomes[rank];
  {
    Rank own;
    own.address = shared.address;
    own.rank = rank;
    own.size = trial.size;
    own.victim = trial.victim;
    const bool stops = trial.fault.kind == Kind::stop || trial.fault.kind == Kind::stop_after;
    own.deadline_s = stops ? kStopDeadline_s : kDeadline_s;
    work(trial, own, shared);
    // An error must reach the others by itself, and not because this rank closes, or its process
    // ends.
    if (!stops) {
      wait_until([&] {
        for (int r = 0; r < trial.size; ++r) {
          if (shared.outcomes[r].ending.load() == Ending::none && r != trial.victim) return false;
        }
        return true;
      });
    }
  }
  if (!shared.report.leaks.load()) {
    const int after = open_descriptors();
    if (after != before) {
      std::snprintf(outcome.breach, sizeof outcome.breach, "%d descriptors are left open",
                    after - before);
    }
    if (maps_a_window()) std::snprintf(outcome.breach, sizeof outcome.breach, "a window is left");
  }
  _exit(0);
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// What the rank must not do, given what happened to the victim.
std::string breach_of(const Trial& trial, int rank, const Shared& shared, int status) {
  const Outcome& outcome = shared.outcomes[rank];
  const Report& report = shared.report;
  const bool is_victim = rank == trial.victim;
  const bool fired = report.fired.load();
  const Kind kind = trial.fault.kind;
  const bool kills = kind == Kind::kill || kind == Kind::kill_after;
  const bool stops = kind == Kind::stop || kind == Kind::stop_after;
  if (is_victim && kills && fired) return "";
  if (WIFSIGNALED(status)) {
    return "ended by signal " + std::to_string(WTERMSIG(status)) + " (" +
           strsignal(WTERMSIG(status)) + ")";
  }
  if (WEXITSTATUS(status) != 0) return "exit status " + std::to_string(WEXITSTATUS(status));
  if (outcome.breach[0] != '\0') return outcome.breach;
  const Ending ending = outcome.ending.load();
  const std::string text = outcome.text;
  if (ending == Ending::foreign) return "an exception of a wrong kind: " + text;
  if (ending == Ending::well) {
    // What comes after the operation needs the victim.
    const bool needed = !trial.operation->ends && !is_victim && fired && (kills || stops);
    return needed ? "went on without the victim" : "";
  }
  if (report.interrupted.load()) return "an interrupted call is not made again: " + text;
  if (!fired || kind == Kind::delay) return "an error without a reason: " + text;
  const double after_s =
      1e-9 * static_cast<double>(outcome.ended_ns.load() - report.fired_ns.load());
  if (!is_victim) {
    const double bound_s = stops ? kStopDeadline_s + kPromise_s : kPromise_s;
    if (after_s > bound_s) return "heard of it after " + std::to_string(after_s) + " s: " + text;
  }
  if (is_victim) return "";
  const std::string named = "rank " + std::to_string(trial.victim);
  const std::string with_pid =
      named + " (pid " + std::to_string(shared.processes[trial.victim].pid) + ")";
  if (kills && !has(text, with_pid + " died"))
    return "does not say that " + with_pid + " died: " + text;
  if (stops && !has(text, with_pid + " did not come")) {
    return "does not say that " + with_pid + " did not come: " + text;
  }
  if (text.find(with_pid) != 0) return "does not begin with the victim: " + text;
  // An error that the victim heard of must be its own reason for the others.
  const Outcome& victims = shared.outcomes[trial.victim];
  if (!kills && !stops && victims.ending.load() == Ending::well) {
    return "an error though the victim went on: " + text;
  }
  return "";
}

void nothing(int) {}

}  // namespace

Result run(const Trial& trial) {
  const SharedPages pages;
  Shared& shared = *pages;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < trial.size; ++rank) {
    const pid_t child = fork();
    if (child == 0) be_rank(trial, rank, shared);
    ranks.push_back(child);
  }
  wait_until([&] { return shared.here.load() == trial.size; });
  const shardcomm::ShmSession session(
      trial.size, std::vector<ProcessId>(shared.processes, shared.processes + trial.size));
  std::snprintf(shared.address, sizeof shared.address, "%s", session.address().c_str());
  shared.session_made.store(1);

  Result result;
  struct sigaction on_alarm{};
  on_alarm.sa_handler = nothing;  // without SA_RESTART: waitpid returns
  sigaction(SIGALRM, &on_alarm, nullptr);
  alarm(kPatience_s);
  std::vector<std::optional<int>> ended(ranks.size());
  std::size_t left = ranks.size();
  bool stopped = false;
  while (left > 0) {
    if (stopped && left == 1) {
      stopped = false;
      kill(ranks[static_cast<std::size_t>(trial.victim)], SIGCONT);
      alarm(kPatience_s);
    }
    int status = 0;
    const pid_t child = waitpid(-1, &status, WUNTRACED);
    if (child < 0 && errno == EINTR) {
      for (std::size_t r = 0; r < ranks.size(); ++r) {
        if (ended[r]) continue;
        const Outcome& outcome = shared.outcomes[r];
        result.breach += "rank " + std::to_string(r) + " hangs " +
                         (outcome.ending.load() == Ending::none ? "in it" : "after it") + "; ";
        kill(ranks[r], SIGKILL);
      }
      continue;
    }
    if (WIFSTOPPED(status)) {
      stopped = true;
      continue;
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r] == child) ended[r] = status;
    }
    --left;
  }
  alarm(0);

  result.reached = shared.report.reached.load();
  result.fired = shared.report.fired.load();
  result.errors = shared.report.errors.load();
  result.point = shared.report.name;
  bool victim_raised = shared.outcomes[trial.victim].ending.load() == Ending::error;
  for (int rank = 0; rank < trial.size; ++rank) {
    if (shared.outcomes[rank].ending.load() == Ending::error) ++result.raised;
    if (!result.breach.empty()) continue;
    std::string breach = breach_of(trial, rank, shared, *ended[static_cast<std::size_t>(rank)]);
    // All or none; an operation after which ranks part does not tell.
    if (breach.empty() && rank != trial.victim && victim_raised && !trial.operation->ends &&
        shared.outcomes[rank].ending.load() == Ending::well) {
      breach =
          "went on, though the victim raised: " + std::string(shared.outcomes[trial.victim].text);
    }
    if (!breach.empty()) result.breach = "rank " + std::to_string(rank) + ": " + breach;
  }
  return result;
}

}  // namespace faults
