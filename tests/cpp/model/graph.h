// The states that an exploration has seen, and the transitions between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "run.h"

namespace model {

struct Edge {
  std::uint32_t from;
  std::uint32_t to;
  Kind kind;
};

// 64-bit hashes of states, each with its number.
class Seen {
 public:
  Seen() { grow(1 << 16); }
  // The number of `hash`, and whether it is new.
  std::pair<std::uint32_t, bool> insert(std::uint64_t hash) {
    if (size_ * 10 > hashes_.size() * 6) grow(hashes_.size() * 2);
    std::size_t i = hash & (hashes_.size() - 1);
    while (hashes_[i] != 0) {
      if (hashes_[i] == hash) return {numbers_[i], false};
      i = (i + 1) & (hashes_.size() - 1);
    }
    hashes_[i] = hash;
    numbers_[i] = static_cast<std::uint32_t>(size_);
    return {static_cast<std::uint32_t>(size_++), true};
  }

 private:
  void grow(std::size_t capacity) {
    std::vector<std::uint64_t> hashes(capacity, 0);
    std::vector<std::uint32_t> numbers(capacity, 0);
    for (std::size_t j = 0; j < hashes_.size(); ++j) {
      if (hashes_[j] == 0) continue;
      std::size_t i = hashes_[j] & (capacity - 1);
      while (hashes[i] != 0) i = (i + 1) & (capacity - 1);
      hashes[i] = hashes_[j];
      numbers[i] = numbers_[j];
    }
    hashes_.swap(hashes);
    numbers_.swap(numbers);
  }
  std::vector<std::uint64_t> hashes_;
  std::vector<std::uint32_t> numbers_;
  std::size_t size_ = 0;
};

struct Graph {
  Seen seen;
  std::vector<std::uint32_t> parents;
  std::vector<Code> choices;
  std::vector<Edge> edges;
  std::vector<std::uint32_t> ends;
  struct Pending {
    std::uint32_t state;
    Code choice;
  };
  std::deque<Pending> pending;
};

}  // namespace model
