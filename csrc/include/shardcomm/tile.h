// The index arithmetic of a CopyPlan, for the CPU and CUDA executors alike: which elements of a
// segment a tile covers, where an element of a tile lies on either side, and how much of a run can
// be accessed in whole vectors.
//
//   segment, 5 x 6, gaps on one side:       the same without gaps is one row of 30:
//   tiles of at most 12 elements are        tiles of at most 16 elements are
//   whole rows, equally many                equal parts of it
//
//   | 0 0 0 0 0 0 |                         | 0 0 0 .. 0 0 | 1 1 1 .. 1 1 |
//   | 0 0 0 0 0 0 |
//   | 1 1 1 1 1 1 |
//   | 1 1 1 1 1 1 |
//   | 2 2 2 2 2 2 |
#pragma once

#include <cstdint>

#include "shardcomm/copy_plan.h"

#ifdef __CUDACC__
#define SHARDCOMM_HOST_DEVICE __host__ __device__
#else
#define SHARDCOMM_HOST_DEVICE
#endif

namespace shardcomm {

// Rows are cut at multiples of this many elements, so that every piece of an aligned row is
// aligned, too.
constexpr std::int64_t kCutElements = 128;

SHARDCOMM_HOST_DEVICE constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}

SHARDCOMM_HOST_DEVICE constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0);
}

// A segment whose rows follow one another without gaps, on both sides, becomes one long row. A
// source of zeros never has gaps.
SHARDCOMM_HOST_DEVICE constexpr Segment collapse(Segment segment) {
  if (segment.src == Segment::kZeros) {
    segment.src_offset = 0;
    segment.src_pitch = segment.cols;
  }
  if (segment.rows > 1 && segment.src_pitch == segment.cols && segment.dst_pitch == segment.cols) {
    segment.cols *= segment.rows;
    segment.rows = 1;
    segment.src_pitch = segment.dst_pitch = segment.cols;
  }
  return segment;
}

// How a (collapsed) segment is cut: into tiles of `rows` x `cols`. The last tiles in each direction
// may be smaller.
struct TileGrid {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t tiles_per_row = 0;
  std::int64_t tiles = 0;
};

// `tile_elements`: the most a tile may have, a multiple of kCutElements.
SHARDCOMM_HOST_DEVICE constexpr TileGrid tile_grid(const Segment& segment,
                                                   std::int64_t tile_elements) {
  TileGrid grid;
  if (segment.rows == 0 || segment.cols == 0) return grid;
  grid.tiles_per_row = divide_up(segment.cols, tile_elements);
  grid.cols = segment.cols;
  if (grid.tiles_per_row > 1) {
    const std::int64_t equal_share = divide_up(segment.cols, grid.tiles_per_row);
    grid.cols = divide_up(equal_share, kCutElements) * kCutElements;
    grid.tiles_per_row = divide_up(segment.cols, grid.cols);
  }
  const std::int64_t most_rows = grid.tiles_per_row > 1 ? 1 : tile_elements / grid.cols;
  grid.rows = divide_up(segment.rows, divide_up(segment.rows, most_rows));
  grid.tiles = divide_up(segment.rows, grid.rows) * grid.tiles_per_row;
  return grid;
}

SHARDCOMM_HOST_DEVICE constexpr Tile tile_of(const Segment& segment, const TileGrid& grid,
                                             std::int64_t index) {
  const std::int64_t row = index / grid.tiles_per_row * grid.rows;
  const std::int64_t col = index % grid.tiles_per_row * grid.cols;
  Tile tile = segment;
  tile.src_offset += row * segment.src_pitch + col;
  tile.dst_offset += row * segment.dst_pitch + col;
  tile.rows = smaller(grid.rows, segment.rows - row);
  tile.cols = smaller(grid.cols, segment.cols - col);
  return tile;
}

// Where element (row, col) of a tile lies in its operands, in elements.
SHARDCOMM_HOST_DEVICE constexpr std::int64_t src_index(const Tile& tile, std::int64_t row,
                                                       std::int64_t col) {
  return tile.src_offset + row * tile.src_pitch + col;
}

SHARDCOMM_HOST_DEVICE constexpr std::int64_t dst_index(const Tile& tile, std::int64_t row,
                                                       std::int64_t col) {
  return tile.dst_offset + row * tile.dst_pitch + col;
}

// A run of elements, seen as a `head` of single elements up to the first vector boundary, a `body`
// of whole aligned vectors, and a `tail` of single elements. All three count elements.
struct VectorSpan {
  std::int64_t head = 0;
  std::int64_t body = 0;
  std::int64_t tail = 0;
};

// `address` and `vector_bytes` must be multiples of `item_bytes`.
SHARDCOMM_HOST_DEVICE constexpr VectorSpan vector_span(std::uintptr_t address, std::int64_t count,
                                                       std::int64_t item_bytes,
                                                       std::int64_t vector_bytes) {
  const std::int64_t past_boundary =
      static_cast<std::int64_t>(address % static_cast<std::uintptr_t>(vector_bytes));
  const std::int64_t head_bytes = past_boundary == 0 ? 0 : vector_bytes - past_boundary;
  VectorSpan span;
  span.head = smaller(count, head_bytes / item_bytes);
  span.tail = (count - span.head) % (vector_bytes / item_bytes);
  span.body = count - span.head - span.tail;
  return span;
}

}  // namespace shardcomm
