// The CPU executor of block formats. Each thread has a range of the wire's blocks, which it cuts at
// the segments; whole blocks go through the loops in runs, a partial one on its own.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "copy/block_element.h"
#include "copy/blocks.h"
#include "copy/nonfinite.h"
#include "copy/philox.h"
#include "copy/reduce_element.h"
#include "copy/simd.h"
#include "copy/streaming.h"
#include "copy/workers.h"

namespace shardcomm {
namespace {

constexpr int kMostBlock = 128;
// Loops run over 32 elements at a time, so that the compiler knows how many.
constexpr int kGroup = 32;
// Blocks go to memory in pieces of this many elements, which stay in the nearest cache until then.
constexpr std::int64_t kPieceElements = 2048;

// ---- The loops ----

// `blocks` whole blocks from `src`, the first of which begins at element `first` of the wire.
struct EncodeRun {
  const void* src;
  std::int64_t blocks;
  int block;
  std::uint8_t* codes;
  std::uint8_t* scales;
  std::uint64_t seed;
  std::int64_t first;
  BlockTally* tally;
};

template <class Code, class Src, bool kStochastic, bool kTallies>
struct Encode {
  [[gnu::always_inline]] static void run(EncodeRun run) {
    // The usual size is a constant of its own loops.
    run.block == kGroup ? encode_all(run, kGroup) : encode_all(run, run.block);
  }

 private:
  static constexpr int kBatch = 16;

  [[gnu::always_inline]] static void encode_all(const EncodeRun& run, int block) {
    for (std::int64_t first = 0; first < run.blocks; first += kBatch) {
      encode_batch(run, block, first, static_cast<int>(smaller(kBatch, run.blocks - first)));
    }
  }

  // In steps, each of which is the same for several blocks: no block waits for another.
  [[gnu::always_inline]] static void encode_batch(const EncodeRun& run, int block,
                                                  std::int64_t first, int blocks) {
    const auto* from = static_cast<const Src*>(run.src) + first * block;
    std::uint32_t largest_of_block[kBatch] = {};
    std::uint32_t scales[kBatch];
    for (int i = 0; i < blocks; ++i) largest_of_block[i] = largest_of(from + i * block, block);
    for (int i = 0; i < kBatch; ++i) scales[i] = scale_of<Code>(largest_of_block[i]);
    std::uint8_t* codes = run.codes + first * block;
    for (int i = 0; i < blocks; ++i, from += block, codes += block) {
      const std::int64_t b = first + i;
      const std::uint32_t largest = largest_of_block[i];
      const std::uint32_t scale = scales[i];
      run.scales[b] = static_cast<std::uint8_t>(scale);
      float error = 0;
      if (scale == kNanScale) {
        std::memset(codes, 0, static_cast<std::size_t>(block));
      } else if (scale >= kLeastPlainScale) {
        error = encode(run, block, b, from, codes, PlainUnits<Code>(scale));
      } else {
        error = encode(run, block, b, from, codes, TinyUnits<Code>(scale));
      }
      if constexpr (kTallies) run.tally->add<Code>(largest, scale, error, kStochastic);
    }
  }

  // Bits of floats without their signs have the floats' order, and those of NaN come last. The
  // compiler makes vectors of a maximum of integers, not of floats.
  [[gnu::always_inline]] static std::uint32_t largest_of(const Src* __restrict from, int block) {
    using Bits = std::conditional_t<sizeof(Src) == 4, std::int32_t, std::int16_t>;
    constexpr Bits kMagnitudeBits = std::numeric_limits<Bits>::max();
    Bits largest = 0;
    for (int group = 0; group < block; group += kGroup) {
      for (int i = 0; i < kGroup; ++i) {
        Bits bits;
        std::memcpy(&bits, from + group + i, sizeof bits);
        bits = static_cast<Bits>(bits & kMagnitudeBits);
        largest = bits > largest ? bits : largest;
      }
    }
    Src element;
    std::memcpy(&element, &largest, sizeof element);
    return float_bits(load(element));
  }

