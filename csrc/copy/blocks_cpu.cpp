// The CPU executor of block formats. Each thread has a range of the wire's blocks, which it cuts at
// the segments; whole blocks go through the loops in runs, a partial one on its own.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "copy/block_element.h"
#include "copy/block_loops.h"
#include "copy/blocks.h"
#include "copy/nonfinite.h"
#include "copy/reduce_element.h"
#include "copy/streaming.h"
#include "copy/workers.h"

namespace shardcomm {
namespace {

constexpr int kMostBlock = 128;
// Sums that are not stored as they are wait in the nearest cache, in pieces of this many elements.
constexpr std::int64_t kPieceElements = 2048;

// Runs work(first, last) on up to `threads` threads, each with a range of the blocks.
template <class Work>
void share_blocks(const BlockFormat& format, std::int64_t blocks, int threads, const Work& work) {
  const std::int64_t shares =
      std::max<std::int64_t>(1, smaller(threads, blocks * format.block / kElementsPerThread));
  // Whole pieces, so that threads write to different lines.
  const std::int64_t piece = kPieceElements / format.block;
  const std::int64_t each = divide_up(divide_up(blocks, piece), shares) * piece;
  Workers workers;
  for (std::int64_t first = each; first < blocks; first += each) {
    workers.start([&work, first, last = smaller(blocks, first + each)] { work(first, last); });
  }
  work(0, smaller(blocks, each));
}

// Calls run(segment, begin, count, block) for the elements [begin, begin + count) of each segment
// in the blocks [first, last), which stand from `block` on: once for all whole blocks, and once for
// a partial one. Calls gap(begin, end) for the blocks between.
template <class Segment, class Run, class Gap>
void visit_blocks(const std::vector<Segment>& segments, int block, std::int64_t first,
                  std::int64_t last, const Run& run, const Gap& gap) {
  const auto end_of = [block](const Segment& segment) {
    return segment.first_block + divide_up(segment.count, block);
  };
  auto segment =
      std::upper_bound(segments.begin(), segments.end(), first,
                       [&](std::int64_t at, const Segment& each) { return at < end_of(each); });
  std::int64_t at = first;
  for (; segment != segments.end() && segment->first_block < last; ++segment) {
    if (at < segment->first_block) gap(at, segment->first_block);
    at = std::max(at, segment->first_block);
    const std::int64_t begin = (at - segment->first_block) * block;
    const std::int64_t count = smaller(segment->count - begin, (last - at) * block);
    const std::int64_t whole = count / block * block;
    if (whole > 0) run(*segment, begin, whole, at);
    if (whole < count) run(*segment, begin + whole, count - whole, at + whole / block);
    at += divide_up(count, block);
  }
  if (at < last) gap(at, last);
}

bool is_worth_streaming(std::int64_t bytes) { return bytes >= kStreamingRunBytes; }

}  // namespace

void encode_cpu(const BlockFormat& format, const std::vector<EncodedSegment>& segments, DType dtype,
                void* wire, std::int64_t bytes, std::uint64_t seed, BlockStats* stats,
                int threads) {
  check_wire(format, wire, bytes, dtype);
  check_threads(threads);
  const int block = format.block;
  const std::int64_t blocks = wire_blocks(format, bytes);
  const std::vector<EncodedSegment> ordered = sorted(format, segments, blocks);
  const EncodeKernel kernel = encode_kernel(format, dtype, stats != nullptr);
  const auto item_bytes = static_cast<std::int64_t>(itemsize(dtype));
  auto* codes = static_cast<std::uint8_t*>(wire);
  std::uint8_t* scales = codes + blocks * block;
  const bool streaming = is_worth_streaming(bytes);

  share_blocks(format, blocks, threads, [&](std::int64_t first, std::int64_t last) {
    BlockTally tally;
    const auto encode = [&](const void* src, std::int64_t at, std::int64_t count) {
      kernel({src, count, block, codes + at * block, scales + at, seed, at * block, &tally,
              streaming});
    };
    const auto run = [&](const EncodedSegment& segment, std::int64_t begin, std::int64_t count,
                         std::int64_t at) {
      const auto* src = static_cast<const std::byte*>(segment.src) + begin * item_bytes;
      if (count >= block) return encode(src, at, count / block);
      alignas(kLineBytes) std::byte padded[kMostBlock * sizeof(float)] = {};
      std::memcpy(padded, src, static_cast<std::size_t>(count * item_bytes));
      encode(padded, at, 1);
    };
    const auto gap = [&](std::int64_t begin, std::int64_t end) {
      std::memset(codes + begin * block, 0, static_cast<std::size_t>((end - begin) * block));
      std::memset(scales + begin, 0, static_cast<std::size_t>(end - begin));
    };
    visit_blocks(ordered, block, first, last, run, gap);
    report(tally, stats);
    if (streaming) streaming_fence();
  });
  // What follows the last scale is never read, and is the same in every run all the same.
  std::memset(scales + blocks, 0, static_cast<std::size_t>(bytes - blocks * (block + 1)));
}

void decode_cpu(const BlockFormat& format, const void* wire, std::int64_t bytes,
                const std::vector<DecodedSegment>& segments, DType dtype, int threads) {
  check_wire(format, wire, bytes, dtype);
  check_threads(threads);
  const int block = format.block;
  const std::int64_t blocks = wire_blocks(format, bytes);
  const std::vector<DecodedSegment> ordered = sorted(format, segments, blocks);
  const DecodeKernel kernel = decode_kernel(format, dtype);
  const auto item_bytes = static_cast<std::int64_t>(itemsize(dtype));
  const auto* codes = static_cast<const std::uint8_t*>(wire);
  const std::uint8_t* scales = codes + blocks * block;
  const bool streaming = is_worth_streaming(blocks * block * item_bytes);

  share_blocks(format, blocks, threads, [&](std::int64_t first, std::int64_t last) {
    const auto decode = [&](std::int64_t at, std::int64_t count, void* dst, bool past_caches) {
      kernel({codes + at * block, scales + at, 1, 0, count, block, dst, false, 1.0f, past_caches});
    };
    const auto run = [&](const DecodedSegment& segment, std::int64_t begin, std::int64_t count,
                         std::int64_t at) {
      auto* dst = static_cast<std::byte*>(segment.dst) + begin * item_bytes;
      if (count >= block) return decode(at, count / block, dst, streaming);
      alignas(kLineBytes) std::byte padded[kMostBlock * sizeof(float)];
      decode(at, 1, padded, false);
      std::memcpy(dst, padded, static_cast<std::size_t>(count * item_bytes));
    };
    visit_blocks(ordered, block, first, last, run, [](std::int64_t, std::int64_t) {});
    if (streaming) streaming_fence();
  });
}

void decode_sum_cpu(const BlockFormat& format, const void* wires, int parts, void* dst,
                    std::int64_t count, const Epilogue& epilogue, int threads) {
  check_parts(format, wires, parts, count, epilogue);
  check_threads(threads);
  const int block = format.block;
  const std::int64_t stride = wire_bytes(format, count);
  const std::int64_t scales_at = wire_blocks(format, stride) * block;
  const DecodeKernel kernel = decode_kernel(format, DType::f32);
  const FinishKernel finish = finish_kernel(epilogue);
  const auto item_bytes = static_cast<std::int64_t>(itemsize(epilogue.dtype));
  const auto* codes = static_cast<const std::uint8_t*>(wires);
  // Sums that are stored as floats need no pass of their own, but those of a partial block, and of
  // more parts than are added at once.
  const bool stored =
      epilogue.dtype == DType::f32 && !epilogue.accumulate && epilogue.nonfinite == nullptr;
  const float scale = stored ? epilogue.scale : 1.0f;
  const std::int64_t stored_blocks = stored && parts <= kPartsAtOnce ? count / block : 0;
  const bool streaming = stored_blocks > 0 && is_worth_streaming(count * item_bytes);

  share_blocks(
      format, divide_up(count, block), threads, [&](std::int64_t first, std::int64_t last) {
        const auto sum = [&](std::int64_t at, std::int64_t blocks, float* to, bool past_caches) {
          for (int part = 0; part < parts; part += kPartsAtOnce) {
            const std::uint8_t* from = codes + part * stride;
            const int rest = parts - part;
            kernel({from + at * block, from + scales_at + at, std::min(rest, kPartsAtOnce), stride,
                    blocks, block, to, part > 0, rest > kPartsAtOnce ? 1.0f : scale, past_caches});
          }
        };
        const std::int64_t end = smaller(last, stored_blocks);
        if (first < end) {
          sum(first, end - first, static_cast<float*>(dst) + first * block, streaming);
        }
        alignas(kLineBytes) float sums[kPieceElements];
        const std::int64_t each = kPieceElements / block;
        for (std::int64_t at = std::max(first, end); at < last; at += each) {
          const std::int64_t blocks = smaller(each, last - at);
          sum(at, blocks, sums, false);
          const std::int64_t elements = smaller(blocks * block, count - at * block);
          auto* to = static_cast<std::byte*>(dst) + at * block * item_bytes;
          if (stored) {
            std::memcpy(to, sums, static_cast<std::size_t>(elements * item_bytes));
          } else {
            finish(to, sums, elements, epilogue.scale, epilogue.nonfinite);
          }
        }
        if (streaming) streaming_fence();
      });
}

}  // namespace shardcomm
