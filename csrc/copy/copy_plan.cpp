#include "shardcomm/copy_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "shardcomm/tile.h"

namespace shardcomm {
namespace {

bool converts(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

void check(const Segment& s, std::size_t index) {
  const auto fail = [index](const std::string& what) {
    throw std::invalid_argument("CopyPlan: segment " + std::to_string(index) + ": " + what);
  };
  if (s.rows < 0 || s.cols < 0) {
    fail("rows x cols is " + std::to_string(s.rows) + " x " + std::to_string(s.cols) +
         "; both must be at least 0");
  }
  if (s.src < Segment::kZeros || s.dst < 0) {
    fail("src is " + std::to_string(s.src) + ", dst is " + std::to_string(s.dst) +
         "; operands count from 0 (src -1: zeros)");
  }
  if (s.src_offset < 0 || s.dst_offset < 0) fail("offsets must be at least 0");
  if (s.rows > 1 && s.dst_pitch < s.cols) {
    fail("dst_pitch is " + std::to_string(s.dst_pitch) + ", shorter than a row of " +
         std::to_string(s.cols) + ": rows would overlap");
  }
  if (s.rows > 1 && s.src != Segment::kZeros && s.src_pitch < 0) {
    fail("src_pitch is " + std::to_string(s.src_pitch) + "; it must be at least 0");
  }
}

}  // namespace

CopyPlan::CopyPlan(std::vector<Segment> segments, DType src_dtype, DType dst_dtype)
    : segments_(std::move(segments)), src_dtype_(src_dtype), dst_dtype_(dst_dtype) {
  if (src_dtype != dst_dtype && !(converts(src_dtype) && converts(dst_dtype))) {
    throw std::invalid_argument(std::string("CopyPlan: no conversion from ") + name(src_dtype) +
                                " to " + name(dst_dtype) +
                                "; f32, bf16 and f16 convert, other dtypes copy to themselves");
  }
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    check(segments_[i], i);
    const Segment segment = tile::collapse(segments_[i]);
    const tile::Grid grid = tile::grid_of(segment);
    for (std::int64_t t = 0; t < grid.bands * grid.runs; ++t) {
      tiles_.push_back(tile::tile_of(segment, grid, t));
    }
    num_sources_ = std::max(num_sources_, segment.src + 1);
    num_destinations_ = std::max(num_destinations_, segment.dst + 1);
    elements_ += segment.rows * segment.cols;
  }
}

}  // namespace shardcomm
