// Copies into memory that another rank reads next: a staging area, or a ring of messages.
//
// The other ranks' cores still hold its lines, since they have read them. An ordinary store has to
// take its line back first, and such stores wait for each other: 10 ns for each line where the
// cores are far from each other, against 1.5 ns for a store that goes past the caches. Where ranks
// share a core it is the other way round: 1.2 ns, and 1.6 ns. No system tells how far its cores
// are, and it changes where a system moves ranks, or a virtual machine's cores. So the copies
// themselves are timed. Each rank decides for itself: the others read the same bytes either way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shardcomm {

// The rates of both ways, for copies of about one size, and which way the next copy goes.
class CopyRates {
 public:
  // Of so many copies one goes the slower way, and tells whether it still is.
  static constexpr std::uint32_t kTries = 64;

  bool past_caches() const;
  void took(bool past_caches, double ns_per_byte);

 private:
  double ordinary_ = 0;
  double past_caches_ = 0;
  std::uint32_t copies_ = 0;
};

// Belongs to a rank's channel or ring, in which it copies one after another.
class Filling {
 public:
  // memcpy. Other ranks see the bytes once they see what this rank stores afterwards.
  void copy(void* dst, const void* src, std::size_t bytes);

 private:
  static constexpr int kSmallestLog2 = 13;  // for fewer bytes, reading the clock takes too long
  static constexpr int kSizes = 8;          // up to the size of a staging area

  std::array<CopyRates, kSizes> rates_;
};

}  // namespace shardcomm
