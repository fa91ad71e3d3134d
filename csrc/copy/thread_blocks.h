// The bodies of the CUDA kernels of block formats: what one thread does. Plain C++, so that a CPU
// test can walk every thread of a launch through them.
//
//   block of 32    | 0 .. 7 | 8 .. 15 | 16 .. 23 | 24 .. 31 |
//   its team         lane 0    lane 1     lane 2     lane 3
//
// A team of neighbouring threads has a block of the wire at a time, each lane 8 of its elements:
// 16 or 32 bytes on one side, 8 codes on the other. Teams take blocks in turn. To encode, lanes
// have two steps, with a maximum over the team between them: what is the largest element, and what
// are the codes. On a GPU the team's maximum is an exchange of registers.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "copy/block_element.h"
#include "copy/nonfinite.h"
#include "copy/philox.h"
#include "copy/reduce_element.h"
#include "copy/thread_copy.h"
#include "shardcomm/blocks.h"

namespace shardcomm {

constexpr int kLaneElements = 8;
constexpr int kMostLanes = 128 / kLaneElements;
// The segments of one launch, which travel as kernel arguments: as with copy plans, few of them in
// a smaller kernel's.
constexpr int kFewBlockSegments = 40;
constexpr int kMostBlockSegments = 1300;

// Where a wire part has its codes and scales.
struct WirePart {
  std::uint8_t* codes;
  std::uint8_t* scales;
  int block;
};

// The blocks [first, last) of a wire part, and the segments in them, in their order.
template <class Segment, int kCapacity>
struct SegmentTable {
  Segment at[kCapacity];
  int count;
  std::int64_t first;
  std::int64_t last;
};

// Finds the segments of blocks.
template <class Segment, int kCapacity>
class SegmentFinder {
 public:
  SHARDCOMM_HOST_DEVICE explicit SegmentFinder(const SegmentTable<Segment, kCapacity>& table)
      : table_(table) {}
  // The last segment that does not begin behind `block`; null: there is none.
  SHARDCOMM_HOST_DEVICE const Segment* find(std::int64_t block) {
    if (block < begin_ || block >= end_) search(block);
    return index_ < 0 ? nullptr : &table_.at[index_];
  }

 private:
  SHARDCOMM_HOST_DEVICE void search(std::int64_t block) {
    int low = -1;
    int high = table_.count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (table_.at[middle].first_block <= block ? low : high) = middle;
    }
    index_ = low;
    begin_ = low < 0 ? 0 : table_.at[low].first_block;
    end_ = high == table_.count ? INT64_MAX : table_.at[high].first_block;
  }

  const SegmentTable<Segment, kCapacity>& table_;
  int index_ = -1;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
};

// How many of a lane's elements, from `begin` on, are among `count`.
SHARDCOMM_HOST_DEVICE inline int lane_count(std::int64_t begin, std::int64_t count) {
  if (begin >= count) return 0;
  return static_cast<int>(smaller(count - begin, kLaneElements));
}

// Eight codes on their way.
struct alignas(8) LaneCodes {
  std::uint32_t at[2];

  SHARDCOMM_HOST_DEVICE std::uint8_t code(int i) const {
    return static_cast<std::uint8_t>(at[i / 4] >> (8 * (i % 4)));
  }
};

SHARDCOMM_HOST_DEVICE inline LaneCodes load_codes(const std::uint8_t* codes) {
  return *reinterpret_cast<const LaneCodes*>(codes);
}

template <class T>
using Lane = Elements<T, kLaneElements>;

// The elements of a lane, of which there are `count`; zeros for the others.
template <class T>
SHARDCOMM_HOST_DEVICE inline Lane<T> load_lane(const T* from, int count) {
  if (count == kLaneElements && is_vector_aligned(from)) {
    return elements_of<T, kLaneElements>(load_words<T, kLaneElements>(from));
  }
  Lane<T> lane = {};
  for (int i = 0; i < kLaneElements; ++i) {
    if (i < count) lane.at[i] = from[i];
  }
  return lane;
}

template <class T>
SHARDCOMM_HOST_DEVICE inline void store_lane(T* to, const Lane<T>& lane, int count) {
  if (count == kLaneElements && is_vector_aligned(to)) return store_vector(to, lane);
  for (int i = 0; i < kLaneElements; ++i) {
    if (i < count) to[i] = lane.at[i];
  }
}

// ---- Encoding ----

// Step 1: a lane's elements; `segment` may be null, or end before the block does.
template <class Src>
SHARDCOMM_HOST_DEVICE inline Lane<Src> read_lane(const EncodedSegment* segment, std::int64_t at,
                                                 int block, int lane) {
  if (segment == nullptr) return {};
  const std::int64_t begin = (at - segment->first_block) * block + lane * kLaneElements;
  return load_lane(static_cast<const Src*>(segment->src) + begin,
                   lane_count(begin, segment->count));
}

