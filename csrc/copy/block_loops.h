// The loops that encode, decode and finish runs of whole blocks on a CPU; blocks_cpu.cpp cuts work
// into such runs.
#pragma once

#include <cstdint>

#include "copy/block_element.h"
#include "copy/blocks.h"
#include "copy/operation.h"

namespace shardcomm {

// A constant trip count of 32 lets the compiler vectorise without a remainder loop, and 32 codes
// fill a vector by hand.
constexpr int kGroup = 32;
// A processor reads ahead in a few dozen places at most. With more parts than that, each read
// waits.
constexpr int kPartsAtOnce = 16;

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
  bool streaming;  // past the caches, where a loop can do that; `codes` is then aligned to 32 bytes

  // What follows `done` blocks of such elements.
  template <class Src>
  EncodeRun after(std::int64_t done) const {
    const std::int64_t elements = done * block;
    EncodeRun next = *this;
    next.src = static_cast<const Src*>(src) + elements;
    next.blocks -= done;
    next.codes += elements;
    next.scales += done;
    next.first += elements;
    return next;
  }
};

// The elements of `blocks` whole blocks, or their sums over `parts` wire parts, each `stride` bytes
// behind the one before, in this order. Sums are floats; they begin with what stands in `dst` if
// `adds` is set, and are stored times `scale`.
struct DecodeRun {
  const std::uint8_t* codes;  // of the first part
  const std::uint8_t* scales;
  int parts;
  std::int64_t stride;
  std::int64_t blocks;
  int block;
  void* dst;
  bool adds;
  float scale;
  bool streaming;

  template <class Dst>
  DecodeRun after(std::int64_t done) const {
    const std::int64_t elements = done * block;
    DecodeRun next = *this;
    next.codes += elements;
    next.scales += done;
    next.blocks -= done;
    next.dst = static_cast<Dst*>(dst) + elements;
    return next;
  }
};

using EncodeKernel = void (*)(EncodeRun);
using DecodeKernel = void (*)(DecodeRun);
using FinishKernel = void (*)(void*, const float*, std::int64_t, float, std::int32_t*);

// The loop for a format and the dtype of what it reads; with `tallies` it also counts the errors.
EncodeKernel encode_kernel(const BlockFormat& format, DType dtype, bool tallies);
// The loop for a format and the dtype of what it writes.
DecodeKernel decode_kernel(const BlockFormat& format, DType dtype);
// Rounds sums of floats to what the epilogue writes.
FinishKernel finish_kernel(const Epilogue& epilogue);

}  // namespace shardcomm
