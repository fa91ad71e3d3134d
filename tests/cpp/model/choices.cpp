// What may happen next in a run.
#include <algorithm>

#include "run.h"

namespace model {
namespace {

// Whether a load may find another value than it has found.
bool may_change(const Fiber& fiber) {
  const WordId id = fiber.waits_on;
  const std::size_t latest = words[id].older.size();
  for (std::size_t k = is_weak(id) ? fiber.seen[weak_number[id]] : latest; k <= latest; ++k) {
    if (value_of(id, k, 4) != fiber.waits_value) return true;
  }
  return false;
}

bool can_step(const Fiber& fiber) {
  if (is_out(fiber)) return false;
  switch (fiber.state) {
    case State::ready:
      return true;
    case State::polls:
    case State::locks:
      return may_change(fiber);
    case State::asleep:
    case State::over:
      return false;
  }
  return false;
}

// How many stores its present access may read: no older one than it knows of, and, if it is
// sequentially consistent, than the latest of those that are.
std::size_t ages(const Fiber& fiber) {
  if (fiber.state != State::ready || !fiber.reads_weak) return 1;
  const Word& word = words[fiber.at];
  std::size_t oldest = fiber.seen[weak_number[fiber.at]];
  if (fiber.is_seq_cst) oldest = std::max(oldest, word.latest_seq_cst);
  return word.older.size() - oldest + 1;
}

}  // namespace

std::size_t list(Options& out) {
  std::size_t n = 0;
  const auto may = [&](Kind kind, int who, std::size_t age = 0) {
    out[n++] = pack({kind, static_cast<std::uint8_t>(who), static_cast<std::uint8_t>(age)});
  };
  bool can_pass = false;
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (is_out(fiber) || fiber.state == State::over) continue;
    can_pass |= fiber.clocked && fiber.since == epoch;
    if (!can_step(fiber)) continue;
    for (std::size_t age = 0; age < ages(fiber); ++age) may(Kind::step, i, age);
    if (faults_left == 0) continue;
    if (world.may_die >> fiber.rank & 1) may(Kind::step_and_die, i);
    if (world.may_stop >> fiber.rank & 1) may(Kind::step_and_stop, i);
  }
  const bool idle = n == 0;
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (is_out(fiber) || fiber.state != State::asleep) continue;
    if (idle || world.wakes_needlessly) may(Kind::time_out, i);
  }
  for (int r = 0; r < kMostRanks; ++r) {
    if ((dead & ~shown) >> r & 1) may(Kind::show_death, r);
  }
  if (can_pass && (world.time == Time::any || (world.time == Time::when_idle && idle))) {
    may(Kind::pass, 0);
  }
  return n;
}

bool all_over() {
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (!is_out(fiber) && fiber.state != State::over) return false;
  }
  return true;
}

}  // namespace model
