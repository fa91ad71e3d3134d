// Accesses to memory that is not atomic: no two may race.
#include <cstdio>
#include <cstdlib>

#include "run.h"

namespace model {

std::vector<Plain> plains;

namespace {

std::size_t index_of(const void* place) {
  for (std::size_t i = 0; i < plains.size(); ++i) {
    if (plains[i].place == place) return i;
  }
  std::fprintf(stderr, "model: plain memory that the scenario has not named\n");
  std::abort();
}

Knowledge bit(std::size_t index) {
  if (index >= kKnowledgeBits) {
    std::fprintf(stderr, "model: too much plain memory\n");
    std::abort();
  }
  return static_cast<Knowledge>(1) << index;
}
Knowledge write_of(std::size_t place) {
  return bit(place * (1 + static_cast<std::size_t>(num_fibers)));
}
Knowledge read_of(std::size_t place, int thread) {
  return bit(place * (1 + static_cast<std::size_t>(num_fibers)) + 1 +
             static_cast<std::size_t>(thread));
}

void forget(Knowledge accesses) {
  for (std::size_t i = 0; i < words_known; ++i) {
    for (Older& older : words[i].older) older.knowledge &= ~accesses;
    if ((words[i].knowledge & accesses) == 0) continue;
    words[i].knowledge &= ~accesses;
    rehash(i);
  }
  for (int i = 0; i < num_fibers; ++i) {
    Fiber& fiber = fibers[static_cast<std::size_t>(i)];
    fiber.knows &= ~accesses;
  }
}

}  // namespace

void plain(const void* place, const char* property) {
  const Outside outside;
  plains.push_back({});
  plains.back().place = place;
  plains.back().property = property;
}

void plain_read(const void* place) {
  if (running < 0) return;
  const std::size_t i = index_of(place);
  Plain& plain = plains[i];
  if (plain.written && (me().knows & write_of(i)) == 0) {
    violate(plain.property, "a read of " + scenario->name_of(place) + " races with a write");
  }
  forget(read_of(i, running));
  me().knows |= read_of(i, running);
  plain.readers |= 1U << running;
}

void plain_write(void* place) {
  if (running < 0) return;
  const std::size_t i = index_of(place);
  Plain& plain = plains[i];
  if (plain.written && (me().knows & write_of(i)) == 0) {
    violate(plain.property, "two writes to " + scenario->name_of(place) + " race");
  }
  Knowledge before = write_of(i);
  for (int t = 0; t < num_fibers; ++t) {
    before |= read_of(i, t);
    if ((plain.readers >> t & 1) != 0 && (me().knows & read_of(i, t)) == 0) {
      violate(plain.property, "a write to " + scenario->name_of(place) + " races with a read");
    }
  }
  forget(before);
  me().knows |= write_of(i);
  plain.written = true;
  plain.readers = 0;
  plain.content = me().history;
}

}  // namespace model