  template <class Units>
  [[gnu::always_inline]] static float encode(const EncodeRun& run, int block, std::int64_t b,
                                             const Src* __restrict from,
                                             std::uint8_t* __restrict codes, const Units& units) {
    std::int32_t error = 0;
    for (int group = 0; group < block; group += kGroup) {
      std::uint32_t random[kGroup];
      if constexpr (kStochastic) {
        const auto quad = static_cast<std::uint64_t>(run.first + b * block + group) / 4;
        for (unsigned i = 0; i < kGroup / 4; ++i) {
          const PhiloxWords words = philox(run.seed, quad + i);
          for (unsigned k = 0; k < 4; ++k) random[4 * i + k] = words.at[k];
        }
      }
      std::uint32_t wide[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        const RoundedElement rounded = Code::template round<kStochastic>(
            units(load(from[group + i])), kStochastic ? random[i] : 0);
        wide[i] = rounded.code;
        if constexpr (kTallies) {
          const auto bits = static_cast<std::int32_t>(float_bits(rounded.error) & kMagnitude);
          error = bits > error ? bits : error;
        }
      }
      // Apart, so that all before it is a loop over wide elements.
      for (int i = 0; i < kGroup; ++i) codes[group + i] = static_cast<std::uint8_t>(wide[i]);
    }
    return float_of_bits(static_cast<std::uint32_t>(error));
  }
};

// Writes a block's elements, or adds them to what is there.
template <class Code, class Dst, bool kAdds>
struct Decode {
  [[gnu::always_inline]] static void run(const std::uint8_t* codes, const std::uint8_t* scales,
                                         std::int64_t blocks, int block, void* dst) {
    auto* to = static_cast<Dst*>(dst);
    for (std::int64_t b = 0; b < blocks; ++b, codes += block, to += block) {
      const std::uint32_t scale = scales[b];
      if (scale >= kLeastPlainScale) {
        decode(codes, block, to, PlainValues<Code>(scale));
      } else {
        decode(codes, block, to, TinyValues<Code>(scale));
      }
    }
  }

