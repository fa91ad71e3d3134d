// In what a reduce-scatter sends partial sums from host to host, if not in the float32 in which
// they were taken: fewer bytes, and an error whose bound is known.
#pragma once

#include <optional>

#include "shardcomm/blocks.h"

namespace shardcomm {

struct Coding {
  std::optional<BlockFormat> blocks;  // nothing: bf16, rounded to nearest even
  // Grows with what coding costs; null: nobody asks. In bf16 a block is one element, whose bound is
  // max(|element| * 2^-8, 2^-134), and one that is no finite bf16 is flagged, and stays what it is.
  BlockStats* stats = nullptr;
};

}  // namespace shardcomm
