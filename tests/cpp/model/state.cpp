// Where a run is, as one number: two runs with the same can only go on alike.
#include <algorithm>

#include "run.h"

namespace model {
namespace {

// Who may read which older stores. Those that nobody can read any more are of no consequence.
std::uint64_t hash_of_views() {
  View oldest;
  oldest.fill(0xff);
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (is_out(fiber) || fiber.state == State::over) continue;
    for (std::size_t w = 0; w < kMostWeak; ++w) oldest[w] = std::min(oldest[w], fiber.seen[w]);
  }
  const auto hash_of_view = [&](const View& view) {
    std::uint64_t hash = 0;
    for (std::size_t w = 0; w < weak_words.size(); ++w) {
      if (view[w] > oldest[w]) hash = mix(hash, w << 8 | (view[w] - oldest[w]));
    }
    return hash;
  };
  std::uint64_t hash = 0;
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (!is_out(fiber)) hash = mix(hash, hash_of_view(fiber.seen));
  }
  for (std::size_t id = 0; id < words_known; ++id) {
    const std::uint64_t view = hash_of_view(words[id].view);
    if (view != 0) hash = mix(mix(hash, id), view);
  }
  for (std::size_t w = 0; w < weak_words.size(); ++w) {
    const Word& word = words[weak_words[w]];
    for (std::size_t k = oldest[w]; k < word.older.size(); ++k) {
      const Older& older = word.older[k];
      hash = mix(mix(hash, older.value), mix(hash_of(older.knowledge), hash_of_view(older.view)));
      hash = mix(hash, k < word.latest_seq_cst ? 1 : 0);
    }
    hash = mix(hash, w);
  }
  return hash;
}

}  // namespace

std::uint64_t state_hash() {
  std::uint64_t hash = mix(memory_hash, scenario->hash());
  if (world.weak) hash = mix(hash, hash_of_views());
  hash = mix(hash, (static_cast<std::uint64_t>(halted) << 32) | (dead << 16) | (shown << 8) |
                       static_cast<std::uint64_t>(faults_left));
  for (int i = 0; i < num_fibers; ++i) {
    const Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    if (halted >> fiber.rank & 1) continue;  // what it was at is of no consequence
    hash = mix(mix(hash, fiber.history), fiber.state == State::polls ? fiber.waits_value : 0);
    hash = mix(hash, static_cast<std::uint64_t>(fiber.state) |
                         static_cast<std::uint64_t>(fiber.waits_on) << 8 |
                         static_cast<std::uint64_t>(fiber.clocked) << 24 |
                         static_cast<std::uint64_t>(fiber.clocked && fiber.since < epoch) << 25 |
                         static_cast<std::uint64_t>(fiber.owed) << 26 |
                         static_cast<std::uint64_t>(fiber.owed ? fiber.ower : 0) << 27);
    hash = mix(hash, hash_of(fiber.knows));
  }
  for (const Plain& plain : plains) {
    if (plain.written) hash = mix(mix(hash, plain.content), plain.readers);
  }
  return hash == 0 ? 1 : hash;
}

}  // namespace model
