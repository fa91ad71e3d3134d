// The ranks' parts, cut into chunks that cross from host to host one after another.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shardcomm/parts.h"
#include "shardcomm/tile.h"

namespace shardcomm {

// Chunk i has the elements i * step to (i + 1) * step - 1 of each part that is so long.
class Chunks {
 public:
  Chunks(const Parts& parts, std::int64_t step)
      : parts_(parts), step_(step), number_(divide_up(parts.longest(), step)) {}

  std::int64_t number() const { return number_; }
  // The elements of rank `r` in a chunk.
  std::int64_t length(int r, std::int64_t chunk) const {
    return std::clamp<std::int64_t>(parts_.count(r) - chunk * step_, 0, step_);
  }
  // The most elements of a rank in a chunk.
  std::int64_t longest(std::int64_t chunk) const {
    return std::min(step_, parts_.longest() - chunk * step_);
  }
  // Where the elements of rank `r` begin, among those of all parts.
  std::int64_t begin(int r, std::int64_t chunk) const {
    return parts_.begin(r) + std::min(chunk * step_, parts_.count(r));
  }

 private:
  const Parts& parts_;
  const std::int64_t step_;
  const std::int64_t number_;
};

}  // namespace shardcomm
