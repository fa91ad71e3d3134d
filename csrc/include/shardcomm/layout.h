// Where every element of a unit's parameters lives: its offset in the flat buffer, and on which
// rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardcomm {

// A parameter as stored: `rows` granules-worth of outermost index, `row_elements` elements each
// (the shard dim is already outermost). A shard boundary may cut between granules of `granule_rows`
// rows, or, for granularity `element`, anywhere (callers pass rows = numel, row_elements = 1).
struct ParamExtent {
  std::int64_t rows = 0;
  std::int64_t row_elements = 1;
  std::int64_t granule_rows =
      1;  // rows that stay together; >= rows: the whole parameter has one owner
};

struct LayoutResult {
  std::int64_t shard_elements = 0;      // S: the same on every rank
  std::vector<std::int64_t> offsets;    // of each parameter in the flat buffer, in elements
  std::vector<std::int32_t> forced_by;  // parameters that force S to be a multiple of their granule
};

// The smallest shard length its search finds such that every parameter is one contiguous range that
// starts at a multiple of `align_elements`, ranges are disjoint, and no boundary k*S falls strictly
// inside a granule. S is a multiple of `align_elements`. Throws std::invalid_argument on sizes < 0,
// world_size < 1, align_elements < 1.
LayoutResult plan_layout(const std::vector<ParamExtent>& params, int world_size,
                         std::int64_t align_elements);

}  // namespace shardcomm