 private:
  template <class Values>
  [[gnu::always_inline]] static void decode(const std::uint8_t* __restrict codes, int block,
                                            Dst* __restrict to, const Values& values) {
    for (int group = 0; group < block; group += kGroup) {
      for (int i = 0; i < kGroup; ++i) {
        const float value = values(Code::value(codes[group + i]));
        if constexpr (kAdds) {
          to[group + i] += value;
        } else if constexpr (std::is_same_v<Dst, BFloat16> && Values::kFewBits) {
          to[group + i].bits = static_cast<std::uint16_t>(float_bits(value) >> 16);
        } else {
          store(to[group + i], value);
        }
      }
    }
  }
};

template <class Dst, bool kAccumulate, class Side>
struct FinishSum {
  [[gnu::always_inline]] static void run(void* dst, const float* sums, std::int64_t count,
                                         float scale, std::int32_t* nonfinite) {
    auto* __restrict to = static_cast<Dst*>(dst);
    const float* __restrict from = sums;
    Side side;
    for (std::int64_t i = 0; i < count; ++i) {
      finish(to[i], from[i], kAccumulate, 1, 1.0f, scale);
      side.wrote(to[i]);
    }
    report(side, nonfinite);
  }
};

// ---- The choice of loops ----

using EncodeKernel = void (*)(EncodeRun);
using DecodeKernel = void (*)(const std::uint8_t*, const std::uint8_t*, std::int64_t, int, void*);
using FinishKernel = void (*)(void*, const float*, std::int64_t, float, std::int32_t*);

template <class Visit>
void with_code(BlockCode code, Visit visit) {
  return code == BlockCode::mxint8 ? visit(MxInt8{}) : visit(MxFp8{});
}

template <class Visit>
void with_float(DType dtype, Visit visit) {
  if (dtype == DType::f16) return visit(Half{});
  if (dtype == DType::bf16) return visit(BFloat16{});
  return visit(float{});
}

template <class Code, class Src, bool kStochastic>
EncodeKernel encode_kernel(bool tallies) {
  return tallies ? best_of<Encode<Code, Src, kStochastic, true>, 256>()
                 : best_of<Encode<Code, Src, kStochastic, false>, 256>();
}

EncodeKernel encode_kernel(const BlockFormat& format, DType dtype, bool tallies) {
  EncodeKernel kernel = nullptr;
  with_code(format.code, [&](auto code) {
    with_float(dtype, [&](auto src) {
      using Code = decltype(code);
      using Src = decltype(src);
      kernel = format.rounding == Rounding::stochastic ? encode_kernel<Code, Src, true>(tallies)
                                                       : encode_kernel<Code, Src, false>(tallies);
    });
  });
  return kernel;
}

DecodeKernel decode_kernel(const BlockFormat& format, DType dtype) {
  DecodeKernel kernel = nullptr;
  with_code(format.code, [&](auto code) {
    with_float(dtype,
               [&](auto dst) { kernel = best_of<Decode<decltype(code), decltype(dst), false>>(); });
  });
  return kernel;
}

DecodeKernel add_kernel(const BlockFormat& format) {
  DecodeKernel kernel = nullptr;
  with_code(format.code,
            [&](auto code) { kernel = best_of<Decode<decltype(code), float, true>>(); });
  return kernel;
}

FinishKernel finish_kernel(const Epilogue& epilogue) {
  FinishKernel kernel = nullptr;
  with_float(epilogue.dtype, [&](auto dst) {
    using Dst = decltype(dst);
    kernel = epilogue.accumulate ? best_of<FinishSum<Dst, true, Watch<Dst>>>()
                                 : best_of<FinishSum<Dst, false, Watch<Dst>>>();
  });
  return kernel;
}

// ---- Ranges of blocks ----

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

void write_past_caches(std::byte* dst, const std::byte* src, std::int64_t bytes) {
  const VectorSpan span = vector_span(reinterpret_cast<std::uintptr_t>(dst), bytes, 1, kLineBytes);
  std::memcpy(dst, src, static_cast<std::size_t>(span.head));
  copy_streaming(dst + span.head, src + span.head, span.body);
  std::memcpy(dst + span.head + span.body, src + span.head + span.body,
              static_cast<std::size_t>(span.tail));
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
    const auto encode = [&](const void* src, std::int64_t at, std::int64_t count,
                            std::uint8_t* to) {
      kernel({src, count, block, to, scales + at, seed, at * block, &tally});
    };
    const auto run = [&](const EncodedSegment& segment, std::int64_t begin, std::int64_t count,
                         std::int64_t at) {
      const auto* src = static_cast<const std::byte*>(segment.src) + begin * item_bytes;
      if (count < block) {
        alignas(kLineBytes) std::byte padded[kMostBlock * sizeof(float)] = {};
        std::memcpy(padded, src, static_cast<std::size_t>(count * item_bytes));
        return encode(padded, at, 1, codes + at * block);
      }
      if (!streaming) return encode(src, at, count / block, codes + at * block);
      alignas(kLineBytes) std::uint8_t piece[kPieceElements];
      for (std::int64_t end = at + count / block; at < end;) {
        const std::int64_t n = smaller(end - at, kPieceElements / block);
        encode(src, at, n, piece);
        write_past_caches(reinterpret_cast<std::byte*>(codes + at * block),
                          reinterpret_cast<const std::byte*>(piece), n * block);
        src += n * block * item_bytes;
        at += n;
      }
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
    alignas(kLineBytes) std::byte piece[kPieceElements * sizeof(float)];
    const auto run = [&](const DecodedSegment& segment, std::int64_t begin, std::int64_t count,
                         std::int64_t at) {
      auto* dst = static_cast<std::byte*>(segment.dst) + begin * item_bytes;
      if (count < block) {
        kernel(codes + at * block, scales + at, 1, block, piece);
        std::memcpy(dst, piece, static_cast<std::size_t>(count * item_bytes));
        return;
      }
      if (!streaming) {
        return kernel(codes + at * block, scales + at, count / block, block, dst);
      }
      for (std::int64_t end = at + count / block; at < end;) {
        const std::int64_t n = smaller(end - at, kPieceElements / block);
        kernel(codes + at * block, scales + at, n, block, piece);
        write_past_caches(dst, piece, n * block * item_bytes);
        dst += n * block * item_bytes;
        at += n;
      }
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
  const DecodeKernel decode = decode_kernel(format, DType::f32);
  const DecodeKernel add = add_kernel(format);
  const FinishKernel finish = finish_kernel(epilogue);
  const auto item_bytes = static_cast<std::int64_t>(itemsize(epilogue.dtype));
  const auto* codes = static_cast<const std::uint8_t*>(wires);
  // Sums that are stored as they are need no pass of their own.
  const bool finished = epilogue.dtype == DType::f32 && epilogue.scale == 1.0f &&
                        !epilogue.accumulate && epilogue.nonfinite == nullptr;
  // Accumulation has the destination in the cache already.
  const bool streaming = !epilogue.accumulate && is_worth_streaming(count * item_bytes);

  share_blocks(
      format, divide_up(count, block), threads, [&](std::int64_t first, std::int64_t last) {
        alignas(kLineBytes) float sums[kPieceElements];
        alignas(kLineBytes) std::byte piece[kPieceElements * sizeof(float)];
        const std::int64_t each = kPieceElements / block;
        for (std::int64_t at = first; at < last; at += each) {
          const std::int64_t blocks = smaller(each, last - at);
          for (int part = 0; part < parts; ++part) {
            const std::uint8_t* from = codes + part * stride;
            (part == 0 ? decode : add)(from + at * block, from + scales_at + at, blocks, block,
                                       sums);
          }
          const std::int64_t elements = smaller(blocks * block, count - at * block);
          auto* to = static_cast<std::byte*>(dst) + at * block * item_bytes;
          const std::byte* result = finished ? reinterpret_cast<const std::byte*>(sums) : piece;
          if (!finished) {
            finish(streaming ? piece : to, sums, elements, epilogue.scale, epilogue.nonfinite);
          }
          if (streaming) {
            write_past_caches(to, result, elements * item_bytes);
          } else if (finished) {
            std::memcpy(to, result, static_cast<std::size_t>(elements * item_bytes));
          }
        }
        if (streaming) streaming_fence();
      });
}

}  // namespace shardcomm
