// Rounding to bfloat16 that knows what it costs: csrc/include/shardcomm/coding.h says what it
// counts.
#pragma once

#include <cstdint>

#include "copy/element.h"
#include "shardcomm/blocks.h"

namespace shardcomm {

// To nearest even, as everywhere. `stats` may be null.
void round_to_bf16(const float* from, BFloat16* to, std::int64_t count, BlockStats* stats);

}  // namespace shardcomm
