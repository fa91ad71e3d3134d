#include "explorer.h"

#include <algorithm>
#include <memory>
#include <random>
#include <sstream>

#include "graph.h"
#include "run.h"

namespace model {

std::uint64_t epoch = 1;
Mask halted = 0;
Mask dead = 0;
Mask shown = 0;
int faults_left = 0;
Scenario* scenario = nullptr;
World world;
Mode mode = Mode::walk;
Choice last{Kind::step, 0};
bool learnt = false;

namespace {

constexpr std::size_t kWalks = 400;
constexpr std::size_t kWalkSteps = 2000;

std::vector<Code> path;  // to be repeated
std::size_t cursor = 0;
std::vector<Code> taken;
std::uint32_t state_before = 0;
bool has_before = false;
std::mt19937_64 random_bits;
Result result;
std::size_t most_states = 0;
bool told_end = false;
std::unique_ptr<Graph> graph;

void tell_end() {
  if (told_end) return;
  told_end = true;
  scenario->ended();
}

// Chooses, or returns false: nothing may happen any more, or all that follows is known.
bool choose(Choice& choice) {
  if (cursor < path.size()) {
    choice = unpack(path[cursor++]);
    return true;
  }
  const Outside outside;
  Options options;
  if (mode == Mode::show) return false;
  if (mode == Mode::walk) {
    const std::size_t n = list(options);
    if (all_over()) tell_end();
    if (n == 0 || taken.size() > kWalkSteps) return false;
    choice = unpack(options[random_bits() % n]);
    return true;
  }
  const auto [state, is_new] = graph->seen.insert(state_hash());
  if (has_before) graph->edges.push_back({state_before, state, last.kind});
  if (!is_new) return false;
  graph->parents.push_back(has_before ? state_before : state);
  graph->choices.push_back(pack(last));
  const std::size_t n = list(options);
  if (all_over()) {
    graph->ends.push_back(state);
    tell_end();
  }
  if (n == 0) return false;
  for (std::size_t i = 1; i < n; ++i) graph->pending.push_back({state, options[i]});
  state_before = state;
  has_before = true;
  choice = unpack(options[0]);
  return true;
}

void describe(Choice choice) {
  const Outside outside;
  std::ostringstream line;
  const Fiber& fiber = fibers[choice.who];
  const std::string thread = "rank " + std::to_string(fiber.rank) + ", thread " +
                             std::to_string(static_cast<int>(choice.who)) + ": ";
  switch (choice.kind) {
    case Kind::step:
    case Kind::step_and_die:
    case Kind::step_and_stop:
      line << thread << fiber.doing;
      if (fiber.at != kNone) {
        line << " " << scenario->name_of(place_of[fiber.at]) << " (is "
             << raw(place_of[fiber.at], 4) << ")";
        if (choice.age > 0) line << " of " << static_cast<int>(choice.age) << " stores before";
      }
      if (choice.kind == Kind::step_and_die) line << ", and the rank dies";
      if (choice.kind == Kind::step_and_stop) line << ", and the rank is stopped for ever";
      break;
    case Kind::time_out:
      line << thread << "its sleep times out";
      break;
    case Kind::pass:
      line << "a deadline passes";
      break;
    case Kind::show_death:
      line << "rank " << static_cast<int>(choice.who) << "'s death can be seen";
      break;
  }
  result.trace.push_back(line.str());
}

void halt(int rank, bool dies) {
  halted |= 1U << rank;
  if (dies) dead |= 1U << rank;
  --faults_left;
}

// One run: `path`, and then what `choose` says.
void run() {
  forget_fibers();
  forget_words();
  plains.clear();
  epoch = 1;
  halted = dead = shown = 0;
  world = scenario->world();
  faults_left = world.faults;
  cursor = 0;
  taken.clear();
  has_before = has_before && mode == Mode::explore;
  told_end = false;
  in_memory = true;
  scenario->start();
  in_memory = false;
  leave_main(go_on);
}

std::vector<Code> path_to(std::uint32_t state) {
  std::vector<Code> steps;
  while (graph->parents[state] != state) {
    steps.push_back(graph->choices[state]);
    state = graph->parents[state];
  }
  return {steps.rbegin(), steps.rend()};
}

// A state from which no end can be reached by such transitions, or -1.
template <class Allowed>
std::int64_t state_without_end(Allowed allowed) {
  const std::size_t states = graph->parents.size();
  std::vector<std::uint32_t> first(states + 1, 0);
  for (const Edge& edge : graph->edges) ++first[edge.to + 1];
  for (std::size_t i = 0; i < states; ++i) first[i + 1] += first[i];
  std::vector<std::uint32_t> next(first.begin(), first.end() - 1);
  std::vector<std::uint32_t> from(graph->edges.size());
  for (std::size_t i = 0; i < graph->edges.size(); ++i) {
    const Edge& edge = graph->edges[i];
    from[next[edge.to]++] = allowed(edge.kind) ? edge.from : edge.to;
  }
  std::vector<bool> ends(states, false);
  std::vector<std::uint32_t> stack(graph->ends);
  for (const std::uint32_t state : stack) ends[state] = true;
  while (!stack.empty()) {
    const std::uint32_t state = stack.back();
    stack.pop_back();
    for (std::uint32_t i = first[state]; i < first[state + 1]; ++i) {
      if (ends[from[i]]) continue;
      ends[from[i]] = true;
      stack.push_back(from[i]);
    }
  }
  for (std::size_t i = 0; i < states; ++i) {
    if (!ends[i]) return static_cast<std::int64_t>(i);
  }
  return -1;
}

bool is_fault(Kind kind) { return kind == Kind::step_and_die || kind == Kind::step_and_stop; }

void check_ends() {
  std::int64_t stuck = state_without_end([](Kind kind) { return !is_fault(kind); });
  if (stuck >= 0) {
    result.violated = true;
    result.violation = {"P1", "a rank waits without end"};
  } else if (scenario->ends_without_timeouts()) {
    stuck = state_without_end(
        [](Kind kind) { return !is_fault(kind) && kind != Kind::time_out && kind != Kind::pass; });
    if (stuck < 0) return;
    result.violated = true;
    result.violation = {"P7", "nobody wakes a rank that sleeps: it needs a timeout"};
  } else {
    return;
  }
  path = path_to(static_cast<std::uint32_t>(stuck));
}

void show() {
  Violation found = result.violation;
  mode = Mode::show;
  run();
  result.violation = found;
}

// Returns false if something new was learnt about who uses what: the exploration was for nothing.
bool explore_once() {
  graph = std::make_unique<Graph>();
  facts = uses;
  learnt = false;
  mode = Mode::explore;
  has_before = false;
  path.clear();
  run();
  while (!learnt && !result.violated && !graph->pending.empty()) {
    if (graph->parents.size() > most_states) {
      result.violated = true;
      result.violation = {"bound", "more than " + std::to_string(most_states) + " states"};
      result.states = graph->parents.size();
      return true;
    }
    const Graph::Pending pending = graph->pending.front();
    graph->pending.pop_front();
    path = path_to(pending.state);
    path.push_back(pending.choice);
    state_before = pending.state;
    has_before = true;
    run();
  }
  if (learnt && !result.violated) return false;
  if (!result.violated) check_ends();
  result.states = graph->parents.size();
  result.transitions = graph->edges.size();
  return true;
}

}  // namespace

// Goes on with the run: until this fiber is to go on, if one calls it.
void go_on() {
  for (;;) {
    if (!taken.empty()) {
      if (last.kind == Kind::step_and_die || last.kind == Kind::step_and_stop) {
        halt(fibers[last.who].rank, last.kind == Kind::step_and_die);
      }
      const Outside outside;
      scenario->look(last.kind == Kind::step || last.kind == Kind::step_and_die ||
                             last.kind == Kind::step_and_stop || last.kind == Kind::time_out
                         ? last.who
                         : -1);
    }
    Choice choice;
    if (!choose(choice)) to_main();
    if (mode == Mode::show) describe(choice);
    {
      const Outside outside;
      taken.push_back(pack(choice));
    }
    last = choice;
    Fiber& fiber = fibers[choice.who];
    switch (choice.kind) {
      case Kind::step:
      case Kind::step_and_die:
      case Kind::step_and_stop:
      case Kind::time_out:
        if (choice.kind == Kind::time_out) fiber.owed = false;
        fiber.state = State::ready;
        return switch_to(choice.who);
      case Kind::pass: {
        const Outside outside;
        scenario->time_passes();
        ++epoch;
        break;
      }
      case Kind::show_death: {
        const Outside outside;
        shown |= 1U << choice.who;
        scenario->died(choice.who);
        break;
      }
    }
  }
}

Result explore(Scenario& of, std::size_t bound) {
  make_fibers();
  scenario = &of;
  most_states = bound;
  result = Result{};
  forget_places();
  random_bits.seed(1);
  mode = Mode::walk;
  path.clear();
  for (std::size_t i = 0; i < kWalks; ++i) run();
  result = Result{};  // what they found, the exploration finds by a shorter way
  while (!result.violated && !explore_once()) {
  }
  if (result.violated && result.violation.property != "bound") {
    show();
  }
  graph = nullptr;
  return result;
}

int self() { return running; }
int rank_of(int thread) { return fibers[static_cast<std::size_t>(thread)].rank; }
int threads() { return num_fibers; }
bool is_halted(int rank) { return (halted >> rank & 1) != 0; }
bool has_died(int rank) { return (dead >> rank & 1) != 0; }
bool is_overdue(int thread) {
  const Fiber& fiber = fibers[static_cast<std::size_t>(thread)];
  return fiber.clocked && fiber.since < epoch;
}
bool is_waiting_for_time(int thread) {
  const Fiber& fiber = fibers[static_cast<std::size_t>(thread)];
  return fiber.clocked && fiber.since == epoch;
}

void violate(const std::string& property, const std::string& text) {
  const Outside outside;
  if (!result.violated) {
    result.violated = true;
    result.violation = {property, text};
    path = taken;
  }
  to_main();
}

void owe_wakes(int thread) {
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (fiber.state != State::asleep || fiber.owed) continue;
    fiber.owed = true;
    fiber.ower = thread;
  }
}

bool owes_wakes(int thread) {
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (!is_out(fiber) && fiber.state == State::asleep && fiber.owed && fiber.ower == thread) {
      return true;
    }
  }
  return false;
}

}  // namespace model
