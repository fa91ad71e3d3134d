// Copies into memory of which other ranks' cores hold the lines: a staging area, or a ring of
// messages.
//
// The other ranks have read it. An ordinary store has to take its line back first, and such stores
// wait for each other: 10 ns for each line where the cores are far from each other, against 1.5 ns
// for a store that goes past the caches. Where ranks share a core it is the other way round: 1.2
// ns, and 1.6 ns. A virtual machine does not tell how far its cores are, and it changes where ranks
// or cores are moved. So the copies themselves are timed. Each rank decides for itself: the others
// read the same bytes either way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shardcomm {

// The rates of both ways, for copies of about one size, and which way the next copy goes: past the
// caches if ordinary stores take half as long again. For the rank that reads then may have to go to
// memory, where it would find what was stored last in the caches of a core that is near.
class CopyRates {
 public:
  // Of so many copies one goes the way that is not taken, and tells whether it still is slower. A
  // prime: callers that copy by turns into several places try it in each.
  static constexpr std::uint32_t kTries = 61;

  bool past_caches() const;
  void took(bool past_caches, double ns_per_byte);

 private:
  double ordinary_ = 0;
  double past_caches_ = 0;
  std::uint32_t copies_ = 0;
};

// Belongs to a rank's channel or ring, in which it copies one after another.
class Filler {
 public:
  // memcpy. Other ranks see the bytes once they see what this rank stores afterwards.
  void copy(void* dst, const void* src, std::size_t bytes);

 private:
  // Of fewer bytes, reading the clock takes too long. More are for no cache (kStreamingRunBytes).
  static constexpr int kSmallestLog2 = 13;
  static constexpr int kSizes = 9;

  std::array<CopyRates, kSizes> rates_;
};

}  // namespace shardcomm
