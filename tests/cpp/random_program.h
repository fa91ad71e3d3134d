// A random program of collectives: what all ranks draw alike, and a rank's operands, which are at
// times communication memory and at times its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ranks.h"
#include "shardcomm/communicator.h"

namespace ranks {

constexpr std::int64_t kInline = 16 * 1024;  // bytes of all ranks that go with the call, at most
constexpr std::int64_t kChunk = 1024 * 1024;
constexpr std::size_t kArena = 5 * 4 * kChunk;

// No chunk looks like another, and no rank's bytes like another's.
inline Bytes bytes_of(int key, std::int64_t count) {
  return message(static_cast<std::uint64_t>(key), static_cast<std::size_t>(count));
}

// What all ranks draw alike, and one rank's memory.
class Program {
 public:
  Program(shardcomm::Communicator& comm, unsigned seed)
      : comm(comm),
        arena_(comm.allocate(kArena, shardcomm::Use::reduce)),
        seed_(seed),
        random_(seed) {}

  std::int64_t draw(std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most)(random_);
  }
  template <class T>
  T pick(const std::vector<T>& all) {
    return all[static_cast<std::size_t>(draw(static_cast<std::int64_t>(all.size()) - 1))];
  }
  // Around `limit`, where something changes, or few; seldom so many that there are several chunks.
  std::int64_t size_near(std::int64_t limit) {
    if (draw(2) > 0) return std::max<std::int64_t>(0, limit + draw(4) - 2);
    return pick<std::int64_t>({0, 1, 7, 64, 1000});
  }
  // Communication memory on some ranks, and memory of the rank's own on others. The bytes after
  // `count` must stay as they are.
  std::byte* memory(std::int64_t count) {
    std::byte* made = nullptr;
    for (int r = 0; r < comm.size(); ++r) {
      const bool in_arena = draw(1) == 1;
      if (r != comm.rank()) continue;
      const auto bytes = static_cast<std::size_t>(count);
      if (in_arena) {
        made = static_cast<std::byte*>(arena_->data()) + used_;
        used_ += (bytes + 64 + 127) / 128 * 128;
        require(used_ <= kArena, "the arena has room");
      } else {
        own_.emplace_back(bytes + 64);
        made = own_.back().data();
      }
      std::memset(made, 0xa5, bytes + 64);
      guarded_.push_back(made + bytes);
    }
    return made;
  }
  // Ends a step: what it used is gone, and nobody has written past an end.
  void done(const char* what) {
    for (const std::byte* after : guarded_) {
      for (int i = 0; i < 64; ++i) holds(after[i] == std::byte{0xa5}, what);
    }
    guarded_.clear();
    own_.clear();
    used_ = 0;
    ++step_;
  }
  void holds(bool claim, const char* what) const {
    if (claim) return;
    require(false, std::string(what) + ", in step " + std::to_string(step_) + " of seed " +
                       std::to_string(seed_) + " on rank " + std::to_string(comm.rank()) + " of " +
                       std::to_string(comm.size()));
  }
  void same(const std::byte* have, const Bytes& want, const char* what) const {
    holds(want.empty() || std::memcmp(have, want.data(), want.size()) == 0, what);
  }

  shardcomm::Communicator& comm;

 private:
  std::shared_ptr<shardcomm::Memory> arena_;
  std::size_t used_ = 0;
  std::vector<std::vector<std::byte>> own_;
  std::vector<const std::byte*> guarded_;
  unsigned seed_;
  int step_ = 0;
  std::mt19937_64 random_;
};

}  // namespace ranks
