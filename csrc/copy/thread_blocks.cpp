#include "copy/thread_blocks.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "copy/blocks.h"

namespace shardcomm {
namespace {

void check_launch(std::int64_t teams, std::size_t most_segments) {
  if (teams < 1 || most_segments < 1 || most_segments > kMostBlockSegments) {
    throw std::invalid_argument("a launch has at least one team, and 1 to " +
                                std::to_string(kMostBlockSegments) + " segments");
  }
}

// Calls visit(finder, block) for the blocks of each team.
template <class Segment, class Visit>
void walk_teams(const std::vector<Segment>& segments, std::int64_t blocks, std::int64_t teams,
                std::size_t most_segments, const Visit& visit) {
  visit_block_launches(
      segments, blocks, most_segments,
      [&](std::size_t begin, std::size_t end, std::int64_t first, std::int64_t last) {
        const auto table = table_of<kMostBlockSegments>(segments, begin, end, first, last);
        for (std::int64_t team = 0; team < teams; ++team) {
          SegmentFinder<Segment, kMostBlockSegments> finder(table);
          for (std::int64_t at = first + team; at < last; at += teams) visit(finder.find(at), at);
        }
      });
}

template <class Code, bool kStochastic, class Src>
void walk_team(const EncodedSegment* segment, std::int64_t at, std::uint64_t seed,
               const WirePart& part, BlockTally& tally) {
  const int lanes = part.block / kLaneElements;
  Lane<Src> elements[kMostLanes];
  std::uint32_t largest = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    elements[lane] = read_lane<Src>(segment, at, part.block, lane);
    largest = std::max(largest, largest_of(elements[lane]));
  }
  const std::uint32_t scale = scale_of<Code>(largest);
  std::uint32_t error = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    error = std::max(error,
                     encode_lane<Code, kStochastic>(elements[lane], scale, seed, part, at, lane));
  }
  part.scales[at] = static_cast<std::uint8_t>(scale);
  if (is_in(segment, at, part.block)) {
    tally.add<Code>(largest, scale, float_of_bits(error), kStochastic);
  }
}

}  // namespace

void walk_encode(const BlockFormat& format, const std::vector<EncodedSegment>& segments,
                 DType dtype, void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                 std::int64_t teams, std::size_t most_segments) {
  check_wire(format, wire, bytes, dtype);
  check_launch(teams, most_segments);
  const std::int64_t blocks = wire_blocks(format, bytes);
  const WirePart part = part_of(format, wire, bytes);
  BlockTally tally;
  visit_block_kernel(format.code, dtype, [&](auto code, auto src) {
    using Code = decltype(code);
    using Src = decltype(src);
    walk_teams(sorted(format, segments, blocks), blocks, teams, most_segments,
               [&](const EncodedSegment* segment, std::int64_t at) {
                 if (format.rounding == Rounding::stochastic) {
                   walk_team<Code, true, Src>(segment, at, seed, part, tally);
                 } else {
                   walk_team<Code, false, Src>(segment, at, seed, part, tally);
                 }
               });
  });
  for (std::uint8_t* rest = part.scales + blocks; rest != part.codes + bytes; ++rest) *rest = 0;
  report(tally, stats);
}

void walk_decode(const BlockFormat& format, const void* wire, std::int64_t bytes,
                 const std::vector<DecodedSegment>& segments, DType dtype, std::int64_t teams,
                 std::size_t most_segments) {
  check_wire(format, wire, bytes, dtype);
  check_launch(teams, most_segments);
  const std::int64_t blocks = wire_blocks(format, bytes);
  const WirePart part = part_of(format, wire, bytes);
  visit_block_kernel(format.code, dtype, [&](auto code, auto dst) {
    walk_teams(sorted(format, segments, blocks), blocks, teams, most_segments,
               [&](const DecodedSegment* segment, std::int64_t at) {
                 for (int lane = 0; lane < format.block / kLaneElements; ++lane) {
                   decode_lane<decltype(code), decltype(dst)>(segment, part, at, lane);
                 }
               });
  });
}

void walk_decode_sum(const BlockFormat& format, const void* wires, int parts, void* dst,
                     std::int64_t count, const Epilogue& epilogue, std::int64_t teams) {
  check_launch(teams, 1);
  const SummedParts sum = summed_parts(format, wires, parts, dst, count, epilogue);
  visit_block_kernel(format.code, epilogue.dtype, [&](auto code, auto to) {
    Watch<decltype(to)> side;
    for (std::int64_t team = 0; team < teams; ++team) {
      for (std::int64_t at = team; at < divide_up(count, format.block); at += teams) {
        for (int lane = 0; lane < format.block / kLaneElements; ++lane) {
          sum_lane<decltype(code), decltype(to)>(sum, at, lane, side);
        }
      }
    }
    report(side, epilogue.nonfinite);
  });
}

SummedParts summed_parts(const BlockFormat& format, const void* wires, int parts, void* dst,
                         std::int64_t count, const Epilogue& epilogue) {
  check_parts(format, wires, parts, count, epilogue);
  const std::int64_t stride = wire_bytes(format, count);
  return {part_of(format, wires, stride),
          parts,
          stride,
          dst,
          count,
          epilogue.scale,
          epilogue.accumulate,
          epilogue.nonfinite};
}

}  // namespace shardcomm