// Whether a block has elements of a segment: only then does it count.
SHARDCOMM_HOST_DEVICE inline bool is_in(const EncodedSegment* segment, std::int64_t at, int block) {
  return segment != nullptr && (at - segment->first_block) * block < segment->count;
}

template <class Src>
SHARDCOMM_HOST_DEVICE inline std::uint32_t largest_of(const Lane<Src>& lane) {
  std::uint32_t largest = 0;
  for (const Src& element : lane.at) {
    const std::uint32_t bits = float_bits(load(element)) & kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <class Code, bool kStochastic, class Src, class Units>
SHARDCOMM_HOST_DEVICE inline float round_lane(const Lane<Src>& lane, const Units& units,
                                              std::uint64_t seed, std::int64_t first,
                                              LaneCodes& codes) {
  std::uint32_t error = 0;
  for (int quad = 0; quad < kLaneElements / 4; ++quad) {
    PhiloxWords random{};
    if constexpr (kStochastic) random = philox(seed, static_cast<std::uint64_t>(first) / 4 + quad);
    std::uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
      const RoundedElement rounded =
          Code::template round<kStochastic>(units(load(lane.at[4 * quad + i])), random.at[i]);
      word |= (rounded.code & 0xffu) << (8 * i);
      const std::uint32_t bits = float_bits(rounded.error) & kMagnitude;
      error = bits > error ? bits : error;
    }
    codes.at[quad] = word;
  }
  return float_of_bits(error);
}

// Step 2: writes a lane's codes, and returns its largest difference in units, as bits.
template <class Code, bool kStochastic, class Src>
SHARDCOMM_HOST_DEVICE inline std::uint32_t encode_lane(const Lane<Src>& elements,
                                                       std::uint32_t scale, std::uint64_t seed,
                                                       const WirePart& part, std::int64_t at,
                                                       int lane) {
  const std::int64_t first = at * part.block + lane * kLaneElements;
  LaneCodes codes{};
  float error = 0;
  if (scale >= kLeastPlainScale && scale != kNanScale) {
    error = round_lane<Code, kStochastic>(elements, PlainUnits<Code>(scale), seed, first, codes);
  } else if (scale != kNanScale) {
    error = round_lane<Code, kStochastic>(elements, TinyUnits<Code>(scale), seed, first, codes);
  }
  *reinterpret_cast<LaneCodes*>(part.codes + first) = codes;
  return float_bits(error);
}

// ---- Decoding ----

// The values of a lane's codes.
template <class Code>
SHARDCOMM_HOST_DEVICE inline Lane<float> lane_values(const LaneCodes& codes, std::uint32_t scale) {
  Lane<float> values;
  if (scale >= kLeastPlainScale) {
    const PlainValues<Code> value_of(scale);
    for (int i = 0; i < kLaneElements; ++i) values.at[i] = value_of(Code::value(codes.code(i)));
  } else {
    const TinyValues<Code> value_of(scale);
    for (int i = 0; i < kLaneElements; ++i) values.at[i] = value_of(Code::value(codes.code(i)));
  }
  return values;
}

template <class Code, class Dst>
SHARDCOMM_HOST_DEVICE inline void decode_lane(const DecodedSegment* segment, const WirePart& part,
                                              std::int64_t at, int lane) {
  if (segment == nullptr) return;
  const std::int64_t begin = (at - segment->first_block) * part.block + lane * kLaneElements;
  const int count = lane_count(begin, segment->count);
  if (count == 0) return;
  const LaneCodes codes = load_codes(part.codes + at * part.block + lane * kLaneElements);
  const Lane<float> values = lane_values<Code>(codes, part.scales[at]);
  Lane<Dst> stored;
  for (int i = 0; i < kLaneElements; ++i) store(stored.at[i], values.at[i]);
  store_lane(static_cast<Dst*>(segment->dst) + begin, stored, count);
}

struct SummedParts {
  WirePart first;
  int parts;
  std::int64_t stride;  // bytes from one part to the next
  void* dst;
  std::int64_t count;
  float scale;
  bool accumulate;
  std::int32_t* nonfinite;
};

// Calls `body` with each of the constants `k`: what they index is in registers. A loop that the
// compiler leaves a loop has it in memory.
template <class Body, int... k>
SHARDCOMM_HOST_DEVICE inline void each_of(std::integer_sequence<int, k...>, const Body& body) {
  (body(std::integral_constant<int, k>{}), ...);
}

// Parts that a thread reads at once.
constexpr int kBatchParts = 4;

template <class Code, class Dst, class Side>
SHARDCOMM_HOST_DEVICE inline void sum_lane(const SummedParts& sum, std::int64_t at, int lane,
                                           Side& side) {
  const int block = sum.first.block;
  const std::int64_t begin = at * block + lane * kLaneElements;
  const int count = lane_count(begin, sum.count);
  if (count == 0) return;
  auto* dst = static_cast<Dst*>(sum.dst) + begin;
  Lane<Dst> stored = {};
  if (sum.accumulate) stored = load_lane(static_cast<const Dst*>(dst), count);
  Lane<float> total = {};
  for (int part = 0; part < sum.parts; part += kBatchParts) {
    LaneCodes codes[kBatchParts];
    std::uint32_t scales[kBatchParts];
    // Past the end, the last part is read again and not added, so that loads have no branches.
    for (int k = 0; k < kBatchParts; ++k) {
      const std::int64_t from = smaller(part + k, sum.parts - 1) * sum.stride;
      codes[k] = load_codes(sum.first.codes + from + begin);
      scales[k] = sum.first.scales[from + at];
    }
    each_of(std::make_integer_sequence<int, kBatchParts>{}, [&](auto constant) {
      constexpr int k = decltype(constant)::value;
      if (part + k >= sum.parts) return;
      const Lane<float> values = lane_values<Code>(codes[k], scales[k]);
      for (int i = 0; i < kLaneElements; ++i) {
        total.at[i] = part + k == 0 ? values.at[i] : total.at[i] + values.at[i];
      }
    });
  }
  for (int i = 0; i < kLaneElements; ++i) {
    finish(stored.at[i], total.at[i], sum.accumulate, 1, 1.0f, sum.scale);
    if (i < count) side.wrote(stored.at[i]);
  }
  store_lane(dst, stored, count);
}

// ---- Launches ----

// Cuts sorted segments into launches, which together have all blocks of the wire. Calls
// launch(begin, end, first, last) with the numbers of the segments and the blocks.
template <class Segment, class Launch>
void visit_block_launches(const std::vector<Segment>& segments, std::int64_t blocks,
                          std::size_t most_segments, const Launch& launch) {
  std::int64_t first = 0;
  std::size_t begin = 0;
  do {
    const std::size_t end =
        begin + most_segments < segments.size() ? begin + most_segments : segments.size();
    const std::int64_t last = end == segments.size() ? blocks : segments[end].first_block;
    launch(begin, end, first, last);
    first = last;
    begin = end;
  } while (begin < segments.size());
}

template <int kCapacity, class Segment>
SegmentTable<Segment, kCapacity> table_of(const std::vector<Segment>& segments, std::size_t begin,
                                          std::size_t end, std::int64_t first, std::int64_t last) {
  SegmentTable<Segment, kCapacity> table;
  table.count = static_cast<int>(end - begin);
  table.first = first;
  table.last = last;
  for (std::size_t i = begin; i < end; ++i) table.at[i - begin] = segments[i];
  return table;
}

inline WirePart part_of(const BlockFormat& format, const void* wire, std::int64_t bytes) {
  auto* codes = static_cast<std::uint8_t*>(const_cast<void*>(wire));
  return {codes, codes + wire_blocks(format, bytes) * format.block, format.block};
}

// The sum with decode_sum_cpu's arguments, which it checks as decode_sum_cpu does.
SummedParts summed_parts(const BlockFormat& format, const void* wires, int parts, void* dst,
                         std::int64_t count, const Epilogue& epilogue);

template <class Visit>
void visit_block_kernel(BlockCode code, DType dtype, const Visit& visit) {
  const auto visit_float = [&](auto known) {
    if (dtype == DType::f16) return visit(known, Half{});
    if (dtype == DType::bf16) return visit(known, BFloat16{});
    return visit(known, float{});
  };
  return code == BlockCode::mxint8 ? visit_float(MxInt8{}) : visit_float(MxFp8{});
}

// These run the CUDA kernels' code on the CPU, thread by thread, with `teams` teams and at most
// `most_segments` segments in a launch.
void walk_encode(const BlockFormat& format, const std::vector<EncodedSegment>& segments,
                 DType dtype, void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                 std::int64_t teams, std::size_t most_segments);
void walk_decode(const BlockFormat& format, const void* wire, std::int64_t bytes,
                 const std::vector<DecodedSegment>& segments, DType dtype, std::int64_t teams,
                 std::size_t most_segments);
void walk_decode_sum(const BlockFormat& format, const void* wires, int parts, void* dst,
                     std::int64_t count, const Epilogue& epilogue, std::int64_t teams);

}  // namespace shardcomm
