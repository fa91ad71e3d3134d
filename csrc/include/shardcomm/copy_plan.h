// A CopyPlan says which rectangles move where. It is compiled once (segments -> equal-work tiles)
// and executed every step with fresh pointers.
#pragma once

#include <cstdint>
#include <vector>

#include "shardcomm/dtype.h"

namespace shardcomm {

// `rows` x `cols` elements from source operand `src` to destination operand `dst`. Offsets and
// pitches (the distance from one row to the next) are in elements of that side's dtype. A
// destination operand is a tensor, or a rank's memory. `src` = kZeros writes zeros (gaps between
// parameters, gradients that do not exist).
struct Segment {
  static constexpr std::int32_t kZeros = -1;
  std::int32_t src = 0;
  std::int32_t dst = 0;
  std::int64_t src_offset = 0;
  std::int64_t src_pitch = 0;
  std::int64_t dst_offset = 0;
  std::int64_t dst_pitch = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

// A piece of one segment that one worker (CPU thread, CUDA block, Triton program) copies on its
// own. It is resolved: executors do no search. Same fields as a Segment.
using Tile = Segment;

class CopyPlan {
 public:
  static constexpr std::int64_t kTileElements = 16384;  // most elements of a tile on a CPU

  // Throws std::invalid_argument for negative sizes, a pitch shorter than a row (so that rows would
  // overlap), an extent past 2^63, or a dtype pair that has no conversion (f32, bf16, f16 convert;
  // others only copy to themselves).
  CopyPlan(std::vector<Segment> segments, DType src_dtype, DType dst_dtype);

  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<Tile>& tiles() const { return tiles_; }
  // The same work in tiles of at most `tile_elements`, a multiple of kCutElements (tile.h).
  std::vector<Tile> cut(std::int64_t tile_elements) const;
  DType src_dtype() const { return src_dtype_; }
  DType dst_dtype() const { return dst_dtype_; }
  // How many elements each operand must have: 1 + the largest index the plan reads or writes there.
  const std::vector<std::int64_t>& src_extents() const { return src_extents_; }
  const std::vector<std::int64_t>& dst_extents() const { return dst_extents_; }
  std::int32_t num_sources() const { return static_cast<std::int32_t>(src_extents_.size()); }
  std::int32_t num_destinations() const { return static_cast<std::int32_t>(dst_extents_.size()); }
  std::int64_t elements() const { return elements_; }

 private:
  std::vector<Segment> segments_;
  std::vector<Tile> tiles_;
  DType src_dtype_;
  DType dst_dtype_;
  std::vector<std::int64_t> src_extents_;
  std::vector<std::int64_t> dst_extents_;
  std::int64_t elements_ = 0;
};

// dst = convert(scale * src)            (accumulate = false)
// dst = convert(dst + scale * src)      (accumulate = true; computed in float)
// Rounding is to nearest even, NaN stays NaN. scale must be 1 and accumulate false for types
// without conversion.
struct CopyOptions {
  float scale = 1.0f;
  bool accumulate = false;
  // A flag on the destinations' device; null: nobody asks. Set to 1 if an element that was written
  // is NaN or Inf, otherwise left as it is. Only for types with conversion.
  std::int32_t* nonfinite = nullptr;
};

// Throws std::invalid_argument for options that the plan's dtypes do not allow.
void check_options(const CopyPlan& plan, const CopyOptions& options);

// CPU executor. `sources` and `destinations` hold plan.num_sources() and plan.num_destinations()
// pointers, each aligned to its element size. A null source writes zeros (accumulate: leaves the
// destination as it is). Sources and destinations must not overlap. Small plans run on fewer
// threads than given. Throws as check_options does, and for threads < 1.
void copy_cpu(const CopyPlan& plan, const void* const* sources, void* const* destinations,
              const CopyOptions& options, int threads = 1);

}  // namespace shardcomm
