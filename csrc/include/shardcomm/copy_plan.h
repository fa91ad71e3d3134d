// A CopyPlan says which rectangles move where. It is compiled once, from segments into tiles of
// equal work, and is executed every step with fresh pointers.
#pragma once

#include <cstdint>
#include <vector>

#include "shardcomm/dtype.h"

namespace shardcomm {

// Copies `rows` x `cols` elements from source operand `src` to destination operand `dst`. Offsets
// and pitches (the distance from one row to the next) count elements of their own side's dtype. A
// destination operand is a tensor, or a rank's memory. `src` = kZeros writes zeros: into gaps
// between parameters, and for gradients that do not exist.
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

// A piece of one segment, which one worker (CPU thread, CUDA block, Triton program) copies on its
// own. It has the fields of a Segment, and executors need not search anything.
using Tile = Segment;

class CopyPlan {
 public:
  static constexpr std::int64_t kTileElements = 16384;  // most elements of a tile on a CPU

  // Throws std::invalid_argument for negative sizes, a pitch shorter than a row (rows would
  // overlap), an extent past 2^63, or a pair of dtypes without conversion (f32, bf16 and f16
  // convert; other dtypes only copy to themselves).
  CopyPlan(std::vector<Segment> segments, DType src_dtype, DType dst_dtype);

  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<Tile>& tiles() const { return tiles_; }
  // The same work in tiles of at most `tile_elements`, a multiple of kCutElements (tile.h).
  std::vector<Tile> cut(std::int64_t tile_elements) const;
  DType src_dtype() const { return src_dtype_; }
  DType dst_dtype() const { return dst_dtype_; }
  // How many elements each operand must have: 1 + the largest index that the plan reads or writes
  // in it.
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
// Rounding is to nearest even, and results are the same bits on every processor, but for NaN: a NaN
// stays one, and its sign and payload may become others. Where nothing is converted, scaled or
// added, bits are copied as they are. For dtypes without conversion, scale must be 1 and accumulate
// false.
struct CopyOptions {
  float scale = 1.0f;
  bool accumulate = false;
  // A flag on the destinations' device, which is set to 1 if an element that was written is NaN or
  // Inf, and otherwise left as it is. Only for dtypes with conversion. Null: nobody asks.
  std::int32_t* nonfinite = nullptr;
};

// Throws std::invalid_argument for options that the plan's dtypes do not allow.
void check_options(const CopyPlan& plan, const CopyOptions& options);

// The CPU executor. `sources` and `destinations` hold plan.num_sources() and
// plan.num_destinations() pointers, each aligned to its element size. A null source writes zeros
// or, with `accumulate`, leaves the destination as it is. Sources and destinations must not
// overlap. Small plans run on fewer threads than given. Throws as check_options does, and for
// threads < 1.
void copy_cpu(const CopyPlan& plan, const void* const* sources, void* const* destinations,
              const CopyOptions& options, int threads = 1);

}  // namespace shardcomm
