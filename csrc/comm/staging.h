// In which order a rank fills and empties staging areas, and where it meets the others in between.
// docs/protocol.md says why that is right; the model checks it.
#pragma once

#include <cstdint>

#include "comm/board.h"

namespace shardcomm {

// Each rank of a channel has an area of two halves, which its chunks take in turn: one is filled
// while the other is still read.
class Staging {
 public:
  explicit Staging(Board& board) : board_(board) {}

  // The half of the present chunk, in the areas of all ranks.
  int half() const { return static_cast<int>(chunk_ & 1); }
  // The next chunk begins. A call's first may be filled before the call is posted, whose meeting is
  // then the chunk's, too.
  void next() { ++chunk_; }

  // Moves a call's chunks. `filled_first`: all ranks have filled the first one. `fill` and `use`
  // take the number of a chunk in its call.
  template <class Fill, class Use>
  void run(std::int64_t chunks, bool filled_first, Fill&& fill, Use&& use) {
    for (std::int64_t i = 0; i < chunks; ++i) {
      if (i > 0 || !filled_first) {
        next();
        fill(i);
        // All have filled this half, so all have emptied the other, which the next chunk fills.
        board_.meet();
      }
      use(i);
    }
  }

  // Uses a chunk of which each rank reduces its share for all. `reduce` reads that share in all
  // areas and leaves the result in this rank's own, where no other rank reads it before the
  // meeting. `copy` reads each other rank's share in the area of that rank.
  template <class Reduce, class Copy>
  void share(Reduce&& reduce, Copy&& copy) {
    reduce();
    board_.meet();
    copy();
  }

 private:
  Board& board_;
  std::int64_t chunk_ = 0;  // the number of the latest
};

}  // namespace shardcomm
