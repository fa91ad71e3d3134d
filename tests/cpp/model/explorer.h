// Runs a scenario of a few threads in every order in which they may access the memory they share.
//
// Threads are fibers of one thread; at each access to shared memory the explorer chooses who goes
// on. A run is the list of its choices, and goes the same way whenever it is repeated: to try
// another choice, the explorer begins anew and repeats the choices before it. A state that was seen
// before is not explored again. docs/protocol.md says what is assumed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace model {

// Threads, ranks.
using Mask = std::uint32_t;
constexpr int kMostRanks = 4;
constexpr int kMostThreads = 8;

enum class Time : std::uint8_t {
  stands,     // no deadline passes
  when_idle,  // deadlines pass when all who are left sleep
  any         // deadlines pass at any moment
};

// What may happen beside the steps of the threads.
struct World {
  Time time = Time::stands;
  Mask may_die = 0;              // ranks that may die, between any two accesses
  Mask may_stop = 0;             // ranks that may be stopped for ever
  int faults = 1;                // at most so many of both
  bool weak = false;             // a load may read an older store, as C++ lets it (else the latest)
  bool wakes_needlessly = true;  // a sleep may end at any moment; else only when nobody can go on
  bool spins = false;            // ranks spin before they sleep
};

// A property that does not hold: which, and how.
struct Violation {
  std::string property;
  std::string text;
};

class Scenario {
 public:
  virtual ~Scenario() = default;
  virtual World world() const = 0;
  // Lays out fresh memory, and spawns the threads.
  virtual void start() = 0;
  // Between any two steps; `thread` made the last.
  virtual void look(int thread) = 0;
  virtual void time_passes() = 0;
  virtual void died(int rank) = 0;  // others can see it from now on
  virtual void ended() = 0;         // every thread has ended, or its rank is halted
  // What the checks remember.
  virtual std::uint64_t hash() const = 0;
  // Memory of which only this is part of a state; the rest is of no consequence to anyone.
  virtual std::uint64_t significant(const void* word, std::uint64_t value) const = 0;
  // An access at which nobody else needs to go on.
  virtual bool is_quiet(const void* word) const = 0;
  virtual std::string name_of(const void* word) const = 0;
  // Whether all must be able to end though no sleep ever times out.
  virtual bool ends_without_timeouts() const = 0;
};

struct Result {
  std::size_t states = 0;
  std::size_t transitions = 0;
  bool violated = false;
  Violation violation;
  std::vector<std::string> trace;  // the steps that lead to it
};

Result explore(Scenario& scenario, std::size_t most_states);

// For scenarios, in `start`.
void* fresh_memory(std::size_t bytes);  // zero; the same in every run
void spawn(int rank, std::function<void()> body);
// Memory that is not atomic; accesses that race violate `property`.
void plain(const void* place, const char* property);

// Between two steps.
void store_from_outside(void* word, std::uint32_t value);

// For the threads of a scenario.
int self();
// The running thread's locals follow from `locals` alone, whatever it has read so far.
void forget_all_but(std::uint64_t locals);
// Something else may happen here.
void step(const char* what);
// Ends the run.
[[noreturn]] void violate(const std::string& property, const std::string& text);

bool is_halted(int rank);
bool has_died(int rank);
bool is_overdue(int thread);
bool is_waiting_for_time(int thread);  // has looked at the clock in its present wait, not overdue
int rank_of(int thread);
int threads();
// Those asleep are to be woken by this thread before its operation has ended.
void owe_wakes(int thread);
bool owes_wakes(int thread);

constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15U ^ (b + 0x7f4a7c15U);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace model
