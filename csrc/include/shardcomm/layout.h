// Where every element of a unit's parameters lives: its offset in the flat buffer, and on which
// rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardcomm {

// A parameter as it is stored, with its shard dim outermost: `rows` rows of `row_elements` elements
// each. A shard boundary may fall between granules of `granule_rows` rows. For granularity
// `element` it may fall anywhere; callers then pass rows = numel and row_elements = 1.
struct ParamExtent {
  std::int64_t rows = 0;
  std::int64_t row_elements = 1;
  // How many rows stay together. If there are not more rows, the whole parameter has one owner.
  std::int64_t granule_rows = 1;
};

struct LayoutResult {
  std::int64_t shard_elements = 0;      // S, the same on every rank
  std::vector<std::int64_t> offsets;    // each parameter's place in the flat buffer, in elements
  std::vector<std::int32_t> forced_by;  // parameters that force S to be a multiple of their granule
};

// Finds offsets and the smallest shard length S that the search can find, such that every parameter
// is one contiguous range, starts at a multiple of `align_elements` and overlaps no other, and no
// boundary k*S falls strictly inside a granule. S is a multiple of `align_elements`. Throws
// std::invalid_argument for sizes < 0, world_size < 1 and align_elements < 1.
LayoutResult plan_layout(const std::vector<ParamExtent>& params, int world_size,
                         std::int64_t align_elements);

}  // namespace shardcomm
