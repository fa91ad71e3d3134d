// Index arithmetic of a CopyPlan, shared by the executors of every device: which tiles a segment falls into, and
// where the rows of a tile lie.
#pragma once

#include <cstdint>

#include "shardcomm/copy_plan.h"

#ifdef __CUDACC__
#define SHARDCOMM_HOST_DEVICE __host__ __device__
#else
#define SHARDCOMM_HOST_DEVICE
#endif

namespace shardcomm::tile {

// A segment whose rows follow each other without a hole on both sides is one long row.
SHARDCOMM_HOST_DEVICE constexpr bool is_contiguous(const Segment& s) {
  const bool src_dense = s.src == Segment::kZeros || s.src_pitch == s.cols;
  return s.rows <= 1 || (src_dense && s.dst_pitch == s.cols);
}

SHARDCOMM_HOST_DEVICE constexpr Segment collapse(Segment s) {
  if (is_contiguous(s)) {
    s.cols *= s.rows;
    s.rows = s.cols > 0 ? 1 : 0;
  }
  return s;
}

// Tiles of a (collapsed) segment form a grid: bands of whole rows, each cut into runs of columns. A row of up to
// kTileElements is not cut; shorter rows share a tile.
struct Grid {
  std::int64_t rows_per_tile;
  std::int64_t cols_per_tile;
  std::int64_t bands;
  std::int64_t runs;
};

SHARDCOMM_HOST_DEVICE constexpr Grid grid_of(const Segment& s) {
  if (s.rows == 0 || s.cols == 0) return {0, 0, 0, 0};
  const std::int64_t limit = CopyPlan::kTileElements;
  const std::int64_t cols = s.cols < limit ? s.cols : limit;
  const std::int64_t fit = s.cols < limit ? limit / s.cols : 1;
  const std::int64_t rows = fit < s.rows ? fit : s.rows;
  return {rows, cols, (s.rows + rows - 1) / rows, (s.cols + cols - 1) / cols};
}

// Tile `index` of the grid, in row-major order.
SHARDCOMM_HOST_DEVICE constexpr Tile tile_of(const Segment& s, const Grid& grid,
                                             std::int64_t index) {
  const std::int64_t row = index / grid.runs * grid.rows_per_tile;
  const std::int64_t col = index % grid.runs * grid.cols_per_tile;
  Tile tile = s;
  tile.src_offset += row * s.src_pitch + col;
  tile.dst_offset += row * s.dst_pitch + col;
  tile.rows = s.rows - row < grid.rows_per_tile ? s.rows - row : grid.rows_per_tile;
  tile.cols = s.cols - col < grid.cols_per_tile ? s.cols - col : grid.cols_per_tile;
  return tile;
}

}  // namespace shardcomm::tile
