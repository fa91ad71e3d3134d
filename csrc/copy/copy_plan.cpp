#include "shardcomm/copy_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

[[noreturn]] void refuse(std::size_t index, const std::string& reason) {
  throw std::invalid_argument("segment " + std::to_string(index) + ": " + reason);
}

void require_not_negative(std::size_t index, const char* field, std::int64_t value) {
  if (value < 0) {
    refuse(index, std::string(field) + " is " + std::to_string(value) + ", it must be at least 0");
  }
}

// 1 + the index of the last element of the rectangle.
std::int64_t extent(std::size_t index, const char* side, const Segment& segment,
                    std::int64_t offset, std::int64_t pitch) {
  if (segment.rows == 0 || segment.cols == 0) return 0;
  if (segment.rows > 1 && pitch < segment.cols) {
    refuse(index,
           std::string(side) + "_pitch is " + std::to_string(pitch) +
               ", it must be at least the row length, cols = " + std::to_string(segment.cols));
  }
  std::int64_t end = 0;
  if (__builtin_mul_overflow(segment.rows - 1, pitch, &end) ||
      __builtin_add_overflow(end, offset, &end) ||
      __builtin_add_overflow(end, segment.cols, &end)) {
    refuse(index, std::string("its ") + side + " extent does not fit into 63 bits");
  }
  return end;
}

// So that a wrong number does not take all memory, and no number of bytes overflows.
constexpr std::int32_t kMostPointers = 1 << 20;
constexpr std::int64_t kMostElements = std::int64_t{1} << 60;

void require_operand(std::size_t index, const char* field, std::int32_t value) {
  if (value >= kMostPointers) {
    refuse(index, std::string(field) + " is " + std::to_string(value) + ", it must be below " +
                      std::to_string(kMostPointers));
  }
}

void widen(std::vector<std::int64_t>& extents, std::int32_t operand, std::int64_t extent) {
  const auto index = static_cast<std::size_t>(operand);
  if (extents.size() <= index) extents.resize(index + 1, 0);
  extents[index] = std::max(extents[index], extent);
}

}  // namespace

CopyPlan::CopyPlan(std::vector<Segment> segments, DType src_dtype, DType dst_dtype)
    : segments_(std::move(segments)), src_dtype_(src_dtype), dst_dtype_(dst_dtype) {
  if (src_dtype != dst_dtype && !(is_convertible(src_dtype) && is_convertible(dst_dtype))) {
    throw std::invalid_argument(std::string("no conversion from ") + name(src_dtype) + " to " +
                                name(dst_dtype) +
                                ": f32, bf16 and f16 convert, others only copy to themselves");
  }
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.src < Segment::kZeros) {
      refuse(i, "src is " + std::to_string(segment.src) +
                    ", it must be an operand's index or -1 for zeros");
    }
    require_not_negative(i, "dst", segment.dst);
    require_operand(i, "src", segment.src);
    require_operand(i, "dst", segment.dst);
    require_not_negative(i, "src_offset", segment.src_offset);
    require_not_negative(i, "src_pitch", segment.src_pitch);
    require_not_negative(i, "dst_offset", segment.dst_offset);
    require_not_negative(i, "dst_pitch", segment.dst_pitch);
    require_not_negative(i, "rows", segment.rows);
    require_not_negative(i, "cols", segment.cols);
    if (segment.src != Segment::kZeros) {
      widen(src_extents_, segment.src,
            extent(i, "src", segment, segment.src_offset, segment.src_pitch));
    }
    widen(dst_extents_, segment.dst,
          extent(i, "dst", segment, segment.dst_offset, segment.dst_pitch));
    std::int64_t elements = 0;
    if (__builtin_mul_overflow(segment.rows, segment.cols, &elements) ||
        elements > kMostElements - elements_) {
      refuse(i, "the segments up to this one have more than 2^60 elements");
    }
    elements_ += elements;
  }
  tiles_ = cut(kTileElements);
}

std::vector<Tile> CopyPlan::cut(std::int64_t tile_elements) const {
  std::int64_t count = 0;
  for (const Segment& segment : segments_) {
    count += tile_grid(collapse(segment), tile_elements).tiles;
  }
  std::vector<Tile> tiles;
  tiles.reserve(static_cast<std::size_t>(count));
  for (const Segment& segment : segments_) {
    const Segment rectangle = collapse(segment);
    const TileGrid grid = tile_grid(rectangle, tile_elements);
    for (std::int64_t t = 0; t < grid.tiles; ++t) tiles.push_back(tile_of(rectangle, grid, t));
  }
  return tiles;
}

}  // namespace shardcomm
