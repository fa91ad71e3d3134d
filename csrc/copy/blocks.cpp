#include "copy/blocks.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace shardcomm {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

void raise_to(std::uint32_t& most, std::uint32_t value) {
  std::uint32_t known = __atomic_load_n(&most, __ATOMIC_RELAXED);
  while (known < value && !__atomic_compare_exchange_n(&most, &known, value, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
  }
}

}  // namespace

std::int64_t wire_bytes(const BlockFormat& format, std::int64_t elements) {
  check_format(format);
  if (elements < 0) {
    refuse("elements is " + std::to_string(elements) + ", it must be at least 0");
  }
  const std::int64_t blocks = divide_up(elements, format.block);
  if (blocks > (std::numeric_limits<std::int64_t>::max() - kWireAlignBytes) / (format.block + 1)) {
    refuse("elements is " + std::to_string(elements) + ", whose bytes do not fit into 63 bits");
  }
  return divide_up(blocks * (format.block + 1), kWireAlignBytes) * kWireAlignBytes;
}

void check_format(const BlockFormat& format) {
  if (format.block == 32 || format.block == 64 || format.block == 128) return;
  refuse("block is " + std::to_string(format.block) + "; accepted: 32, 64 and 128");
}

void check_wire(const BlockFormat& format, const void* wire, std::int64_t bytes, DType dtype) {
  check_format(format);
  if (!is_convertible(dtype)) {
    refuse(std::string("dtype is ") + name(dtype) + "; accepted: f32, bf16 and f16");
  }
  if (bytes < 0 || bytes % kWireAlignBytes != 0) {
    refuse("the wire has " + std::to_string(bytes) +
           " bytes; it must have a multiple of 128, as wire_bytes says");
  }
  if (reinterpret_cast<std::uintptr_t>(wire) % kWireAlignBytes != 0) {
    refuse("the wire is not aligned to 128 bytes");
  }
}

void check_threads(int threads) {
  if (threads < 1) {
    refuse("threads is " + std::to_string(threads) + ", it must be at least 1");
  }
}

void check_parts(const BlockFormat& format, const void* wires, int parts, std::int64_t count,
                 const Epilogue& epilogue) {
  check_wire(format, wires, wire_bytes(format, count), epilogue.dtype);
  if (parts < 1) refuse("parts is " + std::to_string(parts) + ", it must be at least 1");
}

// Relaxed: who reads the numbers has waited for the calls, and that orders it.
void report(const BlockTally& tally, BlockStats* stats) {
  if (stats == nullptr) return;
  raise_to(stats->bound_bits, tally.bound);
  raise_to(stats->seen_bits, tally.seen);
  __atomic_fetch_add(&stats->flagged, tally.flagged, __ATOMIC_RELAXED);
}

template <class Segment>
std::vector<Segment> sorted(const BlockFormat& format, const std::vector<Segment>& segments,
                            std::int64_t blocks) {
  std::vector<Segment> result;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    if (segment.count < 0 || segment.first_block < 0 || segment.first_block > blocks ||
        divide_up(segment.count, format.block) > blocks - segment.first_block) {
      refuse("segments[" + std::to_string(i) + "] has " + std::to_string(segment.count) +
             " elements from block " + std::to_string(segment.first_block) +
             " on; it must lie in the " + std::to_string(blocks) + " blocks of the wire");
    }
    if (segment.count > 0) result.push_back(segment);
  }
  const auto before = [](const Segment& a, const Segment& b) {
    return a.first_block < b.first_block;
  };
  std::sort(result.begin(), result.end(), before);
  for (std::size_t i = 1; i < result.size(); ++i) {
    const Segment& last = result[i - 1];
    if (last.first_block + divide_up(last.count, format.block) > result[i].first_block) {
      refuse("segments overlap at block " + std::to_string(result[i].first_block) +
             " of the wire; each begins at the first block after another, or later");
    }
  }
  return result;
}

template std::vector<EncodedSegment> sorted(const BlockFormat&, const std::vector<EncodedSegment>&,
                                            std::int64_t);
template std::vector<DecodedSegment> sorted(const BlockFormat&, const std::vector<DecodedSegment>&,
                                            std::int64_t);

}  // namespace shardcomm
