#include <cstdint>
#include <vector>

#include "copy/blocks.h"
#include "copy/blocks_cuda.h"
#include "copy/thread_blocks.h"
#include "cuda/runtime.h"

namespace shardcomm {
namespace {

constexpr int kThreads = 256;

// This thread's place among the teams of a launch.
struct TeamPlace {
  int lane;
  std::int64_t team;
  std::int64_t teams;
};

__device__ inline TeamPlace place_in_teams(int block) {
  const int lanes = block / kLaneElements;
  const auto thread = static_cast<std::uint32_t>(threadIdx.x);
  const std::int64_t teams_each = kThreads / lanes;
  return {static_cast<int>(thread % lanes), blockIdx.x * teams_each + thread / lanes,
          gridDim.x * teams_each};
}

// The maximum over the lanes of a team, which are in one warp. Other teams of the warp may have
// left their loops.
__device__ inline std::uint32_t team_max(std::uint32_t value, int lanes) {
  const std::uint32_t in_warp = threadIdx.x % 32;
  const std::uint32_t mask = ((1u << lanes) - 1) << (in_warp / lanes * lanes);
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const std::uint32_t other = __shfl_xor_sync(mask, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

__device__ inline void report_of_warp(const BlockTally& tally, BlockStats* stats) {
  if (stats == nullptr) return;
  const std::uint32_t bound = __reduce_max_sync(0xffffffffu, tally.bound);
  const std::uint32_t seen = __reduce_max_sync(0xffffffffu, tally.seen);
  const int flagged = __reduce_add_sync(0xffffffffu, tally.flagged);
  if (threadIdx.x % 32 != 0) return;
  atomicMax(&stats->bound_bits, bound);
  atomicMax(&stats->seen_bits, seen);
  if (flagged != 0) atomicAdd(&stats->flagged, flagged);
}

// `rest`: bytes behind the scales of the wire's last block, fewer than a block of threads has.
template <class Code, bool kStochastic, class Src, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    encode_blocks(const __grid_constant__ SegmentTable<EncodedSegment, kCapacity> table,
                  const WirePart part, std::uint64_t seed, BlockStats* stats, std::uint8_t* rest,
                  int rest_bytes) {
  const int lanes = part.block / kLaneElements;
  const TeamPlace place = place_in_teams(part.block);
  SegmentFinder<EncodedSegment, kCapacity> finder(table);
  BlockTally tally;
  for (std::int64_t at = table.first + place.team; at < table.last; at += place.teams) {
    const EncodedSegment* segment = finder.find(at);
    const Lane<Src> elements = read_lane<Src>(segment, at, part.block, place.lane);
    const std::uint32_t largest = team_max(largest_of(elements), lanes);
    const std::uint32_t scale = scale_of<Code>(largest);
    const std::uint32_t error = team_max(
        encode_lane<Code, kStochastic>(elements, scale, seed, part, at, place.lane), lanes);
    if (place.lane != 0) continue;
    part.scales[at] = static_cast<std::uint8_t>(scale);
    if (is_in(segment, at, part.block)) {
      tally.add<Code>(largest, scale, float_of_bits(error), kStochastic);
    }
  }
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < rest_bytes) rest[threadIdx.x] = 0;
  report_of_warp(tally, stats);
}

template <class Code, class Dst, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    decode_blocks(const __grid_constant__ SegmentTable<DecodedSegment, kCapacity> table,
                  const WirePart part) {
  const TeamPlace place = place_in_teams(part.block);
  SegmentFinder<DecodedSegment, kCapacity> finder(table);
  for (std::int64_t at = table.first + place.team; at < table.last; at += place.teams) {
    decode_lane<Code, Dst>(finder.find(at), part, at, place.lane);
  }
}

template <class Code, class Dst>
__global__ void __launch_bounds__(kThreads) sum_blocks(const SummedParts sum) {
  const TeamPlace place = place_in_teams(sum.first.block);
  const std::int64_t blocks = divide_up(sum.count, sum.first.block);
  Watch<Dst> side;
  for (std::int64_t at = place.team; at < blocks; at += place.teams) {
    sum_lane<Code, Dst>(sum, at, place.lane, side);
  }
  report_of_block(side, sum.nonfinite);
}

// One block of the wire a team before any has two: small parts use all processors.
template <class Kernel>
int grid_for(Kernel kernel, std::int64_t blocks, int block) {
  const std::int64_t teams_each = kThreads / (block / kLaneElements);
  return static_cast<int>(
      smaller(divide_up(blocks, teams_each), resident_blocks(kernel, kThreads)));
}

// Calls launch(table) for each table of segments.
template <class Segment, class Launch>
void launch_all(const std::vector<Segment>& segments, std::int64_t blocks, const Launch& launch) {
  visit_block_launches(
      segments, blocks, kMostBlockSegments,
      [&](std::size_t begin, std::size_t end, std::int64_t first, std::int64_t last) {
        if (end - begin <= kFewBlockSegments) {
          launch(table_of<kFewBlockSegments>(segments, begin, end, first, last));
        } else {
          launch(table_of<kMostBlockSegments>(segments, begin, end, first, last));
        }
      });
}

template <class Code, bool kStochastic, class Src>
struct EncodeLaunch {
  WirePart part;
  std::int64_t bytes;
  std::int64_t blocks;
  std::uint64_t seed;
  BlockStats* stats;
  NativeStream stream;

  template <int kCapacity>
  void operator()(const SegmentTable<EncodedSegment, kCapacity>& table) const {
    const auto kernel = encode_blocks<Code, kStochastic, Src, kCapacity>;
    std::uint8_t* rest = part.scales + blocks;
    const int rest_bytes = table.last == blocks ? static_cast<int>(part.codes + bytes - rest) : 0;
    const int grid = grid_for(kernel, table.last - table.first, part.block);
    launch_kernel(kernel, grid, kThreads, stream, table, part, seed, stats, rest, rest_bytes);
  }
};

template <class Code, class Dst>
struct DecodeLaunch {
  WirePart part;
  NativeStream stream;

  template <int kCapacity>
  void operator()(const SegmentTable<DecodedSegment, kCapacity>& table) const {
    const auto kernel = decode_blocks<Code, Dst, kCapacity>;
    const int grid = grid_for(kernel, table.last - table.first, part.block);
    launch_kernel(kernel, grid, kThreads, stream, table, part);
  }
};

}  // namespace

void encode_cuda(const BlockFormat& format, const std::vector<EncodedSegment>& segments,
                 DType dtype, void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                 NativeStream stream) {
  check_wire(format, wire, bytes, dtype);
  if (bytes == 0) return;
  const std::int64_t blocks = wire_blocks(format, bytes);
  const auto ordered = sorted(format, segments, blocks);
  const WirePart part = part_of(format, wire, bytes);
  visit_block_kernel(format.code, dtype, [&](auto code, auto src) {
    using Code = decltype(code);
    using Src = decltype(src);
    if (format.rounding == Rounding::stochastic) {
      launch_all(ordered, blocks,
                 EncodeLaunch<Code, true, Src>{part, bytes, blocks, seed, stats, stream});
    } else {
      launch_all(ordered, blocks,
                 EncodeLaunch<Code, false, Src>{part, bytes, blocks, seed, stats, stream});
    }
  });
}

void decode_cuda(const BlockFormat& format, const void* wire, std::int64_t bytes,
                 const std::vector<DecodedSegment>& segments, DType dtype, NativeStream stream) {
  check_wire(format, wire, bytes, dtype);
  const std::int64_t blocks = wire_blocks(format, bytes);
  const auto ordered = sorted(format, segments, blocks);
  if (ordered.empty()) return;
  visit_block_kernel(format.code, dtype, [&](auto code, auto dst) {
    launch_all(ordered, blocks,
               DecodeLaunch<decltype(code), decltype(dst)>{part_of(format, wire, bytes), stream});
  });
}

void decode_sum_cuda(const BlockFormat& format, const void* wires, int parts, void* dst,
                     std::int64_t count, const Epilogue& epilogue, NativeStream stream) {
  const SummedParts sum = summed_parts(format, wires, parts, dst, count, epilogue);
  if (count == 0) return;
  visit_block_kernel(format.code, epilogue.dtype, [&](auto code, auto to) {
    const auto kernel = sum_blocks<decltype(code), decltype(to)>;
    const int grid = grid_for(kernel, divide_up(count, format.block), format.block);
    launch_kernel(kernel, grid, kThreads, stream, sum);
  });
}

}  // namespace shardcomm
